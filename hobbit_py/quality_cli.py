"""The command `hobbit quality`: options, progress and tables around `hobbit_py.quality`."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from gguf_tools.errors import ToolError
from gguf_tools.units import parse_size
from hobbit_py import quality as q
from hobbit_py import quality_tasks as tasks_
from hobbit_py.live import format_bytes

_TEXT = Path(__file__).resolve().parent.parent / "models" / "tiny-moe" / "heldout.txt"  # in a clone


def quality(
    model: Annotated[Path, typer.Argument(help="GGUF file of a MoE model, its experts as precise as there are")],
    low: Annotated[Path | None, typer.Option(help="GGUF of the same model: the type `file` in settings")] = None,
    text: Annotated[Path | None, typer.Option(help="text to measure on (default: in a clone, tiny-moe's)")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--settings",
            metavar="SETTING...",
            help="with spaces between: exact, uniform:Q4_K, model+Q4_0@0.6/0.9, Q8_0+Q2_K@noskip (or @paper, "
            "@quantile, @T1/T2/renormalise), article:model+Q4_0, skip@0.6; files of a type are made from the model",
        ),
    ] = None,
    context: Annotated[int, typer.Option(min=16, help="tokens per window; the second half of each is scored")] = 256,
    chunks: Annotated[int, typer.Option(min=1, help="windows, at most")] = 32,
    cache: Annotated[
        str, typer.Option(help="caches to count misses with: 15% of the model's experts, or 512MiB; none: 0")
    ] = "15%,40%",
    traffic: Annotated[int, typer.Option(min=64, help="tokens decoded through each of them")] = 1024,
    prefill: Annotated[bool, typer.Option("--prefill", help="also measure whole windows as one batch")] = False,
    threads: Annotated[int, typer.Option("--threads", "-t", min=0, help="for computing; 0: all")] = 0,
    work: Annotated[Path | None, typer.Option(help="folder for files in between (default: MODEL.quality)")] = None,
    max_base: Annotated[str, typer.Option(help="bound on the file of exact log probabilities")] = "4GiB",
    fresh: Annotated[bool, typer.Option("--fresh", help="measure again what an earlier call measured")] = False,
    profile: Annotated[
        Path | None, typer.Option(help="also write what `model+file` settings cost here: for budgets and receipts")
    ] = None,
    tasks: Annotated[bool, typer.Option("--tasks", help="compare continuations of fixed texts instead")] = False,
    as_json: Annotated[Path | None, typer.Option("--json", help="write the numbers here")] = None,
    plot: Annotated[Path | None, typer.Option(help="picture of bytes per token against KL: .png, .svg, .pdf")] = None,
) -> None:
    """What a setting costs against exact mode: perplexity, KL divergence, flipped choices, for bytes per token."""
    try:
        chosen = [q.parse_setting(s) for given in settings or [] for s in given.split()]
        chosen = chosen or [q.parse_setting(s) for s in q.default_settings(low is not None, profile is not None)]
    except (ValueError, ToolError) as error:
        raise typer.BadParameter(str(error)) from None
    if profile is not None and low is None:
        raise typer.BadParameter("--profile: it is of a model and a low file; --low FILE is needed")
    text = text or (_TEXT if _TEXT.is_file() else None)
    if text is None:
        raise typer.BadParameter("--text FILE: a text to measure on is needed")
    run = q.Measurement(
        model,
        text,
        work or model.with_suffix(".quality"),
        low=low,
        context=context,
        chunks=chunks,
        caches=[c for c in cache.split(",") if c not in ("", "0", "none")],
        traffic_tokens=traffic,
        prefill=prefill,
        threads=threads,
        max_base_bytes=parse_size(max_base),
        fresh=fresh,
    )
    out, err = Console(highlight=False), Console(stderr=True, highlight=False)
    for c in run.caches:
        run.cache_bytes(c)  # refuses a wrong one now
    err.print(
        f"{run.shape.chunks} windows of {context} tokens, {run.scored} scored; exact log probabilities take "
        f"{format_bytes(run.base_bytes)} in {run.work}",
        soft_wrap=True,
    )
    if tasks:
        _tasks(run, chosen, out, err, as_json)
        return
    results = []
    total, start, done = run.cost(chosen), time.monotonic(), 0.0
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )
    with bar:
        task = bar.add_task("quality", total=max(total, 1.0))

        def watch(tokens: float, what: str) -> None:
            nonlocal done
            done += tokens
            bar.update(task, advance=tokens, description=what)

        for number, result in enumerate(run.results(chosen, watch), 1):
            results.append(result)
            if not err.is_terminal:
                left = (time.monotonic() - start) / done * (total - done) / 60 if done else 0.0
                line = f"{number}/{len(chosen)} {result.setting.name}: KL {result.decode.kl:.6f}"
                err.print(f"{line}; about {left:.1f} min left", soft_wrap=True)
            if as_json is not None:  # what is there so far survives an interrupt
                as_json.write_text(json.dumps(run.report(results).to_dict(), indent=1) + "\n", encoding="utf-8")
    report = run.report(results)
    show(report, out)
    if profile is not None and low is not None:
        out.print(f"{q.save_profile(report, low, profile)} measurements written to {profile}", soft_wrap=True)
    if plot is not None:
        q.save_plot(report, plot)


def _tasks(run: q.Measurement, chosen: list[q.Setting], out: Console, err: Console, as_json: Path | None) -> None:
    """Tables of log-likelihood comparisons, `exact` first, since the others are held against it."""
    exact = q.parse_setting("exact")
    chosen = [exact, *(run.fitted(s, lambda tokens, what: None) for s in chosen if s != exact)]
    results = []
    table = Table(*tasks_.COLUMNS, box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    )
    with bar:
        task = bar.add_task("tasks", total=len(chosen) * len(tasks_.items()))
        for result in tasks_.run(
            run.variants, chosen, run.threads, lambda n, what: bar.update(task, advance=n, description=what)
        ):
            results.append(result)
            table.add_row(*tasks_.row_texts(result))
    (out if out.is_terminal else Console(highlight=False, width=140)).print(table)
    if as_json is not None:
        as_json.write_text(json.dumps([asdict(r) for r in results], indent=1) + "\n", encoding="utf-8")


def show(report: q.Report, console: Console) -> None:
    """The table, and one sentence for each cache."""
    table = Table(*q.table_columns(report), box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    fronts = q.fronts(report)
    for result in report.results:
        table.add_row(*q.row_texts(report, result, fronts))
    wide = console if console.is_terminal else Console(highlight=False, width=220)
    wide.print(table)
    for cache in report.caches:
        wide.print(q.verdict(report, cache), soft_wrap=True)
