"""ctypes binding of the parts of ggml that this package needs: `gguf_*` headers and `ggml_quantize_chunk`.

ggml trusts its caller: a wrong type, a missing key or an odd row length is an assertion that ends the process. Every
wrapper here therefore checks first and raises `ToolError`; nothing outside this module calls into the library.
Foreign calls release the GIL, so worker threads quantise in parallel.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from ctypes import POINTER, c_bool, c_char, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from gguf_tools.errors import ExitCode, ToolError, show

F32Array = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]

MAX_DIMS = 4
MAX_NAME = 64  # GGML_MAX_NAME, with the terminating zero
GGUF_VERSION = 3
QNT_VERSION = 2  # GGML_QNT_VERSION
DEFAULT_ALIGNMENT = 32

# GGML_TYPE_COUNT of the pinned ggml. The library exports no such number and reads past its own table beyond it;
# tests/gguf_tools/test_ggml.py checks it against the library's own verdict.
N_TYPES = 43


class KV:
    """Value types of GGUF metadata (enum gguf_type)."""

    U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
    NAMES = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "str", "arr", "u64", "i64", "f64")
    SIZES = (1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8)


_KV_GETTERS: dict[int, tuple[str, Any]] = {
    KV.U8: ("gguf_get_val_u8", ctypes.c_uint8),
    KV.I8: ("gguf_get_val_i8", ctypes.c_int8),
    KV.U16: ("gguf_get_val_u16", ctypes.c_uint16),
    KV.I16: ("gguf_get_val_i16", ctypes.c_int16),
    KV.U32: ("gguf_get_val_u32", c_uint32),
    KV.I32: ("gguf_get_val_i32", ctypes.c_int32),
    KV.F32: ("gguf_get_val_f32", c_float),
    KV.BOOL: ("gguf_get_val_bool", c_bool),
    KV.U64: ("gguf_get_val_u64", c_uint64),
    KV.I64: ("gguf_get_val_i64", c_int64),
    KV.F64: ("gguf_get_val_f64", ctypes.c_double),
}

_KV_DTYPES: dict[int, str] = {
    KV.U8: "u1",
    KV.I8: "i1",
    KV.U16: "<u2",
    KV.I16: "<i2",
    KV.U32: "<u4",
    KV.I32: "<i4",
    KV.F32: "<f4",
    KV.BOOL: "?",
    KV.U64: "<u8",
    KV.I64: "<i8",
    KV.F64: "<f8",
}

_to_float_t = ctypes.CFUNCTYPE(None, c_void_p, POINTER(c_float), c_int64)
_log_t = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)


class _TypeTraits(ctypes.Structure):
    _fields_ = (
        ("type_name", c_char_p),
        ("blck_size", c_int64),
        ("blck_size_interleave", c_int64),
        ("type_size", c_size_t),
        ("is_quantized", c_bool),
        ("to_float", c_void_p),
        ("from_float_ref", c_void_p),
    )


class _GgufInitParams(ctypes.Structure):
    _fields_ = (("no_alloc", c_bool), ("ctx", c_void_p))


class _GgmlInitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


# ------------------------------------------------------------------------------------------------- finding the library


def _library_names() -> tuple[str, ...]:
    if sys.platform == "win32":
        return ("ggml-base.dll", "libggml-base.dll")
    if sys.platform == "darwin":
        return ("libggml-base.dylib",)
    return ("libggml-base.so", "libggml-base.so.0")


def library_folders() -> Iterator[Path]:
    """Where the ggml library may be, best first: environment, installed packages, the repository's build."""
    for variable in ("HOBBIT_GGML_LIB", "LLAMA_CPP_LIB_PATH"):
        value = os.environ.get(variable)
        if value:
            path = Path(value)
            yield path.parent if path.is_file() else path
    package = Path(__file__).resolve().parent
    for name in ("gguf_tools", "hobbit_py", "llama_cpp"):
        yield package.parent / name / "lib"
    yield package.parent / "build" / "bin"


def find_library() -> Path:
    """The ggml-base library file; raises `ToolError` with the places looked at."""
    tried = []
    for folder in library_folders():
        for name in _library_names():
            if (folder / name).is_file():
                return folder / name
        tried.append(str(folder))
    raise ToolError(
        f"the ggml library ({_library_names()[0]}) was not found in {', '.join(tried)}; "
        "build the project or name its folder in HOBBIT_GGML_LIB",
        code=ExitCode.LIBRARY,
    )


class _Log:
    """Keeps ggml's last error line of each thread instead of letting it reach stderr."""

    def __init__(self) -> None:
        self._local = threading.local()

    def add(self, level: int, text: bytes | None, _data: int | None) -> None:
        if text and level >= 3:  # warnings and errors; continuation lines follow their head
            self._local.text = (getattr(self._local, "text", "") + text.decode("utf-8", "replace"))[-2000:]

    def take(self) -> str:
        text: str = getattr(self._local, "text", "")
        self._local.text = ""
        return show("; ".join(line for line in text.splitlines() if line))


_log = _Log()
_log_callback = _log_t(_log.add)


def _declare(lib: ctypes.CDLL) -> None:
    def f(name: str, restype: Any, *argtypes: Any) -> None:
        function = getattr(lib, name)
        function.restype = restype
        function.argtypes = argtypes

    f("ggml_log_set", None, c_void_p, c_void_p)
    f("ggml_log_get", None, POINTER(c_void_p), POINTER(c_void_p))
    f("ggml_version", c_char_p)
    f("ggml_commit", c_char_p)
    f("ggml_get_type_traits", POINTER(_TypeTraits), c_int)
    f("ggml_quantize_chunk", c_size_t, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p)
    f("ggml_quantize_requires_imatrix", c_bool, c_int)
    f("ggml_validate_row_data", c_bool, c_int, c_void_p, c_size_t)
    f("ggml_tensor_overhead", c_size_t)
    f("ggml_init", c_void_p, _GgmlInitParams)
    f("ggml_free", None, c_void_p)
    f("ggml_new_tensor", c_void_p, c_void_p, c_int, c_int, POINTER(c_int64))
    f("ggml_set_name", c_void_p, c_void_p, c_char_p)
    f("gguf_init_from_buffer", c_void_p, c_void_p, c_size_t, _GgufInitParams)
    f("gguf_free", None, c_void_p)
    f("gguf_get_alignment", c_size_t, c_void_p)
    f("gguf_get_data_offset", c_size_t, c_void_p)
    f("gguf_get_n_kv", c_int64, c_void_p)
    f("gguf_find_key", c_int64, c_void_p, c_char_p)
    f("gguf_get_key", c_char_p, c_void_p, c_int64)
    f("gguf_get_kv_type", c_int, c_void_p, c_int64)
    f("gguf_get_arr_type", c_int, c_void_p, c_int64)
    f("gguf_get_arr_n", c_size_t, c_void_p, c_int64)
    f("gguf_get_arr_data", c_void_p, c_void_p, c_int64)
    f("gguf_get_arr_str", c_char_p, c_void_p, c_int64, c_size_t)
    f("gguf_get_val_str", c_char_p, c_void_p, c_int64)
    for name, ctype in _KV_GETTERS.values():
        f(name, ctype, c_void_p, c_int64)
    f("gguf_get_n_tensors", c_int64, c_void_p)
    f("gguf_get_tensor_name", c_char_p, c_void_p, c_int64)
    f("gguf_get_tensor_offset", c_size_t, c_void_p, c_int64)
    f("gguf_get_tensor_size", c_size_t, c_void_p, c_int64)
    f("gguf_get_tensor_type", c_int, c_void_p, c_int64)
    f("gguf_get_tensor_ne", POINTER(c_int64), c_void_p, c_int64)
    f("gguf_remove_key", c_int64, c_void_p, c_char_p)
    f("gguf_set_val_u32", None, c_void_p, c_char_p, c_uint32)
    f("gguf_set_val_u64", None, c_void_p, c_char_p, c_uint64)
    f("gguf_set_val_bool", None, c_void_p, c_char_p, c_bool)
    f("gguf_set_val_str", None, c_void_p, c_char_p, c_char_p)
    f("gguf_set_arr_data", None, c_void_p, c_char_p, c_int, c_void_p, c_size_t)
    f("gguf_set_arr_str", None, c_void_p, c_char_p, POINTER(c_char_p), c_size_t)
    f("gguf_add_tensor", None, c_void_p, c_void_p)
    f("gguf_get_meta_size", c_size_t, c_void_p)
    f("gguf_get_meta_data", None, c_void_p, c_void_p)


@functools.lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The loaded and declared ggml-base library."""
    path = find_library()
    try:
        lib = ctypes.CDLL(str(path))
        _declare(lib)
    except (OSError, AttributeError) as error:
        raise ToolError(f"cannot use this ggml library: {error}", file=path, code=ExitCode.LIBRARY) from None
    return lib


@contextlib.contextmanager
def _captured_log(lib: ctypes.CDLL) -> Iterator[None]:
    """ggml's log goes to `_log` within, and to whoever had it (llama_cpp in the same process) afterwards."""
    callback, data = c_void_p(), c_void_p()
    lib.ggml_log_get(ctypes.byref(callback), ctypes.byref(data))
    lib.ggml_log_set(ctypes.cast(_log_callback, c_void_p), None)
    try:
        yield
    finally:
        lib.ggml_log_set(callback, data)


def version() -> str:
    """ggml's version and commit, as the library states them."""
    lib = library()
    return f"{lib.ggml_version().decode()} ({lib.ggml_commit().decode()})"


# ------------------------------------------------------------------------------------------------------- tensor types


class TensorType:
    """One ggml type: its name in capitals, block length in elements and block size in bytes."""

    def __init__(self, index: int, traits: _TypeTraits) -> None:
        self.index = index
        raw: bytes | None = traits.type_name
        self.name = (raw or b"").decode("ascii", "replace").upper()
        self.block = int(traits.blck_size)
        self.block_bytes = int(traits.type_size)
        self.is_quantized = bool(traits.is_quantized)
        self.to_float = _to_float_t(traits.to_float) if traits.to_float else None
        self.requires_imatrix = bool(library().ggml_quantize_requires_imatrix(index))

    def __repr__(self) -> str:
        return self.name

    def row_bytes(self, n: int) -> int:
        """Bytes of a row of `n` elements; `n` must be a multiple of the block."""
        return n // self.block * self.block_bytes

    @property
    def bits_per_weight(self) -> float:
        return 8.0 * self.block_bytes / self.block


@functools.lru_cache(maxsize=1)
def tensor_types() -> dict[int, TensorType]:
    """Types that a file of this ggml may hold, by number; numbers of removed types are absent."""
    lib = library()
    types = {i: TensorType(i, lib.ggml_get_type_traits(i).contents) for i in range(N_TYPES)}
    return {i: t for i, t in types.items() if t.block > 0 and t.block_bytes > 0}


def type_by_index(index: int) -> TensorType:
    return tensor_types()[index]


def type_by_name(name: str) -> TensorType:
    """The type called `name` in any case (`q4_k`, `Q4_K`); raises `ToolError` otherwise."""
    for t in tensor_types().values():
        if t.name == name.upper():
            return t
    raise ToolError(f"'{show(name)}' is not a tensor type", code=ExitCode.USAGE)


# Types that ggml_quantize_chunk has no case for: it would run into an assertion.
_NOT_QUANTISABLE = frozenset({"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"})


def can_quantize(t: TensorType) -> bool:
    return t.name not in _NOT_QUANTISABLE


def can_dequantize(t: TensorType) -> bool:
    return t.name == "F32" or t.to_float is not None


def quantize(t: TensorType, src: F32Array, dst: ByteArray, n_per_row: int, imatrix: F32Array | None = None) -> None:
    """Quantise the rows in `src` (f32, contiguous) into `dst`, as `llama-quantize` does.

    `imatrix` holds the importance of each column, shape [n_per_row], for all these rows. Raises ValueError on sizes
    that ggml would accept silently or abort on, and for results that ggml's own validation refuses.
    """
    nrows, rest = divmod(src.size, n_per_row)
    size = nrows * t.row_bytes(n_per_row)
    if rest or n_per_row % t.block or dst.size < size or src.dtype != np.float32:
        raise ValueError(f"{src.size} values in rows of {n_per_row} cannot become {t.name} in {dst.size} bytes")
    if not (src.flags.c_contiguous and dst.flags.c_contiguous):
        raise ValueError("buffers must be contiguous")
    if not can_quantize(t) or (t.requires_imatrix and imatrix is None):
        raise ValueError(f"ggml cannot quantise to {t.name}{' without an imatrix' if t.requires_imatrix else ''}")
    if imatrix is not None and (
        imatrix.size != n_per_row or imatrix.dtype != np.float32 or not imatrix.flags.c_contiguous
    ):
        raise ValueError(f"imatrix of {imatrix.size} values for rows of {n_per_row}")
    weights = None if imatrix is None else imatrix.ctypes.data
    written = library().ggml_quantize_chunk(t.index, src.ctypes.data, dst.ctypes.data, 0, nrows, n_per_row, weights)
    if written != size:
        raise ValueError(f"ggml wrote {written} bytes instead of {size} for {t.name}")


def dequantize(t: TensorType, src: ByteArray, dst: F32Array) -> None:
    """Expand `src` to f32; `dst.size` elements."""
    n = dst.size
    if n % t.block or src.size < t.row_bytes(n) or not (src.flags.c_contiguous and dst.flags.c_contiguous):
        raise ValueError(f"{src.size} bytes of {t.name} do not hold {n} values")
    if t.name == "F32":
        dst.view(np.uint8)[...] = src[: 4 * n]
        return
    if t.to_float is None:
        raise ValueError(f"ggml cannot expand {t.name}")
    t.to_float(src.ctypes.data, dst.ctypes.data_as(POINTER(c_float)), n)


def valid_rows(t: TensorType, data: ByteArray) -> bool:
    """Whether ggml finds only finite scales in these rows (`ggml_validate_row_data`)."""
    lib = library()
    with _captured_log(lib):
        ok = bool(lib.ggml_validate_row_data(t.index, data.ctypes.data, data.size))
    _log.take()
    return ok


# ------------------------------------------------------------------------------------------------------ GGUF contexts


class GgufContext:
    """A `gguf_context`: metadata and tensor infos of one file, never its data.

    Made from a header that `header.read_header` has accepted, or from the metadata of one; closes with the object.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._lib = library()

    @classmethod
    def from_header(cls, header: bytes | bytearray) -> GgufContext:
        """Parse header bytes (padding before the data section included). ggml's refusal becomes a ToolError."""
        lib = library()
        buffer = (c_char * len(header)).from_buffer_copy(header)
        with _captured_log(lib):
            handle = lib.gguf_init_from_buffer(buffer, len(header), _GgufInitParams(True, None))
        reason = _log.take()
        if not handle:
            raise ToolError(f"ggml refuses the header: {reason or 'no reason given'}")
        return cls(handle)

    def close(self) -> None:
        if self._handle:
            self._lib.gguf_free(self._handle)
            self._handle = 0

    def __del__(self) -> None:
        if getattr(self, "_handle", 0) and getattr(self, "_lib", None) is not None:
            self.close()

    def __enter__(self) -> GgufContext:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # -- metadata

    @property
    def alignment(self) -> int:
        return int(self._lib.gguf_get_alignment(self._handle))

    @property
    def data_offset(self) -> int:
        return int(self._lib.gguf_get_data_offset(self._handle))

    def keys(self) -> list[str]:
        return [self._lib.gguf_get_key(self._handle, i).decode() for i in range(self._lib.gguf_get_n_kv(self._handle))]

    def _find(self, key: str) -> int:
        return int(self._lib.gguf_find_key(self._handle, key.encode()))

    def __contains__(self, key: str) -> bool:
        return self._find(key) >= 0

    def kv_type(self, key: str) -> tuple[int, int]:
        """(type, element type) of a key that exists; both are equal for scalars."""
        i = self._find(key)
        if i < 0:
            raise KeyError(key)
        t = int(self._lib.gguf_get_kv_type(self._handle, i))
        return (t, int(self._lib.gguf_get_arr_type(self._handle, i))) if t == KV.ARR else (t, t)

    def get(self, key: str) -> Any:
        """The value as int, float, bool, str, list of str or numpy array; None when the key is absent."""
        i = self._find(key)
        if i < 0:
            return None
        t, element = self.kv_type(key)
        if t == KV.STR:
            return self._lib.gguf_get_val_str(self._handle, i).decode("utf-8", "replace")
        if t != KV.ARR:
            return getattr(self._lib, _KV_GETTERS[t][0])(self._handle, i)
        n = int(self._lib.gguf_get_arr_n(self._handle, i))
        if element == KV.STR:
            return [self._lib.gguf_get_arr_str(self._handle, i, j).decode("utf-8", "replace") for j in range(n)]
        raw = ctypes.string_at(self._lib.gguf_get_arr_data(self._handle, i), n * KV.SIZES[element]) if n else b""
        return np.frombuffer(raw, dtype=_KV_DTYPES[element]).copy()

    def get_int(self, key: str) -> int | None:
        """An integer of any width; None when absent or of another type."""
        value = self.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def get_str(self, key: str) -> str | None:
        value = self.get(key)
        return value if isinstance(value, str) else None

    def get_strs(self, key: str) -> list[str] | None:
        value = self.get(key)
        return value if isinstance(value, list) else None

    def remove(self, key: str) -> None:
        self._lib.gguf_remove_key(self._handle, key.encode())

    def set_u32(self, key: str, value: int) -> None:
        if key == "general.alignment":
            raise ValueError("the alignment of a context is fixed when it is made: use new_context")
        self._lib.gguf_set_val_u32(self._handle, key.encode(), value)

    def set_u64(self, key: str, value: int) -> None:
        self._lib.gguf_set_val_u64(self._handle, key.encode(), value)

    def set_bool(self, key: str, value: bool) -> None:
        self._lib.gguf_set_val_bool(self._handle, key.encode(), value)

    def set_str(self, key: str, value: str) -> None:
        self._lib.gguf_set_val_str(self._handle, key.encode(), value.encode())

    def set_strs(self, key: str, values: Sequence[str]) -> None:
        array = (c_char_p * max(1, len(values)))(*[v.encode() for v in values])
        self._lib.gguf_set_arr_str(self._handle, key.encode(), array, len(values))

    def set_u64s(self, key: str, values: Sequence[int]) -> None:
        array = np.array(values, dtype="<u8")
        self._lib.gguf_set_arr_data(self._handle, key.encode(), KV.U64, array.ctypes.data, array.size)

    # -- tensors

    @property
    def n_tensors(self) -> int:
        return int(self._lib.gguf_get_n_tensors(self._handle))

    def tensor_info(self, i: int) -> tuple[str, int, tuple[int, ...], int, int]:
        """(name, type number, ne[4], offset, bytes) of tensor `i`, as ggml understands them."""
        lib, h = self._lib, self._handle
        ne = lib.gguf_get_tensor_ne(h, i)
        return (
            lib.gguf_get_tensor_name(h, i).decode("utf-8", "replace"),
            int(lib.gguf_get_tensor_type(h, i)),
            tuple(int(ne[j]) for j in range(MAX_DIMS)),
            int(lib.gguf_get_tensor_offset(h, i)),
            int(lib.gguf_get_tensor_size(h, i)),
        )

    def add_tensors(self, tensors: Sequence[tuple[str, TensorType, Sequence[int]]]) -> None:
        """Append tensor infos (name, type, ne); offsets follow each other at the context's alignment."""
        seen = {self.tensor_info(i)[0] for i in range(self.n_tensors)}
        for name, t, ne in tensors:
            raw = name.encode()
            if name in seen or not 0 < len(raw) < MAX_NAME or not 1 <= len(ne) <= MAX_DIMS or ne[0] % t.block:
                raise ToolError(f"cannot be written as {t.name} with shape {list(ne)}", tensor=name)
            seen.add(name)
        if not tensors:
            return
        size = (len(tensors) + 1) * self._lib.ggml_tensor_overhead()
        ggml = self._lib.ggml_init(_GgmlInitParams(size, None, True))
        if not ggml:
            raise ToolError("ggml could not reserve memory for a header", code=ExitCode.LIBRARY)
        try:
            for name, t, ne in tensors:
                tensor = self._lib.ggml_new_tensor(ggml, t.index, len(ne), (c_int64 * len(ne))(*ne))
                self._lib.ggml_set_name(tensor, name.encode())
                self._lib.gguf_add_tensor(self._handle, tensor)
        finally:
            self._lib.ggml_free(ggml)

    def meta_bytes(self) -> bytes:
        """The header as ggml writes it, padding before the data section included."""
        size = int(self._lib.gguf_get_meta_size(self._handle))
        buffer = (c_char * size)()
        self._lib.gguf_get_meta_data(self._handle, buffer)
        return bytes(buffer)
