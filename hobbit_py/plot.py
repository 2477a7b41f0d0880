"""Pictures. Of statistics: where each expert is, what each layer hits, uses and reads. Of a trace: which experts were
chosen, and what happened token by token. Of a bench: speed against the cache's size.

Needs matplotlib, which is the extra `plot` of the package.
"""

from __future__ import annotations

import json
import os
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from hobbit_py.bench import is_stock, measurement, stock_of, varying
from hobbit_py.live import MIB
from hobbit_py.stats import CacheStats, ratio
from hobbit_py.trace import HIGH as GIVEN_HIGH
from hobbit_py.trace import LOW as GIVEN_LOW
from hobbit_py.trace import SKIP as GIVEN_SKIP
from hobbit_py.trace import Trace

HIGH, LOW, NONE = "#1f4e8c", "#8fbbe8", "#ececec"
MISS = "#c2542d"
AHEAD = "#e0a93b"
PROMPT = "#f6f0e2"


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ImportError("plots need matplotlib: pip install 'matplotlib>=3.8'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def plot_file(source: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Draws statistics, a trace or a bench's JSON into a picture; the suffix of `out` decides its format.

    Raises:
        ValueError: the file is none of them, or holds nothing to draw.
        OSError: it cannot be read, or `out` not be written.
        ImportError: there is no matplotlib.
    """
    content = Path(source).read_bytes()
    if content.startswith(b"hobbit-trace "):
        figure = draw_trace(Trace(content, os.fspath(source)))
    else:
        figure = _draw_json(content, os.fspath(source))
    figure.savefig(out, dpi=120)
    _pyplot().close(figure)


def _draw_json(content: bytes, name: str) -> Any:
    try:
        data = json.loads(content)
    except ValueError as error:
        raise ValueError(f"{name}: neither a trace nor JSON: {error}") from None
    if isinstance(data, list):
        return draw_bench(data, name)
    try:
        stats = CacheStats.from_dict(data)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{name}: {error}") from None
    if not stats.layers:
        raise ValueError(f"{name}: statistics without layers")
    return draw_stats(stats)


def draw_stats(stats: CacheStats) -> Any:
    """A matplotlib figure: residency if it is in the file, then hit rate, precision mix, bytes and stall by layer."""
    plt = _pyplot()
    layers = stats.layers
    x = list(range(len(layers)))
    panels = 5 if stats.resident else 4
    heights = ([max(1.2, min(4.0, 0.05 * len(stats.resident[0])))] if stats.resident else []) + [1.0] * 4
    figure, axes = plt.subplots(
        panels,
        1,
        figsize=(max(7.0, min(16.0, 0.22 * len(layers) + 3)), 1.9 * sum(heights)),
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
    )
    rest = list(axes)
    if stats.resident:
        _draw_residency(plt, figure, rest.pop(0), stats.resident)
    hit, mix, read, stall = rest

    hit.bar(x, [100 * s.hit_rate for s in layers], color=HIGH, width=0.8)
    hit.axhline(
        100 * stats.total.hit_rate, color=MISS, linewidth=1, label=f"all layers {100 * stats.total.hit_rate:.1f} %"
    )
    hit.set(ylabel="hit rate, %", ylim=(0, 105))
    _legend(hit)

    shares = [[100 * share for share in s.mix] for s in layers]
    bottom = [0.0] * len(layers)
    for name, color, i in (("high", HIGH, 0), ("low", LOW, 1), ("skipped", NONE, 2)):
        values = [share[i] for share in shares]
        mix.bar(x, values, bottom=bottom, color=color, width=0.8, label=name)
        bottom = [b + v for b, v in zip(bottom, values, strict=True)]
    mix.set(ylabel="selected, %", ylim=(0, 105))
    _legend(mix)

    high = [s.read_bytes_high / MIB for s in layers]
    read.bar(x, high, color=HIGH, width=0.8, label="high")
    low = [s.read_bytes_low / MIB for s in layers]
    read.bar(x, low, bottom=high, color=LOW, width=0.8, label="low")
    on_demand = [a + b for a, b in zip(high, low, strict=True)]
    read.bar(x, [s.prefetch_bytes / MIB for s in layers], bottom=on_demand, color=AHEAD, width=0.8, label="ahead")
    read.set(ylabel="read, MiB")
    _legend(read)

    stall.bar(x, [s.stall_us / 1e3 for s in layers], color=MISS, width=0.8)
    stall.set(ylabel="stalled, ms", xlabel="layer with experts (number of its block)")

    step = max(1, len(layers) // 24)
    for axis in axes:
        axis.set_xlim(-0.6, len(layers) - 0.4)
        axis.set_xticks(x[::step], [str(s.block) for s in layers[::step]])
    _finish(axes)
    tokens = stats.prompt_tokens + stats.decode_tokens
    figure.suptitle(
        f"precision {stats.precision}, policy {stats.policy}, cache {stats.cache_bytes / MIB:.1f} MiB, {tokens} tokens",
        fontsize=10,
    )
    return figure


def _legend(axis: Any, handles: list[Any] | None = None) -> None:
    """To the right of the panel, where it hides nothing."""
    axis.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)


def _draw_residency(plt: Any, figure: Any, axis: Any, resident: tuple[str, ...]) -> None:
    """Experts by layer, coloured by the precision that is in memory."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    grid = [[int(row[expert]) for row in resident] for expert in range(len(resident[0]))]
    axis.imshow(
        grid,
        aspect="auto",
        interpolation="nearest",
        cmap=ListedColormap([NONE, LOW, HIGH]),
        vmin=-0.5,
        vmax=2.5,
        origin="lower",
    )
    axis.set(ylabel="expert")
    present = sum(row.count("1") + row.count("2") for row in resident)
    total = sum(map(len, resident))
    axis.set_title(f"in memory: {present} of {total} experts ({100 * present / total:.0f} %)", fontsize=9)
    _legend(axis, [Patch(color=HIGH, label="high"), Patch(color=LOW, label="low"), Patch(color=NONE, label="absent")])


_BINS = 160  # of tokens, at most


def draw_trace(trace: Trace) -> Any:
    """Which experts the router chose, by layer; then hit rate, precision mix and bytes, token by token.

    Raises:
        ValueError: a trace without a step.
    """
    plt = _pyplot()
    steps = trace.steps()
    n_tokens = int(steps.tokens.sum())
    if n_tokens == 0:
        raise ValueError(f"{trace.name}: a trace without a step")
    n_layer, n_expert = steps.chosen.shape
    heights = [max(1.2, min(4.0, 0.05 * n_expert)), 1.0, 1.0, 1.0]
    figure, axes = plt.subplots(
        4,
        1,
        figsize=(max(9.0, min(16.0, 0.22 * n_layer + 3)), 2.2 * sum(heights)),
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
    )
    heat, hit, mix, read = axes
    tokens_of_layer = steps.chosen.sum(axis=1, keepdims=True) / trace.settings["n_expert_used"]
    share = 100 * steps.chosen / np.maximum(1, tokens_of_layer)
    image = heat.imshow(share.T, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0, origin="lower")
    figure.colorbar(image, cax=heat.inset_axes((1.015, 0.0, 0.02, 1.0)), label="of the tokens, %")
    heat.set(ylabel="expert", xlabel="layer with experts (number of its block)")
    every = max(1, n_layer // 24)
    heat.set_xticks(range(0, n_layer, every), [str(layer.block) for layer in trace.layers[::every]])
    heat.set_title("chosen by the router", fontsize=9)

    # steps to bins of about as many tokens each; a prompt's ubatch is one step and cannot be taken apart
    ends = np.cumsum(steps.tokens)
    starts = np.flatnonzero(np.diff((ends - 1) * _BINS // max(n_tokens, _BINS), prepend=-1))
    edges = np.append(np.where(starts > 0, ends[starts - 1], 0), n_tokens)

    def binned(values: Any) -> Any:
        return np.add.reduceat(values, starts, axis=0).astype(float)

    def over(part: Any, whole: Any) -> Any:
        return np.divide(part, whole, out=np.full(len(starts), np.nan), where=whole > 0)

    total = 100 * ratio(float(steps.hits.sum()), float(steps.lookups.sum()))
    hit.stairs(100 * over(binned(steps.hits), binned(steps.lookups)), edges, color=HIGH, baseline=None)
    hit.axhline(total, color=MISS, linewidth=1, label=f"all tokens {total:.1f} %")
    hit.set(ylabel="hit rate, %", ylim=(0, 105))
    selected = binned(steps.selected)
    _stack(mix, edges, [
        ("high", HIGH, 100 * over(selected[:, GIVEN_HIGH], selected.sum(axis=1))),
        ("low", LOW, 100 * over(selected[:, GIVEN_LOW], selected.sum(axis=1))),
        ("skipped", NONE, 100 * over(selected[:, GIVEN_SKIP], selected.sum(axis=1))),
    ])  # fmt: skip
    mix.set(ylabel="selected, %", ylim=(0, 105))
    low, high, ahead = (binned(steps.read_bytes) / MIB / binned(steps.tokens)[:, None]).T
    _stack(read, edges, [("high", HIGH, high), ("low", LOW, low), ("ahead", AHEAD, ahead)])
    read.set(ylabel="read, MiB per token", xlabel="token")
    for axis in (hit, mix, read):
        for i in np.flatnonzero(steps.prompt):
            label = "prompt" if axis is hit and i == np.flatnonzero(steps.prompt)[0] else None
            axis.axvspan(ends[i] - steps.tokens[i], ends[i], color=PROMPT, zorder=0, label=label)
        axis.set_xlim(0, n_tokens)
        _legend(axis)
    _finish(axes)
    settings = trace.settings
    figure.suptitle(
        f"{settings['arch']}, rule {settings['rule']}, policy {settings['policy']}, "
        f"{settings['slots_high'][0]} high and {settings['slots_low'][0]} low slots, {n_tokens} tokens",
        fontsize=10,
    )
    return figure


def _stack(axis: Any, edges: Any, parts: list[tuple[str, str, Any]]) -> None:
    """Areas on top of each other, with steps at the edges; nothing where a part is not a number."""
    below = np.zeros(len(edges) - 1)
    for name, color, values in parts:
        axis.stairs(below + values, edges, baseline=below, fill=True, color=color, label=name)
        below = below + values


def _finish(axes: Any) -> None:
    for axis in axes:
        axis.tick_params(labelsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)


def draw_bench(rows: list[dict[str, Any]], name: str) -> Any:
    """Speed and hit rate against the size of the cache, a curve for each measurement; stock as a line.

    Raises:
        ValueError: `rows` are not llama-bench's, or none has a cache.
    """
    if not all(isinstance(row, dict) and "avg_ts" in row for row in rows):
        raise ValueError(f"{name}: neither a trace, statistics, nor the JSON of llama-bench")
    cached = [row for row in rows if not is_stock(row) and row["hobbit_cache_bytes"]]
    if not cached:
        raise ValueError(f"{name}: a bench without a cache: nothing to draw")
    varied = varying(rows)
    tests: dict[str, dict[str, list[dict[str, Any]]]] = {}  # measurement, what varies, by size
    for row in sorted(cached, key=lambda r: float(r["hobbit_cache_bytes"])):
        label = ", ".join(f"{name.removeprefix('hobbit_')} {row[name]}" for name in varied)
        tests.setdefault(measurement(row), {}).setdefault(label, []).append(row)
    plt = _pyplot()
    figure, axes = plt.subplots(
        2, len(tests), figsize=(3 + 5 * len(tests), 6), sharex=True, squeeze=False, layout="constrained"
    )
    colors = [HIGH, AHEAD, MISS, LOW, *plt.rcParams["axes.prop_cycle"].by_key()["color"]]
    for (speed, hit), (test, curves) in zip(axes.T, tests.items(), strict=True):
        stocks = set()
        for color, (label, points) in zip(cycle(colors), curves.items(), strict=False):
            size = [row["hobbit_cache_bytes"] / MIB for row in points]
            rate, error = [row["avg_ts"] for row in points], [row["stddev_ts"] for row in points]
            speed.errorbar(size, rate, yerr=error, marker="o", capsize=3, color=color, label=label or "with the cache")
            hit.plot(size, [100 * row["hobbit_hit_rate"] for row in points], marker="o", color=color)
            stock = stock_of(points[0], rows)
            if stock:
                stocks.add(stock["avg_ts"])
        for rate_of_stock in stocks:
            speed.axhline(rate_of_stock, color="gray", linestyle="--", linewidth=1, label="stock")
        speed.set(ylabel="tokens/s", ylim=(0, None), title=test)
        speed.legend(fontsize=8)
        hit.set(ylabel="hit rate, %", xlabel="cache, MiB", ylim=(0, 105))
    _finish(axes.ravel())
    figure.suptitle(f"{Path(cached[0]['model_filename']).name}, {cached[0]['cpu_info']}", fontsize=10)
    return figure
