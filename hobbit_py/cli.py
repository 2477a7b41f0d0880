"""The command `hobbit`: run, serve, bench, quality, calibrate, plan, stats, plot, top.

Each command turns its options into one call of the package or of a program beside the library. A failure is one line on
stderr and exit code 1 (2 for a usage error, 130 for an interrupt).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from gguf_tools.errors import ToolError
from hobbit_py import _lib
from hobbit_py import bench as bench_
from hobbit_py import calibrate as calibrate_
from hobbit_py import plot as plot_
from hobbit_py import top as top_
from hobbit_py.hobbit import Hobbit
from hobbit_py.live import StatusLine, format_bytes, summary_text
from hobbit_py.quality_cli import quality
from hobbit_py.stats import CacheStats

app = typer.Typer(
    name="hobbit",
    help="Mixture-of-experts models with an expert cache: run, serve, measure, watch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_err = Console(stderr=True, highlight=False)

Model = Annotated[Path, typer.Argument(help="GGUF file with the high-precision experts, any shard")]
Low = Annotated[Path | None, typer.Option(help="GGUF of the same model whose experts are the low-precision copies")]
Cache = Annotated[str, typer.Option(help="memory for experts: 512MiB, 4GiB, a number of MiB, or auto")]
Precision = Annotated[str | None, typer.Option(help="hobbit, paper, high (exact), low or article")]
T1 = Annotated[float | None, typer.Option(help="high precision up to this much gate weight ranked before")]
T2 = Annotated[float | None, typer.Option(help="low precision up to this much; beyond it an expert is skipped")]
Policy = Annotated[str | None, typer.Option(help="which expert leaves first: hobbit, lru, lfu")]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="the same tokens whatever the cache holds")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="any other engine option: io-threads=8")
]
Threads = Annotated[int | None, typer.Option("--threads", "-t", help="threads for computing")]


def _options(
    low: Path | None,
    precision: str | None,
    t1: float | str | None,
    t2: float | str | None,
    policy: str | None,
    deterministic: bool,
    more: list[str] | None,
) -> dict[str, Any]:
    """Engine options by keyword, those that were given."""
    given: dict[str, Any] = {"low": low, "precision": precision, "t1": t1, "t2": t2, "policy": policy}
    given["deterministic"] = deterministic or None
    for item in more or []:
        name, equals, value = item.partition("=")
        keyword = name.replace("-", "_")
        if not equals or keyword not in _lib.OPTIONS:
            raise typer.BadParameter(
                f"'{item}': NAME=VALUE with one of {', '.join(o.name for o in _lib.OPTIONS.values())}"
            )
        given[keyword] = value
    return {name: value for name, value in given.items() if value is not None}


@contextlib.contextmanager
def _loading(what: str) -> Iterator[Any]:
    """A progress callback that draws a bar on a terminal."""
    if not _err.is_terminal:
        yield None
        return
    with Progress(TextColumn(what), BarColumn(), console=_err, transient=True) as progress:
        task = progress.add_task(what, total=1.0)
        yield lambda share: progress.update(task, completed=share)


@app.command()
def run(
    model: Model,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="text to continue; without it: chat")] = None,
    n_predict: Annotated[int, typer.Option("--n-predict", "-n", min=1, help="tokens to generate, at most")] = 512,
    low: Low = None,
    cache: Cache = "auto",
    precision: Precision = None,
    t1: T1 = None,
    t2: T2 = None,
    policy: Policy = None,
    deterministic: Deterministic = False,
    more: Set = None,
    ctx_size: Annotated[int, typer.Option("--ctx-size", "-c", min=0, help="tokens of context, 0: the model's")] = 4096,
    threads: Threads = None,
    temp: Annotated[float, typer.Option(min=0.0, help="temperature, 0: greedy")] = 0.8,
    seed: Annotated[int | None, typer.Option(help="of the sampler")] = None,
    n_gpu_layers: Annotated[int, typer.Option("--n-gpu-layers", "-ngl", help="layers on a GPU, -1: all")] = 0,
    stats: Annotated[Path | None, typer.Option(help="write statistics and residency here, for `hobbit plot`")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="the library's own messages")] = False,
) -> None:
    """Continue a text, or chat. A line below shows tokens/s, hit rate and MB/s; a summary goes to stderr."""
    options = _options(low, precision, t1, t2, policy, deterministic, more)
    with _loading(f"loading {model.name}") as progress:
        if seed is not None:
            options["seed"] = seed
        loaded = Hobbit(
            model,
            cache=cache,
            progress=progress,
            n_ctx=ctx_size,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=n_gpu_layers,
            verbose=verbose,
            **options,
        )
    with loaded as llm:
        sampling: dict[str, Any] = {"max_tokens": n_predict, "temperature": temp, "stream": True}
        if prompt is not None:
            chunks: Any = llm.create_completion(prompt, **sampling)
            _stream(llm, (chunk["choices"][0]["text"] for chunk in chunks))
        else:
            _chat(llm, sampling)
        if stats is not None:
            llm.save_stats(stats)


def _stream(llm: Hobbit, pieces: Iterator[str]) -> str:
    """Prints pieces as they come; an interrupt ends the answer. Returns the text."""
    text = ""
    with llm.receipt() as receipt, StatusLine(llm.cache_stats, sys.stdout) as status:
        try:
            for piece in pieces:
                text += piece
                sys.stdout.write(piece)
                sys.stdout.flush()
                status.update()
        except KeyboardInterrupt:
            _err.print("[interrupted]", markup=False)
    sys.stdout.write("\n")
    sys.stdout.flush()
    _err.print(f"{summary_text(receipt.stats)}; {receipt}", style="dim", soft_wrap=True)
    return text


def _chat(llm: Hobbit, sampling: dict[str, Any]) -> None:
    messages: list[Any] = []
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        chunks: Any = llm.create_chat_completion(messages, **sampling)
        answer = _stream(llm, (chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks))
        messages.append({"role": "assistant", "content": answer})


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Model,
    low: Low = None,
    cache: Cache = "auto",
    precision: Precision = None,
    t1: T1 = None,
    t2: T2 = None,
    policy: Policy = None,
    deterministic: Deterministic = False,
    more: Set = None,
) -> None:
    """Start llama-server with an expert cache, a page at /hobbit and /metrics. Other options go to it: --port 8080"""
    arguments = [str(_lib.program("llama-server")), "--model", str(model), "--metrics"]
    options = {"cache": cache, **_options(low, precision, t1, t2, policy, deterministic, more)}
    _lib.config_new(options)  # refuses here, with one line, what the server would refuse after its banner
    for name, value in options.items():
        option = _lib.OPTIONS[name]
        if option.hint is not None:
            arguments += [option.flag, _lib.option_text(value)]
        elif _lib.option_text(value).lower() in ("on", "1", "true", "yes"):
            arguments.append(option.flag)
    sys.stdout.flush()
    os.execv(arguments[0], [*arguments, *context.args])


Values = Annotated[str | None, typer.Option(help="a value or several with commas, as of `hobbit run`")]


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(
    context: typer.Context,
    model: Model,
    cache: Annotated[str, typer.Option(help="cache sizes, with commas: 8MiB,16MiB,auto; off is stock")] = "auto",
    stock: Annotated[bool, typer.Option(help="measure without a cache too, first")] = True,
    low: Low = None,
    precision: Values = None,
    t1: Values = None,
    t2: Values = None,
    policy: Values = None,
    deterministic: Deterministic = False,
    more: Set = None,
    as_json: Annotated[Path | None, typer.Option("--json", help="write llama-bench's JSON, for `hobbit plot`")] = None,
) -> None:
    """Run llama-bench over cache sizes, with stock beside them. Other options go to it: -p 512 -n 128 -t 8 -r 5 -d 4096

    Each --option takes a list, and every combination is measured. With -o llama-bench prints in that format itself.
    """
    options = _options(low, precision, t1, t2, policy, deterministic, more)
    command = bench_.arguments(str(model), cache, options, context.args, stock=stock)
    if {"-o", "--output"} & set(context.args):
        sys.stdout.flush()
        os.execv(command[0], command)
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=140)
    rows: list[bench_.Row] = []
    with Live(console=console, auto_refresh=False) as live:
        for row in bench_.rows_of(command):
            rows.append(row)
            live.update(bench_.table(rows), refresh=True)
    if as_json is not None:
        as_json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


@app.command()
def calibrate(
    model: Model,
    text: Annotated[Path, typer.Option(help="text of the kind that the model will read")],
    profile: Annotated[Path, typer.Option("--out", "-o", help="profile to write, for --hobbit-profile")],
    low: Low = None,
    cache: Cache = "auto",
    sequences: Annotated[int, typer.Option(min=4, help="pieces of the text; half of them judge")] = 40,
    length: Annotated[int, typer.Option(min=8, help="tokens of each")] = 128,
    bandwidth: Annotated[float, typer.Option(min=1.0, help="of disk or link, MB/s, for the prefetch depth")] = 1000.0,
    perplexity_budget: Annotated[
        float | None,
        typer.Option(
            min=0.0, metavar="PERCENT", help="T1 and T2 by measured perplexity, up to this rise; not quantiles"
        ),
    ] = None,
    threads: Threads = None,
) -> None:
    """Choose thresholds, policy, split and prefetch depth for a model on a text; say what they gain."""
    result = calibrate_.calibrate(
        model,
        text,
        profile,
        low=low,
        cache=cache,
        sequences=sequences,
        length=length,
        bandwidth=bandwidth,
        perplexity_budget=perplexity_budget,
        threads=threads,
    )
    print("\n".join(result.lines))


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def plan(context: typer.Context) -> None:
    """Will a model run on a machine, and how fast? The command `gguf-tools plan`: MODEL --ram 64G --vram 24G"""
    from gguf_tools.cli import run as gguf_tools

    raise typer.Exit(gguf_tools(["plan", *context.args]))


@app.command()
def stats(
    file: Annotated[Path, typer.Argument(help="JSON of --hobbit-stats, `hobbit run --stats` or /hobbit/stats")],
) -> None:
    """Show a statistics file as tables."""
    s = CacheStats.load(file)
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=140)
    console.print(
        f"precision {s.precision}, policy {s.policy}, cache {format_bytes(s.cache_bytes)}, prefetch {s.prefetch}"
    )
    console.print(f"resident {s.resident_high} of {s.slots_high} high, {s.resident_low} of {s.slots_low} low")
    console.print(summary_text(s))
    t = s.total
    if t.predicted:
        console.print(f"{100 * t.predicted_right / t.predicted:.1f} % of {t.predicted} predicted experts were chosen")
    names = "block, lookups, hit rate, miss high, miss low, skips, evictions, streamed, ahead, used, read, stall ms"
    table = Table(*names.split(", "), box=None, pad_edge=False)
    for column in table.columns:
        column.justify = "right"
    for block, c in [*((str(layer.block), layer) for layer in s.layers), ("all", s.total)]:
        counts = (c.misses_high, c.misses_low, c.skips, c.evictions, c.streamed, c.prefetch_issued, c.prefetch_used)
        table.add_row(
            block,
            str(c.lookups),
            f"{100 * c.hit_rate:.1f} %",
            *map(str, counts),
            format_bytes(c.read_bytes),
            f"{c.stall_us / 1e3:.1f}",
        )
    console.print(table)


@app.command()
def plot(
    file: Annotated[Path, typer.Argument(help="statistics, a trace, or the JSON of llama-bench")],
    out: Annotated[Path, typer.Option("--out", "-o", help="picture to write: .png, .svg, .pdf")],
) -> None:
    """Draw statistics (by layer), a trace (by token) or a bench: experts, hit rate, precision mix, bytes, stalls."""
    plot_.plot_file(file, out)


@app.command()
def top(
    url: Annotated[str, typer.Argument(help="address of the server")] = "http://127.0.0.1:8080",
    api_key: Annotated[str | None, typer.Option(envvar="LLAMA_API_KEY", help="of the server, if it has one")] = None,
    interval: Annotated[float, typer.Option(min=0.05, help="seconds between two readings")] = 1.0,
    count: Annotated[int | None, typer.Option(min=1, help="stop after this many pictures")] = None,
) -> None:
    """Watch the expert cache of a running server: rates, layers, what stalls. Ctrl-C ends."""
    top_.watch(url, api_key=api_key, interval_s=interval, count=count, console=Console(highlight=False))


app.command()(quality)


def main() -> None:
    """Entry point: errors that a user can act on become one line."""
    try:
        app()
    except (ValueError, TypeError, OSError, RuntimeError, ImportError, ToolError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            text = f"{error.filename}: {error.strerror}"
        _err.print(f"hobbit: {text}", markup=False, soft_wrap=True)
        sys.exit(1)
