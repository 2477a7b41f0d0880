"""`pair`: split a MoE model into a base and two or more precisions of its experts.

`plan_pair` decides everything without writing: names, types, sizes, conflicts, space. `run_pair` carries a plan out.
The base file carries the keys that the engine reads (docs/gguf-tools.md has the list); expert files are ordinary GGUF
files that hold only expert tensors under their usual names, so any of them also works with the model it came from.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gguf_tools import ggml
from gguf_tools.convert import Target, convert_expert, copy_tensor, run_jobs
from gguf_tools.errors import ExitCode, ToolError, show
from gguf_tools.ggml import GgufContext, TensorType
from gguf_tools.header import TensorInfo
from gguf_tools.imatrix import Imatrix, read_imatrix
from gguf_tools.keys import (
    K_HIGH,
    K_HIGH_SIZE,
    K_ID,
    K_IMATRIX,
    K_KEPT,
    K_LOW,
    K_LOW_SHA,
    K_LOW_SIZES,
    K_ROLE,
    K_ROUTER,
    K_SHA,
    K_SOURCE_NOTES,
    K_SOURCE_SHA,
    K_SOURCE_SIZE,
    K_TENSORS,
    K_TYPE,
    K_VERSION,
    NO_SHA,
    VERSION,
)
from gguf_tools.model import SPLIT_KEYS, ExpertTensor, GgufFile, Model, open_model
from gguf_tools.output import (
    Journal,
    NoProgress,
    OutputFile,
    Progress,
    Slot,
    check_outputs,
    check_space,
    make_folder,
    peek_journal,
)
from gguf_tools.pairfile import plain_name
from gguf_tools.types import FILE_TYPES, HIGH_TYPES, NEED_IMATRIX, Choice, choose, low_type

EXPERT_ALIGNMENT = 4096  # bytes: a page, and the largest block of a disk that direct reads must respect


@dataclass(frozen=True)
class PairOptions:
    """What the user asks for. `high` None: keep the source's types, or F16 when they are F32."""

    model: Path
    folder: Path
    high: str | None = None
    low: tuple[str, ...] = ("q4_0",)
    imatrix: Path | None = None
    low_only: bool = False
    no_fallback: bool = False
    force: bool = False
    name: str | None = None
    workers: int = 0  # 0: as many as there are CPUs to use


@dataclass
class ExpertFile:
    """One planned expert file: role 'high' or 'low', and the choice for each expert tensor by name."""

    role: str
    label: str
    path: Path
    choices: dict[str, Choice]
    size: int = 0

    @property
    def kept(self) -> bool:
        """Whether every tensor has the source's own bytes."""
        return all(c.same for c in self.choices.values())


@dataclass
class PairPlan:
    """A checked plan; `close` it after use."""

    options: PairOptions
    model: Model
    base_path: Path | None
    files: list[ExpertFile]
    imatrix: Imatrix | None
    source_notes: list[str]
    base_size: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def outputs(self) -> list[Path]:
        return [f.path for f in self.files] + ([self.base_path] if self.base_path else [])

    @property
    def journal_path(self) -> Path:
        return self.options.folder / f"{self.stem}.pair-journal"

    @property
    def stem(self) -> str:
        return self.options.name or self.model.stem

    @property
    def total_size(self) -> int:
        return self.base_size + sum(f.size for f in self.files)

    @property
    def fallbacks(self) -> list[tuple[str, str, Choice]]:
        """(file label, tensor, choice) of every tensor that is not stored as asked."""
        return [(f.label, name, c) for f in self.files for name, c in f.choices.items() if c.kind]

    def close(self) -> None:
        self.model.close()


@dataclass(frozen=True)
class PairResult:
    """What `run_pair` did."""

    outputs: list[Path]
    seconds: float
    read_bytes: int
    written_bytes: int
    resumed_tensors: int


def cpu_count() -> int:
    """CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --------------------------------------------------------------------------------------------------------- planning


def plan_pair(options: PairOptions) -> PairPlan:
    """Open the model and decide what would be written; raises ToolError and writes nothing."""
    if options.high is not None and options.high not in HIGH_TYPES:
        raise ToolError(f"--high {show(options.high)} is not one of {', '.join(HIGH_TYPES)}", code=ExitCode.USAGE)
    if not options.low:
        raise ToolError("at least one --low type is needed", code=ExitCode.USAGE)
    if options.low_only and options.high is not None:
        raise ToolError("--low-only makes no high file: leave out --high", code=ExitCode.USAGE)
    if options.name is not None and (not plain_name(options.name) or options.name.startswith(".")):
        raise ToolError(f"--name {show(options.name)} is not a plain file name", code=ExitCode.USAGE)
    lows = [low_type(name) for name in options.low]
    imatrix = read_imatrix(options.imatrix) if options.imatrix else None
    model = open_model(options.model)
    try:
        return _plan(options, model, lows, imatrix)
    except BaseException:
        model.close()
        raise


def _plan(options: PairOptions, model: Model, lows: Sequence[TensorType], imatrix: Imatrix | None) -> PairPlan:
    if K_VERSION in model.context:
        raise ToolError("is itself part of a pair: give the original model", file=model.path, code=ExitCode.UNSUPPORTED)
    experts = model.require_experts()
    architecture = model.architecture
    if not architecture.isprintable():
        raise ToolError("general.architecture holds control characters", file=model.path)
    _ = model.router_hash  # a model without routers is refused here
    stem = options.name or model.stem
    files: list[ExpertFile] = []
    if not options.low_only:
        high = _high_type(options.high, experts)
        choices = {e.name: choose(e, high) for e in experts}
        label = _dominant(experts, choices)
        files.append(ExpertFile("high", label, options.folder / f"{stem}.experts-{label}.gguf", choices))
    for t in lows:
        choices = {e.name: choose(e, t) for e in experts}
        files.append(ExpertFile("low", t.name, options.folder / f"{stem}.experts-{t.name}.gguf", choices))
    plan = PairPlan(
        options=options,
        model=model,
        base_path=None if options.low_only else options.folder / f"{stem}.base.gguf",
        files=files,
        imatrix=imatrix,
        source_notes=_source_notes(model),
        notes=list(model.notes),
    )
    _check_names(plan)
    _check_imatrix(plan, experts)
    if options.no_fallback and (changed := [x for x in plan.fallbacks if x[2].kind == "fallback"]):
        label, name, choice = changed[0]
        raise ToolError(
            f"{len(changed)} tensors would not be stored as asked, the first as {choice.type.name} "
            f"instead of {label}: {choice.reason}",
            file=model.path,
            tensor=name,
            code=ExitCode.UNSUPPORTED,
        )
    _compare_sizes(plan, experts)
    for f, out in zip(plan.files, _expert_outputs(plan), strict=True):
        f.size = out.size
    if plan.base_path is not None:
        plan.base_size = _base_output(plan).size
    journal = peek_journal(plan.journal_path)
    resumed = bool(journal) and journal[0] == {"job": _fingerprint(plan)}
    done = frozenset(str(line["file"]) for line in journal if "file" in line) if resumed else frozenset()
    inputs = [f.path for f in model.files] + ([options.imatrix] if options.imatrix else [])
    check_outputs(plan.outputs, inputs, force=options.force, done=done)
    check_space(options.folder, plan.total_size, [p.with_name(p.name + ".part") for p in plan.outputs])
    return plan


def _high_type(wanted: str | None, experts: Sequence[ExpertTensor]) -> TensorType | None:
    if wanted is None:
        wanted = "f16" if all(e.type is not None and e.type.name == "F32" for e in experts) else "keep"
    return None if wanted == "keep" else ggml.type_by_name(wanted)


def _dominant(experts: Sequence[ExpertTensor], choices: dict[str, Choice]) -> str:
    """The type that holds most bytes: it names the file."""
    sizes: dict[str, int] = {}
    for e in experts:
        t = choices[e.name].type
        sizes[t.name] = sizes.get(t.name, 0) + e.bytes_as(t)
    return max(sizes, key=lambda name: sizes[name])


def _check_names(plan: PairPlan) -> None:
    """The base names its experts: only what a reader accepts may be written."""
    for path in plan.outputs:
        if not plain_name(path.name):
            raise ToolError("is not a name that a base file can hold; use --name", file=path, code=ExitCode.USAGE)


def _check_imatrix(plan: PairPlan, experts: Sequence[ExpertTensor]) -> None:
    """Require importance data where the type cannot do without, and say what the file lacks."""
    lacking: list[str] = []
    for e in experts:
        rows = plan.imatrix.rows(e.name, e.ne[0], e.n_expert) if plan.imatrix else None
        if rows is not None:
            continue
        lacking.append(e.name)
        for f in plan.files:
            c = f.choices[e.name]
            if c.type.name in NEED_IMATRIX and not c.same:
                how = "the imatrix has no data for it" if plan.imatrix else "give one with --imatrix"
                raise ToolError(
                    f"{c.type.name} needs an importance matrix: {how}",
                    file=plan.model.path,
                    tensor=e.name,
                    code=ExitCode.UNSUPPORTED,
                )
    if plan.imatrix:
        if lacking:
            plan.notes.append(
                f"{plan.imatrix.path.name}: no data for {len(lacking)} expert tensors: {', '.join(lacking)}"
            )
        for name, unrouted in plan.imatrix.unrouted.items():
            if any(e.name == name for e in experts):
                plan.notes.append(
                    f"{plan.imatrix.path.name}: {name}: never routed, equal weights used: experts {_ranges(unrouted)}"
                )


def _ranges(numbers: Sequence[int]) -> str:
    parts: list[str] = []
    start = previous = None
    for n in [*numbers, None]:
        if previous is not None and n == previous + 1:
            previous = n
            continue
        if start is not None:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = n
    return ", ".join(parts)


def _compare_sizes(plan: PairPlan, experts: Sequence[ExpertTensor]) -> None:
    sizes = {id(f): sum(e.bytes_as(f.choices[e.name].type) for e in experts) for f in plan.files}
    if plan.files[0].role != "high":
        source = sum(e.source_bytes for e in experts)
        for f in plan.files:
            if sizes[id(f)] >= source:
                plan.notes.append(f"the {f.label} experts are not smaller than the model's own")
        return
    for f in plan.files[1:]:
        if sizes[id(f)] >= sizes[id(plan.files[0])]:
            plan.notes.append(f"the {f.label} experts are not smaller than the high ones ({plan.files[0].label})")


def _source_notes(model: Model) -> list[str]:
    """What a merge of these files cannot give back, in words; empty when it is byte-identical to the source."""
    notes = []
    if len(model.files) > 1:
        notes.append(f"{len(model.files)} shards become one file without split.* keys")
    elif any(key in model.context for key in SPLIT_KEYS):
        notes.append("split.* keys are left out")
    if legacy := sum(len(e.segments) for e in model.experts if e.legacy):
        notes.append(f"{legacy} per-expert tensors become {sum(e.legacy for e in model.experts)} fused ones")
    if len(model.files) > 1:
        return notes
    f = model.files[0]
    h = f.header
    if h.version != ggml.GGUF_VERSION:
        notes.append(f"GGUF version {h.version} becomes {ggml.GGUF_VERSION}")
    elif f.context.meta_bytes() != h.raw:
        notes.append(
            "the header is not written as ggml writes it (trailing dimensions of 1, or padding that is not zero)"
        )
    ends = [t.offset + t.size for t in h.tensors]
    starts = [t.offset for t in h.tensors[1:]] + [min(h.file_size, -(-ends[-1] // h.alignment) * h.alignment)]
    gaps = [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]
    if any(os.pread(f.fd, start - end, end).strip(b"\0") for end, start in gaps):
        notes.append("padding between tensors that is not zero becomes zero")
    if h.file_size > starts[-1]:
        notes.append(f"{h.file_size - starts[-1]} bytes after the last tensor are left out")
    return notes


def _fingerprint(plan: PairPlan) -> str:
    """Two runs with one fingerprint produce the same bytes."""
    job = {
        "version": VERSION,
        "ggml": ggml.version(),
        "source": [
            [os.path.realpath(f.path), f.header.file_size, f.header.mtime_ns, hashlib.sha256(f.header.raw).hexdigest()]
            for f in plan.model.files
        ],
        "files": [[f.role, f.path.name, {n: c.type.name for n, c in f.choices.items()}] for f in plan.files],
        "base": plan.base_path.name if plan.base_path else None,
        "imatrix": None,
    }
    if plan.imatrix:
        status = os.stat(plan.imatrix.path)
        job["imatrix"] = [os.path.realpath(plan.imatrix.path), status.st_size, status.st_mtime_ns]
    return hashlib.sha256(json.dumps(job, sort_keys=True).encode("utf-8", "surrogateescape")).hexdigest()


# ---------------------------------------------------------------------------------------------------------- headers


def new_context(alignment: int) -> GgufContext:
    """An empty version-3 context whose tensors will be aligned to `alignment` bytes.

    ggml takes the alignment from a parsed key only, hence the small header.
    """
    key = b"general.alignment"
    header = b"GGUF" + ggml.GGUF_VERSION.to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    header += len(key).to_bytes(8, "little") + key + ggml.KV.U32.to_bytes(4, "little") + alignment.to_bytes(4, "little")
    return GgufContext.from_header(header)


def _expert_outputs(plan: PairPlan) -> list[OutputFile]:
    model = plan.model
    outputs = []
    for f in plan.files:
        ctx = new_context(EXPERT_ALIGNMENT)
        ctx.set_str("general.architecture", model.architecture)
        ctx.set_str("general.name", model.context.get_str("general.name") or plan.stem)
        if f.label in FILE_TYPES:
            ctx.set_u32("general.file_type", FILE_TYPES[f.label])
        ctx.set_u32("general.quantization_version", ggml.QNT_VERSION)
        ctx.set_u32(K_VERSION, VERSION)
        ctx.set_str(K_ID, model.identity)
        ctx.set_str(K_ROUTER, model.router_hash)
        ctx.set_str(K_ROLE, f.role)
        ctx.set_str(K_TYPE, f.label)
        ctx.set_bool(K_KEPT, f.kept)
        if plan.imatrix and f.role == "low":
            ctx.set_str(K_IMATRIX, show(plan.imatrix.path.name))
        tensors: list[tuple[str, TensorType, tuple[int, ...]]] = []
        if plan.options.low_only:  # the routers show which model the experts belong to
            tensors += [(t.name, t.type, t.ne) for _, t in model.routers]
        tensors += [(e.name, f.choices[e.name].type, e.ne) for e in model.experts]
        ctx.set_strs(K_SHA, [NO_SHA] * len(tensors))
        outputs.append(OutputFile(f.path, ctx, tensors))
    return outputs


def _base_output(plan: PairPlan) -> OutputFile:
    model = plan.model
    assert plan.base_path is not None
    ctx = GgufContext.from_header(model.files[0].header.metadata_only())
    for key in SPLIT_KEYS:
        ctx.remove(key)
    high, lows = plan.files[0], plan.files[1:]
    single = len(model.files) == 1
    ctx.set_u32(K_VERSION, VERSION)
    ctx.set_str(K_ID, model.identity)
    ctx.set_str(K_ROUTER, model.router_hash)
    ctx.set_str(K_HIGH, high.path.name)
    ctx.set_strs(K_LOW, [f.path.name for f in lows])
    ctx.set_u64(K_HIGH_SIZE, high.size)
    ctx.set_u64s(K_LOW_SIZES, [f.size for f in lows])
    ctx.set_strs(K_TENSORS, model.merged_names)
    ctx.set_str(K_SOURCE_SHA, hashlib.sha256(model.files[0].header.raw).hexdigest() if single else "")
    ctx.set_u64(K_SOURCE_SIZE, model.files[0].header.file_size if single else 0)
    ctx.set_strs(K_SOURCE_NOTES, plan.source_notes)
    ctx.set_strs(K_SHA, [NO_SHA] * len(model.merged_names))
    ctx.set_strs(K_LOW_SHA, [NO_SHA] * (len(lows) * len(model.experts)))
    tensors = [(t.name, t.type, t.ne or (1,)) for _, t in model.base_tensors]
    return OutputFile(plan.base_path, ctx, tensors)


# ---------------------------------------------------------------------------------------------------------- running


def run_pair(plan: PairPlan, progress: Progress | None = None) -> PairResult:
    """Write the files of a plan, going on where a killed run of the same plan stopped."""
    started = time.monotonic()
    progress = progress or NoProgress()
    make_folder(plan.options.folder)
    journal = Journal(plan.journal_path, _fingerprint(plan))
    outputs: list[OutputFile] = []
    finished = False
    try:
        experts, base = _expert_outputs(plan), _base_output(plan) if plan.base_path else None
        outputs = [*experts, *([base] if base else [])]
        complete = {
            o.path.name for o in outputs if o.path.name in journal.files and not o.part.exists() and o.path.exists()
        }
        for o in outputs:
            if o.path.name not in complete:
                o.open(keep=journal.resumed)
        run = _Run(plan, experts, base, journal, complete, progress)
        run.data()
        plan.model.check_unchanged()
        run.headers()
        finished = True
        return PairResult(
            outputs=[o.path for o in outputs],
            seconds=time.monotonic() - started,
            read_bytes=sum(f.header.file_size for f in plan.model.files),
            written_bytes=sum(o.size for o in outputs),
            resumed_tensors=run.resumed,
        )
    finally:
        for o in outputs:
            o.close()
        journal.close(remove=finished)
        progress.close()


class _Run:
    """One execution of a plan: the jobs, and the checksums they bring."""

    def __init__(
        self,
        plan: PairPlan,
        experts: list[OutputFile],
        base: OutputFile | None,
        journal: Journal,
        complete: set[str],
        progress: Progress,
    ) -> None:
        self.plan = plan
        self.experts = experts
        self.base = base
        self.journal = journal
        self.complete = complete
        self.progress = progress
        self.sums: dict[str, list[str]] = {}
        self.resumed = 0
        self.lock = threading.Lock()

    def data(self) -> None:
        """Bring every tensor into the part files."""
        model = self.plan.model
        jobs: list[tuple[tuple[int, int], Callable[[threading.Event], None]]] = []
        total = 0
        for e in model.experts:
            total += e.source_bytes
            jobs.append(((e.segments[0].file, e.segments[0].offset), functools.partial(self._expert, e)))
        if self.base is not None:
            for i, t in model.base_tensors:
                total += t.size
                jobs.append(((i, t.offset), functools.partial(self._copy, model.files[i], t, [self.base])))
        else:
            for i, t in model.routers:
                total += t.size
                jobs.append(((i, t.offset), functools.partial(self._copy, model.files[i], t, self.experts)))
        jobs.sort(key=lambda job: job[0])  # in file order: the source is read from front to back
        self.progress.start(total, "pairing")
        run_jobs([job for _, job in jobs], self.plan.options.workers or cpu_count())

    def _targets(self, e: ExpertTensor) -> list[Target]:
        return [
            Target(o, o.slots[e.name], f.choices[e.name].type)
            for f, o in zip(self.plan.files, self.experts, strict=True)
        ]

    def _expert(self, e: ExpertTensor, stop: threading.Event) -> None:
        targets = self._targets(e)
        if self._resume(e.name, [(t.file, t.slot) for t in targets], e.source_bytes):
            return
        imatrix = self.plan.imatrix
        rows = imatrix.rows(e.name, e.ne[0], e.n_expert) if imatrix else None
        try:
            sums = convert_expert(self.plan.model, e, targets, rows, self.progress, stop)
        except ValueError as error:
            raise ToolError(str(error), file=self.plan.model.path, tensor=e.name, code=ExitCode.UNSUPPORTED) from None
        self._record(e.name, sums)

    def _copy(self, source: GgufFile, t: TensorInfo, files: list[OutputFile], stop: threading.Event) -> None:
        if self._resume(t.name, [(out, out.slots[t.name]) for out in files], t.size):
            return
        sums = []
        for n, out in enumerate(files):
            progress = self.progress if n == 0 else NoProgress()
            sums.append(copy_tensor(source, t.offset, out, out.slots[t.name], progress, stop))
        self._record(t.name, sums)

    def _record(self, name: str, sums: list[str]) -> None:
        with self.lock:
            self.sums[name] = sums
            self.journal.add({"tensor": name, "sha256": sums})

    def _resume(self, name: str, places: Sequence[tuple[OutputFile, Slot]], source_bytes: int) -> bool:
        """Take a finished tensor from the journal if the part files still hold exactly its bytes."""
        sums = self.journal.tensors.get(name)
        if sums is None or len(sums) != len(places):
            return False
        for (out, slot), expected in zip(places, sums, strict=True):
            if out.path.name not in self.complete and _part_hash(out, slot) != expected:
                return False
        with self.lock:
            self.sums[name] = sums
            self.resumed += 1
        self.progress.advance(source_bytes)
        return True

    def headers(self) -> None:
        """Complete and publish the files, the base last: a base that exists has its experts."""
        model = self.plan.model
        for k, out in enumerate(self.experts):
            out.context.set_strs(K_SHA, [self.sums[name][k] for name in out.slots])
            self._finish(out)
        if self.base is not None:
            lows = range(1, len(self.experts))
            self.base.context.set_strs(K_SHA, [self.sums[name][0] for name in model.merged_names])
            self.base.context.set_strs(K_LOW_SHA, [self.sums[e.name][k] for k in lows for e in model.experts])
            self._finish(self.base)

    def _finish(self, out: OutputFile) -> None:
        if out.path.name in self.complete:
            return
        out.finish()
        self.journal.add({"file": out.path.name})
        out.publish()


def _part_hash(out: OutputFile, slot: Slot) -> str:
    digest = hashlib.sha256()
    buffer = bytearray(min(4 << 20, max(1, slot.size)))
    for at in range(0, slot.size, len(buffer)):
        view = memoryview(buffer)[: min(len(buffer), slot.size - at)]
        if out.read(slot, at, view) != len(view):
            return ""
        digest.update(view)
    return digest.hexdigest()
