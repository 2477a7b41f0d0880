"""Importance matrices: how much each input column of a tensor matters, per expert, as `llama-imatrix` measures it.

Both file forms are read: GGUF (`NAME.in_sum2` and `NAME.counts`, F32) and the older binary one. Values are normalised
as `llama-quantize` does; an expert that no token ever reached gets equal weights, and its name goes into `unrouted`.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gguf_tools.errors import ToolError
from gguf_tools.ggml import F32Array
from gguf_tools.header import open_regular
from gguf_tools.model import GgufFile

_MAX_ENTRIES = 1 << 20
_MAX_FILE = 8 << 30


@dataclass
class Imatrix:
    """`entries[tensor name]` is a flat f32 array of row length * experts."""

    path: Path
    entries: dict[str, F32Array]
    unrouted: dict[str, list[int]] = field(default_factory=dict)

    def rows(self, name: str, ne0: int, n_expert: int) -> F32Array | None:
        """Importance as [n_expert, ne0], or None when the file does not know the tensor.

        A file made from a legacy model knows `blk.N.ffn_gate.E.weight`: those are stacked.
        """
        values = self.entries.get(name)
        if values is None:
            prefix = name.replace("_exps.weight", ".")
            parts = [self.entries.get(f"{prefix}{e}.weight") for e in range(n_expert)]
            present = [p for p in parts if p is not None]
            if not present:
                return None
            values = np.concatenate([np.ones(ne0, np.float32) if p is None else p for p in parts])
            missing = [e for e, p in enumerate(parts) if p is None]
            if missing:
                self.unrouted[name] = missing
        if values.size != ne0 * n_expert:
            raise ToolError(
                f"has {values.size} values, the tensor needs {ne0} * {n_expert}", file=self.path, tensor=name
            )
        if not bool(np.isfinite(values).all()):
            raise ToolError("holds values that are not finite", file=self.path, tensor=name)
        return np.ascontiguousarray(values.reshape(n_expert, ne0), dtype=np.float32)


def read_imatrix(path: Path | str) -> Imatrix:
    """Read an importance matrix; raises ToolError for anything else."""
    path = Path(path)
    fd = open_regular(path)
    try:
        magic = os.pread(fd, 4, 0)
        size = os.fstat(fd).st_size
    finally:
        os.close(fd)
    if size > _MAX_FILE:
        raise ToolError(f"is {size} bytes long, too large for an importance matrix", file=path)
    return _read_gguf(path) if magic == b"GGUF" else _read_legacy(path, size)


def _read_gguf(path: Path) -> Imatrix:
    f = GgufFile(path)
    try:
        result = Imatrix(path, {})
        for name, t in f.tensors.items():
            if not name.endswith(".in_sum2"):
                continue
            base = name[: -len(".in_sum2")]
            counts = f.tensors.get(base + ".counts")
            if counts is None:
                raise ToolError("has no counts", file=path, tensor=base)
            if t.type.name != "F32" or counts.type.name != "F32":
                raise ToolError("its sums and counts must be F32", file=path, tensor=base)
            sums_raw, counts_raw = bytearray(t.size), bytearray(counts.size)
            f.read_into(memoryview(sums_raw), t.offset, name)
            f.read_into(memoryview(counts_raw), counts.offset, counts.name)
            n = np.rint(np.frombuffer(counts_raw, "<f4"))
            sums = np.frombuffer(sums_raw, "<f4")
            if n.size == 0 or sums.size == 0 or sums.size % n.size:
                raise ToolError(f"has {sums.size} sums for {n.size} counts", file=path, tensor=base)
            rows = sums.reshape(n.size, -1)
            routed = n > 0
            values = np.where(routed[:, None], rows / np.where(routed, n, 1)[:, None].astype(np.float32), np.float32(1))
            result.entries[base] = values.astype(np.float32).ravel()
            if not routed.all():
                result.unrouted[base] = [int(e) for e in np.flatnonzero(~routed)]
        if not result.entries:
            raise ToolError("is a GGUF file without importance data (no *.in_sum2 tensor)", file=path)
        return result
    finally:
        f.close()


def _read_legacy(path: Path, size: int) -> Imatrix:
    result = Imatrix(path, {})
    with open(path, "rb") as f:

        def take(n: int, what: str) -> bytes:
            if n < 0 or f.tell() + n > size:
                raise ToolError(
                    f"is not an importance matrix: {what} needs {n} bytes at {f.tell()}, the file has {size}", file=path
                )
            return f.read(n)

        def number(what: str) -> int:
            return int(struct.unpack("<i", take(4, what))[0])

        n_entries = number("the number of entries")
        if not 0 < n_entries <= _MAX_ENTRIES:
            raise ToolError(f"is not an importance matrix: it announces {n_entries} entries", file=path)
        for i in range(n_entries):
            length = number(f"the name length of entry {i}")
            name = take(length, f"the name of entry {i}").split(b"\0")[0].decode("utf-8", "replace")
            n_calls = number(f"the calls of entry {i}")
            n_values = number(f"the size of entry {i}")
            if n_values < 1:
                raise ToolError(f"entry {i} has {n_values} values", file=path, tensor=name)
            values = np.frombuffer(take(4 * n_values, f"entry {i}"), "<f4").copy()
            result.entries[name] = values / np.float32(n_calls) if n_calls > 0 else values
    return result
