"""The command `gguf-tools`: options, tables and progress bars around the functions of this package."""

from __future__ import annotations

import functools
import json
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from gguf_tools.errors import ExitCode, ToolError, show, show_path
from gguf_tools.inspect import Inspection
from gguf_tools.inspect import inspect as inspect_file
from gguf_tools.merge import plan_merge, run_merge
from gguf_tools.output import NoProgress, Progress
from gguf_tools.pair import PairOptions, PairPlan, PairResult, cpu_count, plan_pair, run_pair
from gguf_tools.plan import Machine, Plan, expert_piece, make_plan, measure_disk, measure_ram, parse_mix
from gguf_tools.units import format_rate, format_size, parse_rate, parse_size
from gguf_tools.verify import VerifyReport
from gguf_tools.verify import verify as verify_files

app = typer.Typer(
    name="gguf-tools",
    help="Pairs of high- and low-precision expert files from any MoE GGUF.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_err = Console(stderr=True, highlight=False)


def _out() -> Console:
    """Tables go to stdout at its own width, or wide enough for a file."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


class _Bar:
    """A rich progress bar with bytes per second and time left, drawn only on a terminal."""

    def __init__(self) -> None:
        self._bar: RichProgress | None = None
        self._task: Any = None
        self._lock = threading.Lock()

    def start(self, total_bytes: int, what: str) -> None:
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=_err,
            transient=True,
        )
        self._task = self._bar.add_task(what, total=total_bytes)
        self._bar.start()

    def advance(self, n_bytes: int) -> None:
        if self._bar is not None:
            with self._lock:
                self._bar.advance(self._task, n_bytes)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _progress(quiet: bool) -> Progress:
    return NoProgress() if quiet or not _err.is_terminal else _Bar()


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")]
Workers = Annotated[int, typer.Option("--threads", "-t", min=0, max=1024, help="Worker threads; 0: one per CPU.")]
Force = Annotated[bool, typer.Option("--force", help="Replace existing outputs (never an input).")]


@app.command()
def pair(
    model: Annotated[Path, typer.Argument(help="A MoE GGUF (any shard of a sharded one), or a Hugging Face folder.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the new files.")],
    high: Annotated[
        str | None, typer.Option(help="f16, bf16, q8_0 or keep. Default: keep, or f16 for F32 experts.")
    ] = None,
    low: Annotated[
        list[str] | None, typer.Option(help="Type of the low copy; may be given several times. Default: q4_0.")
    ] = None,
    imatrix: Annotated[Path | None, typer.Option(help="Importance matrix from llama-imatrix.")] = None,
    low_only: Annotated[
        bool, typer.Option("--low-only", help="Only the low file, for a GGUF that is used as it is.")
    ] = False,
    no_fallback: Annotated[
        bool, typer.Option("--no-fallback", help="Fail if a tensor cannot have the asked type.")
    ] = False,
    name: Annotated[
        str | None, typer.Option(help="NAME of NAME.base.gguf. Default: from the model's file name.")
    ] = None,
    force: Force = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be written, write nothing.")] = False,
    threads: Workers = 0,
    quiet: Quiet = False,
) -> None:
    """Split a model into a base and expert files of several precisions."""
    options = PairOptions(
        model=model,
        folder=output,
        high=high.lower() if high else None,
        low=tuple(t.strip() for t in low) if low else ("q4_0",),
        imatrix=imatrix,
        low_only=low_only,
        no_fallback=no_fallback,
        force=force,
        name=name,
        workers=threads,
    )
    if model.is_dir():
        from gguf_tools.hf import converted

        with converted(options, dry_run=dry_run) as changed:
            _pair(changed, dry_run, quiet)
    else:
        _pair(options, dry_run, quiet)


def _pair(options: PairOptions, dry_run: bool, quiet: bool) -> None:
    plan = plan_pair(options)
    try:
        result = None if dry_run else run_pair(plan, _progress(quiet))
        _show_pair(plan, result)
    finally:
        plan.close()


def _show_pair(plan: PairPlan, result: PairResult | None) -> None:
    table = Table(title="would write" if result is None else "written", title_justify="left")
    for column in ("file", "holds", "types"):
        table.add_column(column, overflow="fold")
    table.add_column("size", justify="right")
    table.add_column("of source experts", justify="right")
    source = sum(e.source_bytes for e in plan.model.experts)
    if plan.base_path:
        table.add_row(escape(show_path(plan.base_path)), "everything else", "", format_size(plan.base_size), "")
    for f in plan.files:
        types: dict[str, int] = {}
        for c in f.choices.values():
            types[c.type.name] = types.get(c.type.name, 0) + 1
        names = ", ".join(f"{name} x{n}" for name, n in types.items())
        table.add_row(
            escape(show_path(f.path)), f"{f.role} experts", names, format_size(f.size), f"{100 * f.size / source:.1f} %"
        )
    out = _out()
    out.print(table)
    for note in plan.notes:
        out.print(escape(show(f"note: {note}")), soft_wrap=True)
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for label, name, c in plan.fallbacks:
        groups.setdefault((label, c.kind, c.type.name, c.reason), []).append(name)
    for (label, kind, stored, reason), tensors in groups.items():
        word = "fallback" if kind == "fallback" else "kept"
        out.print(escape(f"{word}: {label} -> {stored} for {len(tensors)} tensors, because {reason}:"), soft_wrap=True)
        for name in tensors:
            out.print(escape(f"  {name}"), soft_wrap=True)
    if plan.base_path:
        if plan.source_notes:
            out.print(
                escape(show("a merge would differ from the source: " + "; ".join(plan.source_notes))), soft_wrap=True
            )
        elif plan.files[0].kept:
            out.print("a merge with the high experts would be byte-identical to the source")
    if result is not None:
        resumed = f", {result.resumed_tensors} tensors taken over from an earlier run" if result.resumed_tensors else ""
        rate = format_rate(result.read_bytes / max(result.seconds, 1e-9))
        out.print(f"{result.seconds:.1f} s, read at {rate}, {format_size(result.written_bytes)} written{resumed}")


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="A base file, an expert file, or any GGUF.")],
    memory: Annotated[
        list[str] | None, typer.Option(help="Say what fits into this much memory, e.g. 24G; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Show layers, experts, types and bytes."""
    sizes = [(text, parse_size(text, "--memory")) for text in memory or []]
    info = inspect_file(file)
    if as_json:
        value = info.to_json()
        if info.layers:
            value["fits"] = [
                {"memory": size, **{label: info.fits(size, label) for label in info.labels}} for _, size in sizes
            ]
        _print_json(value)
        return
    _show_inspection(info, sizes)


def _show_inspection(info: Inspection, sizes: list[tuple[str, int]]) -> None:
    out = _out()
    out.print(
        escape(
            show(f"{info.kind}: {info.name or '(no name)'}, architecture {info.architecture}, {info.n_layers} blocks")
        ),
        soft_wrap=True,
    )
    for f in info.files:
        out.print(
            escape(
                show(
                    f"  {f['path']}: {format_size(f['bytes'])}, {f['tensors']} tensors, "
                    f"aligned to {f['alignment']} bytes"
                )
            ),
            soft_wrap=True,
        )
    for note in info.notes:
        out.print(escape(show(f"note: {note}")), soft_wrap=True)
    if not info.layers:
        out.print("a dense model: no routed experts")
        return
    shared = f", {info.n_shared} shared" if info.n_shared else ""
    used = "?" if info.n_used is None else info.n_used
    out.print(f"experts: {info.n_expert} per layer, {used} used per token{shared}; {info.total_experts} in all")
    table = Table()
    table.add_column("layer", justify="right")
    table.add_column("experts", justify="right")
    for label in info.labels:
        table.add_column(f"{label}: types")
        table.add_column("one expert", justify="right")
        table.add_column("layer", justify="right")
    for layer in info.layers:
        row = [str(layer.layer), str(layer.n_expert)]
        for c in layer.copies:
            types = set(c.types.values())
            text = types.pop() if len(types) == 1 else ", ".join(f"{role} {t}" for role, t in c.types.items())
            row += [text, format_size(c.expert_bytes), format_size(c.layer_bytes)]
        table.add_row(*row)
    out.print(table)
    out.print(f"everything else: {format_size(info.base_bytes)}")
    for label in info.labels:
        copies = info.copies(label)
        aligned = sum(c.aligned for c in copies)
        how = (
            "each piece one aligned direct read"
            if aligned == len(copies)
            else f"aligned for direct reads in {aligned} of {len(copies)} layers; "
            "elsewhere a read covers up to one 4 KiB block more at each end"
        )
        out.print(
            f"{label}: {format_size(info.expert_bytes(label))}; an expert is {copies[0].reads} pieces, {how}",
            soft_wrap=True,
        )
    for text, size in sizes:
        for label in info.labels:
            fit = info.fits(size, label)
            if fit["left"] < 0 and fit["experts"] == 0:
                out.print(f"{escape(show(text))}: the rest of the model alone needs {format_size(info.base_bytes)}")
                break
            out.print(
                f"{escape(show(text))}: beside the rest, {fit['experts']} of {info.total_experts} experts "
                f"({100 * fit['share']:.1f} %) as {label}"
            )


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(help="A base file, an expert file, or any GGUF.")],
    model: Annotated[
        Path | None, typer.Option(help="The model that an expert file made by --low-only belongs to.")
    ] = None,
    max_error: Annotated[
        float, typer.Option(min=0.0, help="Largest relative error of an expert that is accepted.")
    ] = 1.0,
    quick: Annotated[bool, typer.Option("--quick", help="Structure, ids and routers only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
    threads: Workers = 0,
    quiet: Quiet = False,
) -> None:
    """Check structure, checksums and the distance of low from high. Exit code 7 if something is wrong."""
    report = verify_files(
        file, model=model, max_error=max_error, quick=quick, workers=threads, progress=_progress(quiet or as_json)
    )
    if as_json:
        _print_json({"ok": report.ok, **asdict(report)})
    else:
        _show_report(report)
    if not report.ok:
        raise typer.Exit(ExitCode.MISMATCH)


def _show_report(report: VerifyReport) -> None:
    out = _out()
    if report.errors:
        table = Table(title="low against high: ||high - low|| / ||high||", title_justify="left")
        for column in ("file", "tensor", "types"):
            table.add_column(column, overflow="fold")
        for column in ("tensor", "worst expert", "its error"):
            table.add_column(column, justify="right")
        for e in report.errors:
            table.add_row(
                escape(e.file),
                escape(e.tensor),
                f"{e.high_type} -> {e.low_type}",
                f"{e.error:.4f}",
                str(e.worst_expert),
                f"{e.worst_error:.4f}",
            )
        out.print(table)
    for note in report.notes:
        out.print(escape(show(f"note: {note}")), soft_wrap=True)
    for problem in report.problems:
        out.print(escape(problem), soft_wrap=True)
    checked = f"{report.tensors_checked} tensors, {format_size(report.bytes_read)} read, {report.checksums} checksums"
    if report.errors:
        worst = max(report.errors, key=lambda e: e.worst_error)
        checked += f"; worst expert {worst.worst_expert} of {worst.tensor} in {worst.file} ({worst.worst_error:.4f})"
    out.print(
        escape(show(f"{report.kind}: {'ok' if report.ok else f'{len(report.problems)} problems'}: {checked}")),
        soft_wrap=True,
    )


@app.command()
def merge(
    base: Annotated[Path, typer.Argument(help="The base file of a pair.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    experts: Annotated[str, typer.Option(help="high, low, a type such as q4_0, or a file name of the pair.")] = "high",
    force: Force = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be written, write nothing.")] = False,
    threads: Workers = 0,
    quiet: Quiet = False,
) -> None:
    """Make an ordinary GGUF from a base and one of its expert files."""
    plan = plan_merge(base, output, experts, force=force)
    out = _out()
    try:
        if dry_run:
            out.print(escape(show(f"would write {show_path(output)}: {format_size(plan.final_size)}")), soft_wrap=True)
            differences, identical = plan.differences, False
        else:
            result = run_merge(plan, _progress(quiet), threads)
            out.print(escape(show(f"{show_path(output)}: {format_size(result.size)}")), soft_wrap=True)
            differences, identical = result.differences, result.identical
    finally:
        plan.close()
    for difference in differences:
        out.print(escape(show(f"differs from the source: {difference}")), soft_wrap=True)
    if identical:
        out.print("byte-identical to the source (header and every tensor's checksum match)")


@app.command()
def plan(
    model: Annotated[Path, typer.Argument(help="The base file of a pair, or a MoE GGUF.")],
    ram: Annotated[str, typer.Option(help="Memory of the machine, e.g. 64G.")],
    vram: Annotated[str, typer.Option(help="Memory of the GPU; 0: the CPU computes.")] = "0",
    link: Annotated[str, typer.Option(help="RAM to GPU.")] = "25GB/s",
    disk: Annotated[str | None, typer.Option(help="Random reads of an expert. Default: 3GB/s, or measured.")] = None,
    ram_rate: Annotated[str | None, typer.Option(help="Memory bandwidth. Default: 30GB/s, or measured.")] = None,
    vram_rate: Annotated[str, typer.Option(help="Bandwidth of the GPU's memory.")] = "500GB/s",
    reserve: Annotated[str, typer.Option(help="Kept free in each memory.")] = "512MiB",
    context: Annotated[int, typer.Option("--ctx", min=1, max=1 << 24, help="Tokens of KV cache.")] = 4096,
    mix: Annotated[str | None, typer.Option(help="Shares of high,low,skipped selections, e.g. 0.67,0.3,0.03.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Recorded selections, as JSON lines.")] = None,
    stats: Annotated[
        list[Path] | None, typer.Option(help="--hobbit-stats file of a run of this model; may be repeated.")
    ] = None,
    resident_speed: Annotated[
        float | None, typer.Option(min=1e-6, help="Tokens/s measured with everything in compute memory.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Measure disk and RAM bandwidth now.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Estimate expert places, bytes per token and tokens/s, and say whether a cache pays."""
    machine = Machine(
        vram=parse_size(vram, "--vram"),
        ram=parse_size(ram, "--ram"),
        link=parse_rate(link, "--link"),
        vram_rate=parse_rate(vram_rate, "--vram-rate"),
        reserve=parse_size(reserve, "--reserve"),
    )
    measured = []
    if measure and disk is None:
        file, piece = expert_piece(model)
        machine = replace(machine, disk=measure_disk(file, piece))
        measured.append("disk")
    if measure and ram_rate is None:
        machine = replace(machine, ram_rate=measure_ram(cpu_count()))
        measured.append("RAM")
    if disk is not None:
        machine = replace(machine, disk=parse_rate(disk, "--disk"))
        measured.append("disk")
    if ram_rate is not None:
        machine = replace(machine, ram_rate=parse_rate(ram_rate, "--ram-rate"))
    result = make_plan(
        model,
        replace(machine, measured=tuple(measured)),
        trace=trace,
        stats=stats or (),
        context=context,
        mix=parse_mix(mix) if mix is not None else None,
        resident_speed=resident_speed,
    )
    if as_json:
        _print_json(result.to_json())
    else:
        _show_plan(result)


def _show_plan(p: Plan) -> None:
    out = _out()
    table = Table(title="experts", title_justify="left")
    for column in ("in", "high", "low", "bytes"):
        table.add_column(column, justify="left" if column == "in" else "right")
    for tier in p.tiers:
        table.add_row(tier.name, str(tier.high), str(tier.low), format_size(tier.bytes))
    table.add_row("files", str(p.total_experts), str(p.total_experts) if len(p.expert_bytes) > 1 else "0", "")
    out.print(table)
    out.print(f"everything else: {format_size(p.base_bytes)}, KV cache {format_size(p.kv_bytes)}")
    out.print(
        f"per token: {format_size(p.bytes_compute)} read by computing, hit rate {100 * p.hit_rate:.1f} %, "
        f"{format_size(p.bytes_link)} over the link, {format_size(p.bytes_disk)} from disk",
        soft_wrap=True,
    )
    if p.tokens_per_s:
        out.print(f"with the cache: {p.tokens_per_s:.2f} to {p.tokens_per_s_overlapped:.2f} tokens/s")
    for name, speed in p.alternatives.items():
        out.print(f"without: {escape(name)}: {speed:.2f} tokens/s", soft_wrap=True)
    for line in p.assumptions:
        out.print(f"assumed: {escape(show(line))}", soft_wrap=True)
    out.print(escape(show(p.recommendation)), soft_wrap=True, style="bold")


@functools.lru_cache(maxsize=1)
def _command() -> Callable[..., Any]:
    return typer.main.get_command(app)


def run(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status; errors become one line on stderr."""

    def fail(message: str, code: int) -> int:
        _err.print(escape(show(f"gguf-tools: {message}")), soft_wrap=True)
        return code

    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        status = _command()(args=arguments or ["--help"], prog_name="gguf-tools", standalone_mode=False)
        return int(status) if isinstance(status, int) else ExitCode.OK
    except ToolError as error:
        return fail(str(error), error.code)
    except typer.Exit as exit_:
        return exit_.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return fail("interrupted; run the same command again to go on", ExitCode.INTERRUPTED)
    except BrokenPipeError:
        return ExitCode.IO
    except MemoryError:
        return fail("out of memory", ExitCode.IO)
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # an argument that the parser refuses
            return fail(error.format_message(), ExitCode.USAGE)
        if isinstance(error, OSError):
            return fail(f"{error.strerror or error}: {show_path(error.filename or '')}", ExitCode.IO)
        _err.print(escape(traceback.format_exc()))
        return fail("this is a bug; please report it with the lines above", ExitCode.INTERNAL)


def main() -> None:
    """Entry point of the console command."""
    sys.exit(run())


if __name__ == "__main__":
    main()
