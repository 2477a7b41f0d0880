"""The native library: where it is, loading it into llama-cpp-python, and the C functions of hobbit.h.

llama-cpp-python loads libllama from the folder that LLAMA_CPP_LIB_PATH names, when it is first imported. This module
decides which folder that is, imports `llama_cpp`, and makes sure that what got loaded is ours: one process must not
hold two copies of ggml. Nothing else in the package touches environment variables or ctypes signatures.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BINDING_VERSION = "0.3.36"
INSTALL_BINDING = (
    "SKBUILD_WHEEL_CMAKE=false pip install --no-cache-dir --no-deps --no-binary llama-cpp-python "
    f"llama-cpp-python=={BINDING_VERSION}"
)

_PACKAGE = Path(__file__).resolve().parent
_FILE_NAMES = {"darwin": ("libllama.dylib", "libllama.so"), "win32": ("llama.dll", "libllama.dll")}
LIBRARY_NAMES = _FILE_NAMES.get(sys.platform, ("libllama.so",))


def _has_library(folder: Path) -> bool:
    return any((folder / name).is_file() for name in LIBRARY_NAMES)


def find_library_dir() -> Path:
    """The folder of our libraries and programs.

    A place that the user names is taken or refused, never passed over: LLAMA_CPP_LIB (a file), LLAMA_CPP_LIB_PATH (a
    folder). Without either: `lib` in the installed package, else `build/bin` of the clone that this file lies in.

    Raises:
        ImportError: no library there; the message lists what was tried.
    """
    file = os.environ.get("LLAMA_CPP_LIB")
    if file:
        path = Path(file).resolve()
        if path.name not in LIBRARY_NAMES or not path.is_file():
            raise ImportError(f"LLAMA_CPP_LIB={file}: no file of the name {' or '.join(LIBRARY_NAMES)}")
        return path.parent
    folder = os.environ.get("LLAMA_CPP_LIB_PATH")
    if folder:
        if not _has_library(Path(folder)):
            raise ImportError(f"LLAMA_CPP_LIB_PATH={folder}: there is no {' or '.join(LIBRARY_NAMES)}")
        return Path(folder).resolve()
    tried = [_PACKAGE / "lib"]
    if (_PACKAGE.parent / "llama.cpp" / "upstream.toml").is_file():
        tried.append(_PACKAGE.parent / "build" / "bin")
    for candidate in tried:
        if _has_library(candidate):
            return candidate
    raise ImportError(
        f"no {' or '.join(LIBRARY_NAMES)} in {' or '.join(map(str, tried))}: build it (make build), install the "
        "package (pip install .), or name its folder in LLAMA_CPP_LIB_PATH"
    )


def _import_binding() -> tuple[Any, Path]:
    """The module `llama_cpp.llama_cpp` with our library in it, and the library's folder."""
    early = "llama_cpp" in sys.modules
    try:
        version = importlib.metadata.version("llama-cpp-python")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            f"hobbit_py needs the Python code of llama-cpp-python {BINDING_VERSION}, without its native build:\n"
            f"    {INSTALL_BINDING}"
        ) from None
    if version != BINDING_VERSION:
        raise ImportError(
            f"hobbit_py needs llama-cpp-python {BINDING_VERSION}, whose structs match our library, "
            f"and {version} is installed:\n    {INSTALL_BINDING}"
        )
    if not early:
        folder = find_library_dir()
        os.environ["LLAMA_CPP_LIB_PATH"] = str(folder)
        os.environ.setdefault("MTMD_CPP_LIB", str(folder))
    import llama_cpp.llama_cpp as binding

    folder = Path(binding._base_path)
    missing = [name for name in _SIGNATURES if not hasattr(binding._lib, name)]
    if missing:
        why = "is not HOBBIT's" if len(missing) == len(_SIGNATURES) else f"is of another version (no {missing[0]})"
        cure = (
            "llama_cpp was imported before hobbit_py: import hobbit_py first, or set LLAMA_CPP_LIB_PATH"
            if early
            else "set LLAMA_CPP_LIB_PATH to the folder of HOBBIT's library"
        )
        raise ImportError(f"{binding._lib._name} {why}; {cure}")
    os.environ.setdefault("MTMD_CPP_LIB", str(folder))
    return binding, folder


class OptionStruct(ctypes.Structure):
    """struct hobbit_option."""

    _fields_ = [(name, ctypes.c_char_p) for name in ("name", "flag", "env", "hint", "help")]


class StatsHead(ctypes.Structure):
    """struct hobbit_stats_head."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("prompt_tokens", "prompt_us", "decode_tokens", "decode_us")),
        *((name, ctypes.c_uint64) for name in ("steps", "failed_steps", "prompt_stall_us", "decode_stall_us")),
        *((name, ctypes.c_uint64) for name in ("prompt_disk_us", "decode_disk_us", "expected_wasted_bytes")),
        *((name, ctypes.c_uint64) for name in ("lookups", "hits", "read_bytes", "stall_us")),
        ("cache_bytes", ctypes.c_uint64),
        *((name, ctypes.c_int32) for name in ("slots_high", "slots_low", "resident_high", "resident_low")),
        ("prefetch", ctypes.c_char * 256),
        ("warm_start", ctypes.c_char * 256),
    ]


class CandidatesStruct(ctypes.Structure):
    """struct hobbit_candidates."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("n", "layer", "precision")),
        ("n_tokens", ctypes.c_uint32),
        *((name, ctypes.c_void_p) for name in ("layers", "experts", "stamps", "last", "used", "high")),
    ]


CHOOSE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(CandidatesStruct))

_ctx, _text, _size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
_SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "hobbit_option_get": ([ctypes.c_int], ctypes.POINTER(OptionStruct)),
    "hobbit_config_new": ([], ctypes.c_int32),
    "hobbit_config_set": ([ctypes.c_int32, _text, _text, _text, _size], ctypes.c_bool),
    "hobbit_config_check": ([ctypes.c_int32, _text, _size], ctypes.c_bool),
    "hobbit_from_llama": ([_ctx], _ctx),
    "hobbit_sequence_begin": ([_ctx, ctypes.c_int32], None),
    "hobbit_resize": ([_ctx, _text, _text, _size], ctypes.c_bool),
    "hobbit_resident": ([_ctx, ctypes.POINTER(ctypes.c_int8), _size], _size),
    "hobbit_set_policy": ([_ctx, ctypes.c_void_p, ctypes.c_void_p], None),
    "hobbit_stats_reset": ([_ctx], None),
    "hobbit_stats_json": ([_ctx, _text, _size], _size),
    "hobbit_counter_name": ([ctypes.c_int], _text),
    "hobbit_stats_read": ([_ctx, _ctx, _ctx, _ctx], None),
    "hobbit_placement_json": ([_ctx, _text, _size], _size),
    "hobbit_trace_start": ([_ctx, _text, _text, _size], ctypes.c_bool),
    "hobbit_trace_stop": ([_ctx, _text, _size], ctypes.c_bool),
    "hobbit_replay_open": ([_text, _text, _size], _ctx),
    "hobbit_replay_free": ([_ctx], None),
    "hobbit_replay_run": ([_ctx, _text, _text, _size, _text, _size], _size),
}

CONFIG_KEY = "hobbit.config"

binding, library_dir = _import_binding()
lib: Any = binding._lib
for _name, (_argtypes, _restype) in _SIGNATURES.items():
    getattr(lib, _name).argtypes = _argtypes
    getattr(lib, _name).restype = _restype


def program(name: str) -> Path:
    """A program of ours, which lies beside the library.

    Raises:
        FileNotFoundError: it is not there.
    """
    path = library_dir / (name + (".exe" if sys.platform == "win32" else ""))
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: make build, or pip install . from the clone")
    return path


def read_text(function: Callable[[int | None, Any, int], int], ctx: int | None) -> str:
    """The whole text of a C function that writes like snprintf; the text may grow between two calls."""
    size = 1 << 16
    while True:
        buffer = ctypes.create_string_buffer(size)
        need = function(ctx, buffer, size)
        if need < size:
            return buffer.value.decode("utf-8", errors="replace")
        size = need + 4096


def _counter_names() -> tuple[str, ...]:
    found: list[str] = []
    while name := lib.hobbit_counter_name(len(found)):
        found.append(name.decode())
    return tuple(found)


COUNTER_NAMES = _counter_names()


class Option:
    """One engine option as the library declares it."""

    def __init__(self, raw: OptionStruct) -> None:
        self.name: str = raw.name.decode()
        self.flag: str = raw.flag.decode()
        self.hint: str | None = raw.hint.decode() if raw.hint else None
        self.help: str = raw.help.decode()


def _options() -> dict[str, Option]:
    found: dict[str, Option] = {}
    while raw := lib.hobbit_option_get(len(found)):
        option = Option(raw.contents)
        found[option.name.replace("-", "_")] = option
    return found


OPTIONS = _options()  # by the name of the keyword argument


def option_text(value: object) -> str:
    """A Python value as the text that the engine parses."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value))
    return os.fsdecode(value) if isinstance(value, (bytes, os.PathLike)) else str(value)


def config_new(options: dict[str, object]) -> int:
    """A configuration handle from keyword arguments; None leaves the engine's default.

    Raises:
        ValueError: the engine refuses an option or their combination; the message names what would work.
    """
    error = ctypes.create_string_buffer(1024)
    handle: int = lib.hobbit_config_new()
    for name, value in options.items():
        if value is None:
            continue
        text = os.fsencode(option_text(value))
        if not lib.hobbit_config_set(handle, name.replace("_", "-").encode(), text, error, len(error)):
            raise ValueError(os.fsdecode(error.value))
    if not lib.hobbit_config_check(handle, error, len(error)):
        raise ValueError(os.fsdecode(error.value))
    return handle


#
# what the library says when a call fails: its log lines, per thread
#

_local = threading.local()
_ERROR = 4  # GGML_LOG_LEVEL_ERROR
_AS_PRINTED = {
    1: 4,
    2: 1,
    3: 2,
    4: 3,
}  # debug, info, warning, error as llama-cpp-python numbers them, after an older ggml


@binding.llama_log_callback  # type: ignore[untyped-decorator, unused-ignore]
def _on_log(level: int, text: bytes, user_data: Any) -> None:
    _printing(_AS_PRINTED.get(level, level), text, user_data)
    lines = getattr(_local, "lines", None)
    if level == _ERROR and lines is not None:
        lines.append(text.decode("utf-8", errors="replace").strip())


def _install_log() -> Any:
    import llama_cpp._logger as logger

    binding.llama_log_set(_on_log, None)
    return logger.llama_log_callback


_printing = _install_log()


@contextmanager
def error_lines() -> Iterator[list[str]]:
    """Collects the error lines that the library logs on this thread."""
    outer = getattr(_local, "lines", None)
    lines: list[str] = []
    _local.lines = lines
    try:
        yield lines
    finally:
        _local.lines = outer


def reason(lines: list[str], mark: str) -> str | None:
    """What follows `mark` in the first line that has it."""
    for line in lines:
        _, found, rest = line.partition(mark)
        if found:
            return rest.strip()
    return None
