"""`verify`: is this file, pair or low file what it claims to be, and how far are the low experts from the high ones?

Structure and bounds were checked by opening; here every byte is read: checksums, the router hash, values that are not
finite, and for each expert the relative error ||high - low|| / ||high|| (Frobenius). Problems are collected, not
raised, so that one run shows all.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gguf_tools import ggml
from gguf_tools.convert import Stopped, chunk_rows, hash_region, run_jobs
from gguf_tools.errors import ExitCode, ToolError
from gguf_tools.ggml import F32Array
from gguf_tools.header import TensorInfo
from gguf_tools.model import ExpertTensor, GgufFile, Model, open_model
from gguf_tools.output import NoProgress, Progress
from gguf_tools.pair import cpu_count
from gguf_tools.pairfile import ExpertsFile, kind_of, open_pair


@dataclass(frozen=True)
class TensorError:
    """Distance of one low tensor from its high one, as a whole and for its worst expert."""

    file: str
    tensor: str
    high_type: str
    low_type: str
    error: float
    worst_error: float
    worst_expert: int


@dataclass
class VerifyReport:
    """`problems` empty means that everything holds."""

    kind: str
    files: list[str]
    tensors_checked: int = 0
    bytes_read: int = 0
    checksums: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: list[TensorError] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


class _Check:
    """Shared state of the jobs."""

    def __init__(self, report: VerifyReport, progress: Progress, max_error: float) -> None:
        self.report = report
        self.progress = progress
        self.max_error = max_error
        self.jobs: list[tuple[int, Callable[[threading.Event], None]]] = []
        self.lock = threading.Lock()

    def problem(self, file: GgufFile, tensor: str | None, message: str) -> None:
        with self.lock:
            self.report.problems.append(str(ToolError(message, file=file.path, tensor=tensor)))

    def checksum(self, file: GgufFile, t: TensorInfo, expected: str) -> None:
        self.jobs.append((t.size, functools.partial(self._checksum, file, t, expected)))

    def _checksum(self, file: GgufFile, t: TensorInfo, expected: str, stop: threading.Event) -> None:
        found = hash_region(file, t.offset, t.size, t.name, self.progress, stop)
        with self.lock:
            self.report.tensors_checked += 1
            self.report.checksums += 1
            self.report.bytes_read += t.size
        if found != expected:
            self.problem(
                file,
                t.name,
                f"checksum {found[:16]}..., expected {expected[:16]}...: the data is damaged or was changed",
            )

    def values(self, file: GgufFile, t: TensorInfo) -> None:
        self.jobs.append((t.size, functools.partial(self._values, file, t)))

    def _values(self, file: GgufFile, t: TensorInfo, stop: threading.Event) -> None:
        """Expand a tensor and look for values that are not finite."""
        row = t.ne[0] if t.ne else 1
        if ggml.can_dequantize(t.type) and t.size:
            rows = t.size // t.type.row_bytes(row)
            step = chunk_rows(row)
            out = np.empty(min(step, rows) * row, np.float32)
            for first in range(0, rows, step):
                if stop.is_set():
                    raise Stopped
                n = min(step, rows - first)
                block = _read_rows(file, t.type, t.offset, row, first, n, out, t.name)
                if not np.isfinite(block.max()) or not np.isfinite(block.min()):
                    bad = first + int(np.flatnonzero(~np.isfinite(block))[0]) // row
                    self.problem(file, t.name, f"row {bad} holds a value that is not finite")
                    break
                self.progress.advance(n * t.type.row_bytes(row))
        with self.lock:
            self.report.tensors_checked += 1
            self.report.bytes_read += t.size

    def compare(self, high_model: Model, high: ExpertTensor, low: ExpertsFile) -> None:
        self.jobs.append((high.source_bytes, functools.partial(self._compare, high_model, high, low)))

    def _compare(self, high_model: Model, high: ExpertTensor, low_file: ExpertsFile, stop: threading.Event) -> None:
        low = low_file.experts[high.name]
        error, per_expert = expert_errors(high_model, high, low_file.model, low, self.progress, stop)
        worst = int(np.argmax(per_expert))
        result = TensorError(
            low_file.path.name,
            high.name,
            high.type.name if high.type else "mixed",
            low.type.name if low.type else "mixed",
            error,
            float(per_expert[worst]),
            worst,
        )
        with self.lock:
            self.report.errors.append(result)
        if not result.worst_error <= self.max_error:  # also for a value that is not a number
            self.problem(
                low_file.file,
                high.name,
                f"expert {worst} differs from the high one by {result.worst_error:.3g}, more than {self.max_error:g}",
            )

    def run(self, workers: int) -> None:
        self.progress.start(sum(size for size, _ in self.jobs), "verifying")
        try:
            run_jobs([job for _, job in self.jobs], workers or cpu_count())
        finally:
            self.progress.close()
        self.report.errors.sort(key=lambda e: (e.file, _natural(e.tensor)))
        self.report.problems.sort()


def _natural(name: str) -> tuple[int, str]:
    number = name.split(".")[1] if name.startswith("blk.") else "0"
    return int(number) if number.isdigit() else 0, name


def _read_rows(
    file: GgufFile, t: ggml.TensorType, offset: int, ne0: int, first: int, n: int, out: F32Array, name: str
) -> F32Array:
    row_bytes = t.row_bytes(ne0)
    raw = np.empty(n * row_bytes, np.uint8)
    file.read_into(raw.data, offset + first * row_bytes, name)
    block = out[: n * ne0]
    ggml.dequantize(t, raw, block)
    return block


def expert_errors(
    high_model: Model,
    high: ExpertTensor,
    low_model: Model,
    low: ExpertTensor,
    progress: Progress,
    stop: threading.Event,
) -> tuple[float, npt.NDArray[np.float64]]:
    """Relative error of a tensor and of each of its experts.

    nan where a value is not finite, inf where the high expert is zero and the low one is not.
    """
    ne0, ne1, n_expert = high.ne
    difference = np.zeros(n_expert)
    norm = np.zeros(n_expert)
    step = min(chunk_rows(ne0), ne1)
    a, b = np.empty(step * ne0, np.float32), np.empty(step * ne0, np.float32)
    low_segment = low.segments[0]
    for s in high.segments:
        for i in range(s.count):
            expert = s.first + i
            for first in range(0, ne1, step):
                if stop.is_set():
                    raise Stopped
                n = min(step, ne1 - first)
                x = _read_rows(high_model.files[s.file], s.type, s.offset, ne0, i * ne1 + first, n, a, high.name)
                y = _read_rows(
                    low_model.files[0], low_segment.type, low_segment.offset, ne0, expert * ne1 + first, n, b, low.name
                )
                norm[expert] += float(np.dot(x, x))
                np.subtract(x, y, out=y)
                difference[expert] += float(np.dot(y, y))
                progress.advance(n * s.type.row_bytes(ne0))
    with np.errstate(divide="ignore", invalid="ignore"):
        per_expert = np.where(difference == 0, 0.0, np.sqrt(difference / norm))
        total = 0.0 if not difference.any() else float(np.sqrt(difference.sum() / norm.sum()))
    per_expert[~np.isfinite(difference) | ~np.isfinite(norm)] = np.nan
    return total, per_expert


def verify(
    path: Path,
    *,
    model: Path | None = None,
    max_error: float = 1.0,
    quick: bool = False,
    workers: int = 0,
    progress: Progress | None = None,
) -> VerifyReport:
    """Verify a base file with its experts, a low-only file (against `model` if given), or an ordinary GGUF.

    `quick` reads no tensor data except the routers. Raises ToolError when the files cannot even be opened as what
    they claim to be.
    """
    kind = kind_of(path)
    progress = progress or NoProgress()
    if model is not None and kind != "experts":
        raise ToolError("--model is for an expert file made by --low-only", file=path, code=ExitCode.USAGE)
    if kind == "base":
        return _verify_pair(path, max_error, quick, workers, progress)
    if kind == "experts":
        return _verify_experts(path, model, max_error, quick, workers, progress)
    return _verify_model(path, quick, workers, progress)


def _verify_pair(path: Path, max_error: float, quick: bool, workers: int, progress: Progress) -> VerifyReport:
    with open_pair(path) as pair:
        report = VerifyReport("pair", [str(pair.path), *(str(f.path) for f in pair.expert_files)])
        check = _Check(report, progress, max_error)
        found = Model([pair.base]).router_hash
        if found != pair.router_hash:
            check.problem(
                pair.base, None, f"the routers hash to {found[:16]}..., the pair states {pair.router_hash[:16]}..."
            )
        if not quick:
            for name, t in pair.base.tensors.items():
                check.checksum(pair.base, t, pair.sums[name])
            for f, sums in [(pair.high, pair.sums), *zip(pair.lows, pair.low_sums, strict=True)]:
                for name, t in f.file.tensors.items():
                    check.checksum(f.file, t, sums[name])
            for low in pair.lows:
                for e in pair.high.experts.values():
                    check.compare(pair.high.model, e, low)
        check.run(workers)
        return report


def _verify_experts(
    path: Path, model: Path | None, max_error: float, quick: bool, workers: int, progress: Progress
) -> VerifyReport:
    low = ExpertsFile(path)
    source: Model | None = None
    try:
        report = VerifyReport("experts", [str(path)])
        check = _Check(report, progress, max_error)
        if low.model.routers and low.model.router_hash != low.router_hash:
            check.problem(low.file, None, "its routers do not have the hash that it states")
        if model is not None:
            source = open_model(model)
            report.files += [str(f.path) for f in source.files]
            _match_model(check, low, source)
        else:
            report.notes.append("without --model only the file itself is checked")
        if not quick:
            for name, t in low.file.tensors.items():
                check.checksum(low.file, t, low.sums[name])
            if source is not None and report.ok:
                for e in source.experts:
                    check.compare(source, e, low)
        check.run(workers)
        return report
    finally:
        low.file.close()
        if source is not None:
            source.close()


def _match_model(check: _Check, low: ExpertsFile, source: Model) -> None:
    experts = {e.name: e for e in source.require_experts()}
    if low.model.architecture != source.architecture:
        check.problem(
            low.file, None, f"is for the architecture {low.model.architecture}, the model is {source.architecture}"
        )
    if low.router_hash != source.router_hash:
        check.problem(low.file, None, f"was made from other routers than those of {source.path.name}: another model")
    for name in sorted(set(experts) ^ set(low.experts), key=_natural):
        check.problem(low.file, name, "is missing here" if name in experts else f"is not in {source.path.name}")
    for name in set(experts) & set(low.experts):
        if experts[name].ne != low.experts[name].ne:
            check.problem(low.file, name, f"has shape {list(low.experts[name].ne)}, the model {list(experts[name].ne)}")
    if check.report.ok and low.id != source.identity:
        check.report.notes.append(f"{low.path.name} was made from another file of this model than {source.path.name}")


def _verify_model(path: Path, quick: bool, workers: int, progress: Progress) -> VerifyReport:
    with open_model(path) as model:
        report = VerifyReport("model", [str(f.path) for f in model.files], notes=list(model.notes))
        check = _Check(report, progress, float("inf"))
        if not model.experts:
            report.notes.append("a dense model: no routed experts")
        if not quick:
            for i, t in model.tensors:
                check.values(model.files[i], t)
        check.run(workers)
        return report
