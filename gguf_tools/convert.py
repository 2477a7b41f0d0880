"""Moving tensor data: copying bytes, and turning one expert tensor into several precisions in a single pass.

A worker owns a tensor from its first byte to its last, in pieces of a few MiB: read, expand to f32 once, quantise for
every target, hash and write. So memory does not depend on the model, checksums need no second pass, and as many
tensors are in work as there are workers. The bytes are those of `llama-quantize --pure`: rows are quantised by the
same function with the same per-expert weights.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np

from gguf_tools import ggml
from gguf_tools.errors import ExitCode, ToolError
from gguf_tools.ggml import ByteArray, F32Array, TensorType
from gguf_tools.model import ExpertTensor, GgufFile, Model
from gguf_tools.output import OutputFile, Progress, Slot, drop_cache

CHUNK_VALUES = 1 << 20  # f32 values per piece: 4 MiB, near the size of a core's cache
COPY_BYTES = 4 << 20
F16_LIMIT = 65520.0  # the smallest magnitude that rounds to infinity


class Stopped(Exception):
    """The job was cancelled because another part of it failed."""


@dataclass(frozen=True)
class Target:
    """One copy of an expert tensor: its file, its place and the type it is stored as."""

    file: OutputFile
    slot: Slot
    type: TensorType


def chunk_rows(row_length: int) -> int:
    """Rows per piece."""
    return max(1, CHUNK_VALUES // row_length)


def copy_tensor(
    source: GgufFile, offset: int, target: OutputFile, slot: Slot, progress: Progress, stop: threading.Event
) -> str:
    """Copy a tensor's bytes unchanged; returns their SHA-256."""
    digest = hashlib.sha256()
    buffer = bytearray(min(COPY_BYTES, max(1, slot.size)))
    for at in range(0, slot.size, len(buffer)):
        if stop.is_set():
            raise Stopped
        view = memoryview(buffer)[: min(len(buffer), slot.size - at)]
        source.read_into(view, offset + at, slot.name)
        digest.update(view)
        target.write(slot, at, view)
        progress.advance(len(view))
    drop_cache(source.fd, offset, slot.size)
    return digest.hexdigest()


def convert_expert(
    model: Model,
    e: ExpertTensor,
    targets: Sequence[Target],
    imatrix: F32Array | None,
    progress: Progress,
    stop: threading.Event,
) -> list[str]:
    """Write every target of one expert tensor; returns their SHA-256 in order.

    `imatrix` is [n_expert, row length] or None. Raises ToolError naming the expert for values that the target cannot
    hold.
    """
    ne0, ne1, _ = e.ne
    digests = [hashlib.sha256() for _ in targets]
    step = chunk_rows(ne0)
    values = np.empty(min(step, ne1 * e.n_expert) * ne0, np.float32)
    packed = np.empty(max(t.type.row_bytes(values.size) if t.type.block <= ne0 else 0 for t in targets), np.uint8)
    row_done = 0
    for s in e.segments:
        source = model.files[s.file]
        row_bytes = s.type.row_bytes(ne0)
        raw = np.empty(min(step, ne1 * s.count) * row_bytes, np.uint8)
        expand = any(t.type.index != s.type.index for t in targets)
        for first in range(0, ne1 * s.count, step):
            if stop.is_set():
                raise Stopped
            n = min(step, ne1 * s.count - first)
            piece = raw[: n * row_bytes]
            source.read_into(piece.data, s.offset + first * row_bytes, s.name)
            largest = 0.0
            block = values[: n * ne0]
            if expand:
                if s.type.name == "F32":
                    block = piece.view(np.float32)
                else:
                    ggml.dequantize(s.type, piece, block)
                largest = _largest(e, s.name, source, block, row_done)
            for target, digest in zip(targets, digests, strict=True):
                if target.type.index == s.type.index:
                    data = piece
                else:
                    _check_range(e, s.name, source, target.type, largest)
                    data = packed[: n * target.type.row_bytes(ne0)]
                    _quantize(e, target.type, block, data, imatrix, row_done)
                    if largest > F16_LIMIT / 2 and not ggml.valid_rows(target.type, data):
                        raise ToolError(
                            f"values up to {largest:g} do not fit into {target.type.name}'s scales",
                            file=source.path,
                            tensor=s.name,
                        )
                view = data.data
                digest.update(view)
                target.file.write(target.slot, row_done * target.type.row_bytes(ne0), view)
            row_done += n
            progress.advance(n * row_bytes)
        drop_cache(source.fd, s.offset, ne1 * s.count * row_bytes)
    return [d.hexdigest() for d in digests]


def _largest(e: ExpertTensor, name: str, source: GgufFile, block: F32Array, row: int) -> float:
    """The largest magnitude; values that are not finite are an error that names the expert and the row."""
    largest = max(float(block.max()), -float(block.min()))
    if np.isfinite(largest):
        return largest
    bad = row + int(np.flatnonzero(~np.isfinite(block))[0]) // e.ne[0]
    raise ToolError(
        f"holds a value that is not finite, in expert {bad // e.ne[1]}, row {bad % e.ne[1]}",
        file=source.path,
        tensor=name,
    )


def _check_range(e: ExpertTensor, name: str, source: GgufFile, t: TensorType, largest: float) -> None:
    if t.name == "F16" and largest >= F16_LIMIT:
        raise ToolError(
            f"holds values up to {largest:g}, F16 ends at 65504: use bf16",
            file=source.path,
            tensor=name,
            code=ExitCode.UNSUPPORTED,
        )


def _quantize(
    e: ExpertTensor, t: TensorType, block: F32Array, out: ByteArray, imatrix: F32Array | None, row: int
) -> None:
    ne0, ne1, _ = e.ne
    if imatrix is None or not t.is_quantized:
        ggml.quantize(t, block, out, ne0)
        return
    row_bytes = t.row_bytes(ne0)
    n = block.size // ne0
    at = 0
    while at < n:  # pieces never cross an expert: each has its own weights
        expert, within = divmod(row + at, ne1)
        k = min(n - at, ne1 - within)
        ggml.quantize(
            t, block[at * ne0 : (at + k) * ne0], out[at * row_bytes : (at + k) * row_bytes], ne0, imatrix[expert]
        )
        at += k


def hash_region(file: GgufFile, offset: int, size: int, name: str, progress: Progress, stop: threading.Event) -> str:
    """SHA-256 of `size` bytes of a file."""
    digest = hashlib.sha256()
    buffer = bytearray(min(COPY_BYTES, max(1, size)))
    for at in range(0, size, len(buffer)):
        if stop.is_set():
            raise Stopped
        view = memoryview(buffer)[: min(len(buffer), size - at)]
        file.read_into(view, offset + at, name)
        digest.update(view)
        progress.advance(len(view))
    drop_cache(file.fd, offset, size)
    return digest.hexdigest()


def run_jobs(jobs: Iterable[Callable[[threading.Event], None]], workers: int) -> None:
    """Run jobs on `workers` threads; the first failure (or Ctrl-C) stops the others and is raised."""
    stop = threading.Event()
    pool = ThreadPoolExecutor(max_workers=max(1, workers), thread_name_prefix="gguf-tools")
    futures = [pool.submit(job, stop) for job in jobs]
    try:
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    except BaseException:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
        raise
    failed = [f for f in done if f.exception() is not None]
    if failed:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
        errors = [error for f in futures if f.done() and not f.cancelled() and (error := f.exception()) is not None]
        raise next((error for error in errors if not isinstance(error, Stopped)), errors[0])
    pool.shutdown(wait=True)
