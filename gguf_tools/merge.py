"""`merge`: an ordinary GGUF back from a base and one of its expert files, every tensor checked on the way.

For experts that were kept (`--high keep`), the result is the source byte for byte when that was one version-3 file
without legacy names; what differs otherwise was noted by `pair` and is repeated here.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gguf_tools import ggml
from gguf_tools.convert import copy_tensor, run_jobs
from gguf_tools.errors import ExitCode, ToolError
from gguf_tools.ggml import GgufContext, TensorType
from gguf_tools.keys import PREFIX
from gguf_tools.model import GgufFile
from gguf_tools.output import NoProgress, OutputFile, Progress, check_outputs, check_space, make_folder
from gguf_tools.pair import cpu_count
from gguf_tools.pairfile import ExpertsFile, Pair, open_pair
from gguf_tools.types import FILE_TYPES


@dataclass(frozen=True)
class MergeResult:
    """`identical`: the bytes are those of the source. `differences`: what they are not, in words."""

    path: Path
    size: int
    identical: bool
    differences: list[str]


@dataclass
class MergePlan:
    pair: Pair
    experts: ExpertsFile
    output: OutputFile
    final_size: int
    differences: list[str]

    def close(self) -> None:
        self.output.close()
        self.pair.close()


def plan_merge(base: Path, output: Path, experts: str = "high", *, force: bool = False) -> MergePlan:
    """Decide what a merge writes; raises ToolError and writes nothing."""
    pair = open_pair(base)
    try:
        chosen = pair.expert_file(experts)
        ctx = GgufContext.from_header(pair.base.header.metadata_only())
        for key in ctx.keys():
            if key.startswith(PREFIX):
                ctx.remove(key)
        differences = list(pair.source_notes)
        if not chosen.kept:
            differences.append(f"the experts are the {chosen.label} copies")
            _set_number(ctx, "general.file_type", FILE_TYPES.get(chosen.label), differences)
            if any(t.type.is_quantized for t in chosen.file.header.tensors):
                _set_number(ctx, "general.quantization_version", ggml.QNT_VERSION, differences)
        tensors: list[tuple[str, TensorType, tuple[int, ...]]] = []
        for name in pair.tensors:
            t = chosen.file.tensors.get(name) or pair.base.tensors[name]
            tensors.append((name, t.type, t.ne))
        out = OutputFile(output, ctx, tensors)
        last = out.slots[pair.tensors[-1]]
        exact_end = last.offset + last.size <= pair.source_size <= out.size and not differences
        plan = MergePlan(pair, chosen, out, pair.source_size if exact_end else out.size, differences)
        check_outputs([output], [base, *(f.path for f in pair.expert_files)], force=force)
        check_space(output.parent, out.size, [out.part])
        return plan
    except BaseException:
        pair.close()
        raise


def _set_number(ctx: GgufContext, key: str, value: int | None, differences: list[str]) -> None:
    old = ctx.get(key)
    if value is not None and old != value:
        ctx.set_u32(key, value)
        differences.append(f"{key} becomes {value}" + (f" (was {old})" if old is not None else ""))


def run_merge(plan: MergePlan, progress: Progress | None = None, workers: int = 0) -> MergeResult:
    """Write the merged file; a tensor whose checksum is not the base's ends the merge with its name."""
    progress = progress or NoProgress()
    pair, out = plan.pair, plan.output
    make_folder(out.path.parent)
    try:
        out.open(keep=False)
        index = pair.lows.index(plan.experts) if plan.experts in pair.lows else None
        sums = pair.sums if index is None else {**pair.sums, **pair.low_sums[index]}
        jobs: list[Callable[[threading.Event], None]] = []
        for name in pair.tensors:
            source = plan.experts.file if name in plan.experts.experts else pair.base
            jobs.append(functools.partial(_copy, source, name, sums[name], out, progress))
        progress.start(sum(s.size for s in out.slots.values()), "merging")
        run_jobs(jobs, workers or cpu_count())
        for f in (pair.base, plan.experts.file):
            f.check_unchanged()
        out.truncate(plan.final_size)
        out.finish()
        out.publish()
    except BaseException:
        out.close()
        out.part.unlink(missing_ok=True)
        raise
    finally:
        progress.close()
    header = hashlib.sha256(out.context.meta_bytes()).hexdigest()
    differences = list(plan.differences)
    identical = not differences and header == pair.source_header_sha and plan.final_size == pair.source_size
    if not differences and not identical:
        differences.append("the header is not the source's")
    return MergeResult(out.path, plan.final_size, identical, differences)


def _copy(
    source: GgufFile, name: str, expected: str, out: OutputFile, progress: Progress, stop: threading.Event
) -> None:
    found = copy_tensor(source, source.tensors[name].offset, out, out.slots[name], progress, stop)
    if found != expected:
        raise ToolError(
            "does not have the checksum that the base states: the file is damaged",
            file=source.path,
            tensor=name,
            code=ExitCode.MISMATCH,
        )
