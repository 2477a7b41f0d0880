"""Output files: laid out in advance, written in any order by several threads, visible only when complete.

A file grows as `NAME.part` and gets its header last, so that an interrupted one is never mistaken for a model; then
it is renamed. A journal beside the outputs records each finished tensor with its checksum, so that a run that was
killed goes on where it stopped. Nothing is ever written over an input, nor over an existing file unless the caller
asked for that.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gguf_tools.errors import ExitCode, ToolError, io_error
from gguf_tools.ggml import GgufContext, TensorType

PART = ".part"


class Progress(Protocol):
    """What a long operation tells about itself; calls come from worker threads."""

    def start(self, total_bytes: int, what: str) -> None: ...

    def advance(self, n_bytes: int) -> None: ...

    def close(self) -> None: ...


class NoProgress:
    """Says nothing."""

    def start(self, total_bytes: int, what: str) -> None:
        pass

    def advance(self, n_bytes: int) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Slot:
    """Where one tensor goes: absolute offset and size in bytes."""

    name: str
    type: TensorType
    ne: tuple[int, ...]
    offset: int
    size: int


class OutputFile:
    """One GGUF file being written. `context` must hold all metadata, with placeholders of the final length."""

    def __init__(
        self, path: Path, context: GgufContext, tensors: Sequence[tuple[str, TensorType, tuple[int, ...]]]
    ) -> None:
        self.path = path
        self.part = path.with_name(path.name + PART)
        self.context = context
        context.add_tensors(tensors)
        self.header_size = len(context.meta_bytes())
        self.slots: dict[str, Slot] = {}
        alignment = context.alignment
        end = self.header_size
        for i, (name, t, ne) in enumerate(tensors):
            _, _, _, offset, size = context.tensor_info(i)
            self.slots[name] = Slot(name, t, ne, self.header_size + offset, size)
            end = self.header_size + offset + -(-size // alignment) * alignment
        self.size = end
        self._fd = -1

    def open(self, keep: bool) -> None:
        """Open the part file; with `keep`, what it holds stays."""
        try:
            self._fd = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (0 if keep else os.O_TRUNC), 0o666)
            os.ftruncate(self._fd, self.size)
        except OSError as error:
            raise _write_error(error, self.part, None) from None

    def write(self, slot: Slot, at: int, data: memoryview) -> None:
        """Write `data` at byte `at` of a slot."""
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], slot.offset + at + done)
        except OSError as error:
            raise _write_error(error, self.part, slot.name) from None
        start_writeback(self._fd, slot.offset + at, len(data))

    def read(self, slot: Slot, at: int, buffer: memoryview) -> int:
        """Read back from the part file; returns the bytes read."""
        return os.preadv(self._fd, [buffer], slot.offset + at)

    def truncate(self, size: int) -> None:
        """Cut the padding after the last tensor, for a file that had none."""
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:
            raise _write_error(error, self.part, None) from None

    def finish(self) -> None:
        """Write the header and make everything durable; the file still has its part name."""
        header = self.context.meta_bytes()
        if len(header) != self.header_size:
            raise AssertionError("the header changed its length")
        try:
            os.pwrite(self._fd, header, 0)
            os.fsync(self._fd)
        except OSError as error:
            raise _write_error(error, self.part, None) from None
        self.close()

    def publish(self) -> None:
        """Give the finished file its name."""
        try:
            os.replace(self.part, self.path)
            sync_folder(self.path.parent)
        except OSError as error:
            raise _write_error(error, self.path, None) from None

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _write_error(error: OSError, path: Path, tensor: str | None) -> ToolError:
    reason = error.strerror or str(error)
    hint = ""
    if error.errno in (28, 122):  # ENOSPC, EDQUOT
        hint = "; free some space and run the same command again to go on, or delete the .part files"
    return ToolError(f"cannot write: {reason}{hint}", file=path, tensor=tensor, code=ExitCode.IO)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError:
        pass  # some file systems cannot, and need not
    finally:
        os.close(fd)


def _sync_file_range() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    try:
        function = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


_sync = _sync_file_range()


def start_writeback(fd: int, offset: int, size: int) -> None:
    """Ask the kernel to write these pages now, without waiting.

    Otherwise a small memory limit fills with dirty pages that only the limit's own reclaim would write, one page at a
    time.
    """
    if _sync is not None:
        _sync(fd, offset, size, 2)


def drop_cache(fd: int, offset: int, size: int) -> None:
    """Tell the kernel that these pages will not be needed again."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)


# ------------------------------------------------------------------------------------------------------------ checks


def check_outputs(
    outputs: Iterable[Path], inputs: Iterable[Path], *, force: bool, done: frozenset[str] = frozenset()
) -> None:
    """Refuse outputs that are inputs, occur twice or exist (unless `force`, or `done` by a run of the same job)."""
    inputs = list(inputs)
    seen: set[Path] = set()
    for path in outputs:
        for candidate in (path, path.with_name(path.name + PART)):
            for source in inputs:
                if same_file(candidate, source):
                    raise ToolError(
                        "is an input and an output; choose another folder or name",
                        file=candidate,
                        code=ExitCode.CONFLICT,
                    )
        if path in seen:
            raise ToolError(
                "would be written twice; the high and low types must differ", file=path, code=ExitCode.CONFLICT
            )
        seen.add(path)
        if path.is_dir():
            raise ToolError("is a folder", file=path, code=ExitCode.CONFLICT)
        if os.path.lexists(path) and not force and path.name not in done:
            raise ToolError("exists; --force replaces it", file=path, code=ExitCode.CONFLICT)


def same_file(a: Path, b: Path) -> bool:
    """Whether two paths mean one file, through links and before it exists."""
    try:
        return os.path.samefile(a, b)
    except OSError:
        return os.path.realpath(a) == os.path.realpath(b)


def check_space(folder: Path, needed: int, files: Iterable[Path]) -> None:
    """Refuse early when `needed` bytes do not fit; what the part files already occupy counts as free."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    have = 0
    for f in files:
        try:
            have += os.stat(f).st_blocks * 512
        except OSError:
            pass
    try:
        status = os.statvfs(folder)
    except OSError as error:
        raise io_error(error, "cannot ask for the free space", folder) from None
    free = status.f_bavail * status.f_frsize
    if needed - have > free:
        raise ToolError(
            f"needs {needed - have} bytes, {free} are free ({needed - have - free} too few)",
            file=folder,
            code=ExitCode.IO,
        )


def make_folder(folder: Path) -> None:
    """Create an output folder, or say why it cannot be used."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ToolError("is not a folder", file=folder, code=ExitCode.CONFLICT) from None
    except OSError as error:
        raise io_error(error, "cannot create the folder", folder) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ToolError("is a folder that cannot be written to", file=folder, code=ExitCode.IO)


# ----------------------------------------------------------------------------------------------------------- journal


class Journal:
    """Finished tensors and files of one job, appended line by line; held under a lock while the job runs.

    A journal of another job (other source, options or library) is discarded together with its part files.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path = path
        self.tensors: dict[str, list[str]] = {}
        self.files: set[str] = set()
        self.resumed = False
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _write_error(error, path, None) from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise ToolError("another gguf-tools is writing this", file=path, code=ExitCode.CONFLICT) from None
        lines = peek_journal(path)
        if lines and lines[0] == {"job": fingerprint}:
            self.resumed = True
            for line in lines[1:]:
                if isinstance(line.get("tensor"), str) and isinstance(line.get("sha256"), list):
                    self.tensors[line["tensor"]] = [str(h) for h in line["sha256"]]
                elif isinstance(line.get("file"), str):
                    self.files.add(line["file"])
            self._write(b"\n")  # ends a line that the kill may have cut
        else:
            os.ftruncate(self._fd, 0)
            self.add({"job": fingerprint})

    def add(self, entry: dict[str, Any]) -> None:
        """Append one entry with a single write, so that a kill leaves whole lines."""
        self._write((json.dumps(entry, separators=(",", ":")) + "\n").encode())

    def _write(self, data: bytes) -> None:
        try:
            os.write(self._fd, data)
        except OSError as error:
            raise _write_error(error, self.path, None) from None

    def close(self, *, remove: bool) -> None:
        if self._fd >= 0:
            if remove:
                self.path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1


def peek_journal(path: Path) -> list[dict[str, Any]]:
    """The readable entries of a journal; empty when there is none."""
    try:
        text = path.read_bytes()
    except OSError:
        return []
    entries = []
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries
