"""A strict structural check of a GGUF header, before ggml sees it.

ggml reads what a header announces: lengths of a gigabyte, a billion array elements one at a time, offsets it only
compares with each other. `read_header` walks the same bytes with a bound on every number, never reads past
`MAX_HEADER` bytes, and returns the exact bytes it accepted, so that ggml parses those and not a file that may have
changed meanwhile. It also places every tensor inside the file. Whatever it refuses, it names: the file, the key or
tensor, and the number.
"""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass, field
from pathlib import Path

from gguf_tools import ggml
from gguf_tools.errors import ExitCode, ToolError, io_error, show
from gguf_tools.ggml import KV, TensorType

MAX_HEADER = 256 << 20  # bytes; the largest vocabularies take about 30 MB
MAX_ALIGNMENT = 1 << 20
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_KEY_BYTES = 1 << 16

_U32 = struct.Struct("<I")
_I32 = struct.Struct("<i")
_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")

_MIN_KEY_BYTES = 8 + 1 + 4 + 1  # length, one letter, type, one byte of value
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 4 + 8  # length, one letter, n_dims, type, offset


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file. `offset` is absolute, in bytes; `ne` has the dimensions that the file states."""

    name: str
    type: TensorType
    ne: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class Header:
    """What `read_header` accepted. `raw` is the header including the padding before the data section."""

    path: Path
    file_size: int
    mtime_ns: int
    version: int
    n_keys: int
    kv_start: int  # first byte of the key-value section in `raw`
    kv_end: int
    alignment: int
    data_offset: int
    tensors: tuple[TensorInfo, ...]
    raw: bytes = field(repr=False)

    @property
    def data_end(self) -> int:
        """End of the last tensor's bytes, without the padding after it."""
        return self.tensors[-1].offset + self.tensors[-1].size if self.tensors else self.data_offset

    def metadata_only(self) -> bytes:
        """A version-3 header with these key-value bytes and no tensor: strings with zero bytes inside survive."""
        return (
            b"GGUF"
            + _U32.pack(ggml.GGUF_VERSION)
            + _U64.pack(0)
            + _U64.pack(self.n_keys)
            + self.raw[self.kv_start : self.kv_end]
        )


def open_regular(path: Path) -> int:
    """A read-only descriptor of a regular file; pipes, folders and devices are refused without blocking."""
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        raise io_error(error, "cannot open", path) from None
    except ValueError as error:  # a zero byte in the path
        raise ToolError(f"cannot open: {error}", file=path, code=ExitCode.USAGE) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ToolError("is not a regular file", file=path)
    return fd


class _Reader:
    """The first bytes of a file, fetched as needed and kept."""

    def __init__(self, fd: int, path: Path, size: int) -> None:
        self.fd = fd
        self.path = path
        self.size = size
        self.data = bytearray()
        self.pos = 0
        self.where = "the file header"

    def fail(self, message: str) -> ToolError:
        return ToolError(f"{self.where}: {message}", file=self.path)

    def need(self, n: int) -> None:
        """Make `n` bytes from the position available."""
        end = self.pos + n
        if end <= len(self.data):
            return
        if end > self.size:
            raise self.fail(f"needs {n} bytes at {self.pos}, but the file ends at {self.size}")
        if end > MAX_HEADER:
            raise self.fail(f"the header would be larger than {MAX_HEADER >> 20} MiB")
        want = min(max(end, 2 * len(self.data), 1 << 16), self.size, MAX_HEADER)
        try:
            while len(self.data) < want:
                chunk = os.pread(self.fd, min(want - len(self.data), 8 << 20), len(self.data))
                if not chunk:
                    raise self.fail(f"the file ended at {len(self.data)} while being read")
                self.data += chunk
        except OSError as error:
            raise io_error(error, "cannot read", self.path) from None

    def u32(self) -> int:
        self.need(4)
        (value,) = _U32.unpack_from(self.data, self.pos)
        self.pos += 4
        return int(value)

    def i32(self) -> int:
        self.need(4)
        (value,) = _I32.unpack_from(self.data, self.pos)
        self.pos += 4
        return int(value)

    def u64(self) -> int:
        self.need(8)
        (value,) = _U64.unpack_from(self.data, self.pos)
        self.pos += 8
        return int(value)

    def i64(self) -> int:
        self.need(8)
        (value,) = _I64.unpack_from(self.data, self.pos)
        self.pos += 8
        return int(value)

    def skip(self, n: int) -> None:
        self.need(n)
        self.pos += n

    def text(self, limit: int, what: str) -> str:
        n = self.u64()
        if not 0 < n <= limit:
            raise self.fail(f"the {what} is {n} bytes long, not 1 to {limit}")
        self.need(n)
        raw = bytes(self.data[self.pos : self.pos + n])
        self.pos += n
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"the {what} {show(repr(raw[:80]))} is not UTF-8") from None
        if not text.isprintable():
            raise self.fail(f"the {what} {show(repr(text[:80]))} holds control characters")
        return text

    def skip_strings(self, n: int) -> None:
        """Step over `n` length-prefixed strings: the only loop that a vocabulary makes long."""
        if n > (self.size - self.pos) // 8:
            raise self.fail(f"{n} strings do not fit into the {self.size - self.pos} bytes that follow")
        pos, data, unpack = self.pos, self.data, _U64.unpack_from
        for _ in range(n):
            if pos + 8 > len(data):
                self.pos = pos
                self.need(8)
            (length,) = unpack(data, pos)
            pos += 8 + length
            if pos > len(data):
                self.pos = pos - length
                self.need(length)
        self.pos = pos


def _read_value(r: _Reader, kv_type: int) -> tuple[int, int | None]:
    """Step over one value; returns its type and, for a u32, the value."""
    if kv_type == KV.ARR:
        element = r.i32()
        n = r.u64()
        if not 0 <= element < len(KV.SIZES) or element == KV.ARR:
            raise r.fail(f"is an array of type {element}, which GGUF does not have")
        if element == KV.STR:
            r.skip_strings(n)
        else:
            left = r.size - r.pos
            if n > left // KV.SIZES[element]:
                raise r.fail(f"{n} elements of type {KV.NAMES[element]} do not fit into the {left} bytes that follow")
            r.skip(n * KV.SIZES[element])
        return kv_type, None
    if not 0 <= kv_type < len(KV.SIZES):
        raise r.fail(f"has value type {kv_type}, which GGUF does not have")
    if kv_type == KV.STR:
        r.skip_strings(1)
        return kv_type, None
    if kv_type == KV.U32:
        return kv_type, r.u32()
    r.skip(KV.SIZES[kv_type])
    return kv_type, None


def _check_magic(r: _Reader) -> int:
    if r.size < 24:
        raise ToolError(f"is {r.size} bytes long, too short for a GGUF file", file=r.path)
    r.need(24)
    magic = bytes(r.data[:4])
    if magic != b"GGUF":
        if magic in (b"tjgg", b"fmgg", b"lmgg", b"algg"):
            raise ToolError(
                "is a pre-GGUF ggml file: convert it with llama.cpp's convert_llama_ggml_to_gguf.py",
                file=r.path,
                code=ExitCode.UNSUPPORTED,
            )
        raise ToolError(f"starts with {magic!r}, not with 'GGUF'", file=r.path)
    r.pos = 4
    version = r.u32()
    if version & 0xFFFF == 0 and version:
        raise ToolError(
            "is a big-endian GGUF file: convert it with the gguf package's gguf-convert-endian",
            file=r.path,
            code=ExitCode.UNSUPPORTED,
        )
    if version not in (2, 3):
        raise ToolError(
            f"has GGUF version {version}; versions 2 and 3 are supported", file=r.path, code=ExitCode.UNSUPPORTED
        )
    return version


def _read_tensor(r: _Reader, i: int, types: dict[int, TensorType]) -> tuple[str, TensorType, tuple[int, ...], int, int]:
    r.where = f"tensor {i}"
    name = r.text(ggml.MAX_NAME - 1, "tensor name")
    r.where = f"tensor '{name}'"
    n_dims = r.u32()
    if n_dims > ggml.MAX_DIMS:
        raise r.fail(f"has {n_dims} dimensions; at most {ggml.MAX_DIMS} are possible")
    ne = tuple(r.i64() for _ in range(n_dims))
    elements = 1
    for n in ne:
        if n < 0:
            raise r.fail(f"has a dimension of {n} elements")
        elements *= max(n, 1)
        if elements >= 1 << 62:
            raise r.fail(f"has the shape {list(ne)}, whose number of elements overflows")
    kind = r.i32()
    if kind not in types:
        raise r.fail(f"has the type number {kind}, which this ggml does not know")
    t = types[kind]
    row = ne[0] if ne else 1
    if row % t.block:
        raise r.fail(f"has rows of {row} elements, not a multiple of {t.name}'s block of {t.block}")
    size = 0 if 0 in ne else elements // t.block * t.block_bytes
    if size >= 1 << 62:
        raise r.fail(f"would take {size} bytes")
    return name, t, ne, r.u64(), size


def read_header(path: Path | str) -> Header:
    """Check the header of `path` and return it; raises ToolError naming the place.

    The data section must hold every tensor where the header puts it: a truncated file is refused with the tensor that
    is cut.
    """
    path = Path(path)
    types = ggml.tensor_types()
    fd = open_regular(path)
    try:
        status = os.fstat(fd)
        r = _Reader(fd, path, status.st_size)
        version = _check_magic(r)
        n_tensors, n_keys = r.u64(), r.u64()
        if n_keys > min(MAX_KEYS, r.size // _MIN_KEY_BYTES):
            raise r.fail(f"announces {n_keys} keys in a file of {r.size} bytes (at most {MAX_KEYS} are accepted)")
        if n_tensors > min(MAX_TENSORS, r.size // _MIN_TENSOR_BYTES):
            raise r.fail(
                f"announces {n_tensors} tensors in a file of {r.size} bytes (at most {MAX_TENSORS} are accepted)"
            )

        kv_start = r.pos
        alignment = ggml.DEFAULT_ALIGNMENT
        keys: set[str] = set()
        for i in range(n_keys):
            r.where = f"key {i}"
            key = r.text(MAX_KEY_BYTES, "key")
            r.where = f"key '{key}'"
            if key in keys:
                raise r.fail("occurs twice")
            keys.add(key)
            kv_type, number = _read_value(r, r.i32())
            if key == "general.alignment":
                if number is None:
                    raise r.fail(f"must be of type u32, not {KV.NAMES[kv_type]}")
                if not 0 < number <= MAX_ALIGNMENT or number & (number - 1):
                    raise r.fail(f"is {number}, not a power of two up to {MAX_ALIGNMENT}")
                alignment = number
        kv_end = r.pos

        infos: list[tuple[str, TensorType, tuple[int, ...], int, int]] = []
        names: set[str] = set()
        for i in range(n_tensors):
            info = _read_tensor(r, i, types)
            if info[0] in names:
                raise r.fail("occurs twice")
            names.add(info[0])
            infos.append(info)
        r.where = "the end of the header"
        data_offset = r.pos
        if infos:
            data_offset = -(-r.pos // alignment) * alignment
            if data_offset <= r.size:
                r.need(data_offset - r.pos)

        tensors: list[TensorInfo] = []
        expected = 0
        for name, t, ne, offset, size in infos:
            r.where = f"tensor '{name}'"
            if offset != expected:
                raise r.fail(f"is at data offset {offset}, expected {expected}")
            end = data_offset + offset + size
            if end > r.size:
                raise r.fail(f"ends at byte {end}, but the file has {r.size}: it is truncated")
            tensors.append(TensorInfo(name, t, ne, data_offset + offset, size))
            expected = offset + -(-size // alignment) * alignment
        if data_offset > r.size:
            raise r.fail(
                f"the data section would start at {data_offset}, but the file has {r.size} bytes: it is truncated"
            )
        _check_no_second_file(fd, path, r.size, data_offset, expected, tensors)
        return Header(
            path=path,
            file_size=r.size,
            mtime_ns=status.st_mtime_ns,
            version=version,
            n_keys=n_keys,
            kv_start=kv_start,
            kv_end=kv_end,
            alignment=alignment,
            data_offset=data_offset,
            tensors=tuple(tensors),
            raw=bytes(r.data[:data_offset]),
        )
    finally:
        os.close(fd)


def _check_no_second_file(
    fd: int, path: Path, size: int, data_offset: int, padded: int, tensors: list[TensorInfo]
) -> None:
    """Refuse files that were joined end to end: what follows the last tensor must not be another GGUF."""
    ends = {data_offset + padded}
    if tensors:
        ends.add(tensors[-1].offset + tensors[-1].size)
    for end in ends:
        if end + 24 <= size and os.pread(fd, 4, end) == b"GGUF":
            raise ToolError(
                f"holds a second GGUF file from byte {end}: join shards with llama-gguf-split --merge, not end to end",
                file=path,
            )
