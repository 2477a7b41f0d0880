"""Speed against cache size: the same prompt and generation with each size, and with stock `Llama` beside them.

One model is loaded and resized, so that only the size differs. Each size gets one run to fill the cache, then `repeat`
measured ones; the table shows medians and, in brackets, the slowest and fastest.
"""

from __future__ import annotations

import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hobbit_py.hobbit import Hobbit, Llama
from hobbit_py.live import MIB, format_bytes
from hobbit_py.stats import CacheStats, ratio


@dataclass(frozen=True)
class Result:
    """One row: a cache size and what it did. Rates in tokens per second, one entry per run."""

    cache: str  # as asked for; "stock" is Llama without the engine
    cache_bytes: int
    prompt: list[float]
    decode: list[float]
    hit_rate: float | None = None  # of the measured runs, as the rest
    read_bytes_per_token: float | None = None
    stall_share: float | None = None
    mix: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class Bench:
    model: str
    n_prompt: int
    n_gen: int
    repeat: int
    options: dict[str, Any] = field(default_factory=dict)
    machine: str = field(default_factory=lambda: f"{platform.machine()}, {os.cpu_count()} CPUs")
    results: list[Result] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"bench": 1, **asdict(self)}


def _run(model: Llama, n_prompt: int, n_gen: int, seed: int) -> tuple[float, float]:
    """Seconds for a prompt of random tokens, and for a generation after it."""
    random_tokens = random.Random(seed)
    model.reset()  # type: ignore[no-untyped-call]
    start = time.perf_counter()
    model.eval([random_tokens.randrange(model.n_vocab()) for _ in range(n_prompt)])
    middle = time.perf_counter()
    model.set_seed(seed)
    token = model.sample(temp=0.8)
    for _ in range(n_gen):
        model.eval([token])
        token = model.sample(temp=0.8)
    return middle - start, time.perf_counter() - middle


def _measure(model: Llama, bench: Bench, cache: str, cache_bytes: int, read: Callable[[], CacheStats] | None) -> Result:
    _run(model, bench.n_prompt, bench.n_gen, seed=0)
    before = read() if read else None
    seconds = [_run(model, bench.n_prompt, bench.n_gen, seed=1 + i) for i in range(bench.repeat)]
    row = Result(
        cache,
        cache_bytes,
        [bench.n_prompt / prompt for prompt, _ in seconds],
        [bench.n_gen / decode for _, decode in seconds],
    )
    if read is None or before is None:
        return row
    delta = read() - before
    tokens = delta.prompt_tokens + delta.decode_tokens
    return Result(
        row.cache,
        row.cache_bytes,
        row.prompt,
        row.decode,
        delta.total.hit_rate,
        ratio(delta.total.read_bytes, tokens),
        ratio(delta.total.stall_us, delta.prompt_us + delta.decode_us),
        delta.total.mix,
    )


def run_bench(bench: Bench, caches: Sequence[str], *, stock: bool, llama: dict[str, Any]) -> Iterator[Result]:
    """Yields a row per cache size as it is done, and adds it to `bench.results`.

    `bench.options` are engine options without `cache`; `llama` goes to `Llama` and `Hobbit` alike.
    """
    llama = {"n_ctx": bench.n_prompt + bench.n_gen + 1, "verbose": False, **llama}
    if stock:
        model = Llama(bench.model, **llama)
        row = _measure(model, bench, "stock", 0, None)
        model.close()
        bench.results.append(row)
        yield row
    with Hobbit(bench.model, cache=caches[0], **bench.options, **llama) as hobbit:
        for cache in caches:
            if cache != caches[0]:
                hobbit.resize(cache)
            row = _measure(hobbit, bench, cache, hobbit.placement.cache_bytes, hobbit.cache_stats)
            bench.results.append(row)
            yield row


def row_texts(row: Result, stock: Result | None) -> list[str]:
    """The cells of a table: cache, prompt, decode, against stock, hit rate, MiB per token, stall, precision mix."""

    def rate(values: list[float]) -> str:
        return f"{statistics.median(values):.1f} [{min(values):.1f}-{max(values):.1f}]"

    def percent(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.1f} %"

    against = f"{statistics.median(row.decode) / statistics.median(stock.decode):.2f}" if stock else ""
    return [
        row.cache if row.cache in ("stock", "") else f"{row.cache} ({format_bytes(row.cache_bytes)})",
        rate(row.prompt),
        rate(row.decode),
        against,
        percent(row.hit_rate),
        "" if row.read_bytes_per_token is None else f"{row.read_bytes_per_token / MIB:.2f}",
        percent(row.stall_share),
        "" if row.mix is None else "/".join(f"{100 * share:.0f}" for share in row.mix),
    ]


COLUMNS = ("cache", "prompt tok/s", "decode tok/s", "x stock", "hit rate", "MiB/token", "stalled", "high/low/skip %")
