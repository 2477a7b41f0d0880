"""Pictures of statistics: where each expert is, what each layer hits, uses and reads; or a bench's speed against size.

Needs matplotlib, which is the extra `plot` of the package.
"""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import Any

from hobbit_py.live import MIB
from hobbit_py.stats import CacheStats

HIGH, LOW, NONE = "#1f4e8c", "#8fbbe8", "#ececec"
MISS = "#c2542d"


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ImportError("plots need matplotlib: pip install 'matplotlib>=3.8'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def plot_file(source: str | os.PathLike[str], out: str | os.PathLike[str]) -> None:
    """Draws a statistics file or a `hobbit bench --json` file into a picture; the suffix of `out` decides its format.

    Raises:
        ValueError: the file is neither, or holds nothing to draw.
        OSError: it cannot be read, or `out` not be written.
        ImportError: there is no matplotlib.
    """
    try:
        data = json.loads(Path(source).read_bytes())
    except ValueError as error:
        raise ValueError(f"{os.fspath(source)}: not JSON: {error}") from None
    if isinstance(data, dict) and "bench" in data:
        figure = draw_bench(data)
    else:
        stats = CacheStats.load(source)
        if not stats.layers:
            raise ValueError(f"{os.fspath(source)}: statistics without layers")
        figure = draw_stats(stats)
    figure.savefig(out, dpi=120)
    _pyplot().close(figure)


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
    read.bar(x, [s.read_bytes_low / MIB for s in layers], bottom=high, color=LOW, width=0.8, label="low")
    read.set(ylabel="read, MiB")
    _legend(read)

    stall.bar(x, [s.stall_us / 1e3 for s in layers], color=MISS, width=0.8)
    stall.set(ylabel="stalled, ms", xlabel="layer with experts (number of its block)")

    step = max(1, len(layers) // 24)
    for axis in axes:
        axis.set_xlim(-0.6, len(layers) - 0.4)
        axis.set_xticks(x[::step], [str(s.block) for s in layers[::step]])
        axis.tick_params(labelsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
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


def draw_bench(data: dict[str, Any]) -> Any:
    """Speed and hit rate against the size of the cache, stock as a line."""
    plt = _pyplot()
    rows = sorted((r for r in data["results"] if r["cache"] != "stock"), key=lambda r: r["cache_bytes"])
    stock = next((r for r in data["results"] if r["cache"] == "stock"), None)
    if not rows:
        raise ValueError("a bench without results")
    size = [r["cache_bytes"] / MIB for r in rows]
    figure, (speed, hit) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, layout="constrained")
    middle = [statistics.median(r["decode"]) for r in rows]
    spread = [
        [m - min(r["decode"]) for m, r in zip(middle, rows, strict=True)],
        [max(r["decode"]) - m for m, r in zip(middle, rows, strict=True)],
    ]
    speed.errorbar(size, middle, yerr=spread, marker="o", color=HIGH, capsize=3, label="with the cache")
    if stock:
        speed.axhline(
            statistics.median(stock["decode"]), color=MISS, linestyle="--", label="stock, all in memory or mapped"
        )
    speed.set(ylabel="decode, tokens/s", ylim=(0, None))
    speed.legend(fontsize=8)
    hit.plot(size, [100 * r["hit_rate"] for r in rows], marker="o", color=HIGH)
    hit.set(ylabel="hit rate, %", xlabel="cache, MiB", ylim=(0, 105))
    figure.suptitle(f"{Path(data['model']).name}, {data['machine']}", fontsize=10)
    return figure
