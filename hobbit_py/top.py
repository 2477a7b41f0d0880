"""`hobbit top`: a server's expert cache, live. Reads GET /hobbit/stats and draws what changed between two readings."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hobbit_py.live import bar, format_bytes
from hobbit_py.stats import CacheStats, LayerStats, ratio

_DIGITS = {"0": ("·", "dim"), "1": ("▪", "cyan"), "2": ("■", "bold blue")}


class ServerError(RuntimeError):
    """The server cannot be asked; the message says what to do."""


def fetch(url: str, api_key: str | None, timeout_s: float = 5.0) -> CacheStats:
    """The statistics of the server at `url`.

    Raises:
        ServerError: no connection, refused, or an answer that is none of ours.
    """
    address = url.rstrip("/") + "/hobbit/stats"
    try:
        request = urllib.request.Request(address)
        if api_key:
            request.add_header("Authorization", f"Bearer {api_key}")
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return CacheStats.from_json(response.read())
    except urllib.error.HTTPError as error:
        why = {
            401: "it wants an API key: --api-key, or LLAMA_API_KEY",
            404: "it has no such page, so it is no server of HOBBIT's",
            501: "it runs without expert caching: start it with a --hobbit option",
            503: "it is still loading the model",
        }.get(error.code, error.reason)
        raise ServerError(f"{address}: {error.code}: {why}") from None
    except (OSError, ValueError) as error:
        raise ServerError(f"{address}: {getattr(error, 'reason', error)}") from None


def frame(url: str, now: CacheStats, delta: CacheStats, seconds: float, rows: int) -> RenderableType:
    """One picture of at most `rows` rows."""
    t = delta.total
    tokens = delta.prompt_tokens + delta.decode_tokens
    high, low, skip = t.mix
    head = Text.assemble(
        ("hobbit ", "bold"),
        f"{url}   precision {now.precision}   policy {now.policy}   cache {format_bytes(now.cache_bytes)}",
        no_wrap=True,
        overflow="ellipsis",
    )
    lines: list[RenderableType] = [head]
    for name, used, slots in (("high", now.resident_high, now.slots_high), ("low", now.resident_low, now.slots_low)):
        if slots:
            lines.append(Text(f"{name:<5}[{bar(used / slots, 30)}] {used} of {slots} slots"))
    a = now.total
    rows_of_text = [  # the first and the last fit 80 columns
        [
            f"now {ratio(tokens, seconds):7.1f} tok/s",
            f"hit {100 * t.hit_rate:5.1f} %",
            f"read {ratio(t.read_bytes, seconds) / 1e6:7.1f} MB/s",
            f"stall {100 * ratio(t.stall_us / 1e6, seconds):3.0f} %",
            f"evict {ratio(t.evictions, seconds):.0f}/s",
        ],
        [
            f"    high/low/skip {100 * high:.0f}/{100 * low:.0f}/{100 * skip:.0f} %",
            f"read ahead {t.prefetch_issued}, used {t.prefetch_used}",
        ],
        [f"    prefetch {now.prefetch}"],
        [
            f"all {now.decode_tokens_per_second:7.1f} tok/s",
            f"hit {100 * a.hit_rate:5.1f} %",
            f"read {format_bytes(a.read_bytes):>12}",
            f"{now.prompt_tokens} + {now.decode_tokens} tokens",
            f"{now.failed_steps} failed",
        ],
    ]
    lines += [Text("  ".join(cells), no_wrap=True, overflow="ellipsis") for cells in rows_of_text]
    room = max(3, rows - len(lines) - 2)
    lines.append(_layers(now, delta, seconds, room))
    return Group(*lines)


def _layers(now: CacheStats, delta: CacheStats, seconds: float, room: int) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in ("block", "hit", "", "miss/s h+l", "MB/s", "stall ms/s"):
        table.add_column(name, justify="left" if name == "" else "right", no_wrap=True)
    if now.resident:
        table.add_column("■ high ▪ low", no_wrap=True, overflow="ellipsis")
    indices = list(range(len(delta.layers)))
    if len(indices) > room:  # those that stall most, in the order of the model
        indices = sorted(sorted(indices, key=lambda i: -delta.layers[i].stall_us)[: room - 1])
    worst = max((s.stall_us for s in delta.layers), default=0)
    for i in indices:
        s: LayerStats = delta.layers[i]
        cells: list[RenderableType] = [
            str(s.block),
            f"{100 * s.hit_rate:.0f} %" if s.lookups else "-",
            Text(bar(s.hit_rate, 12), style="green"),
            f"{ratio(s.misses_high, seconds):.0f}+{ratio(s.misses_low, seconds):.0f}",
            f"{ratio(s.read_bytes, seconds) / 1e6:.1f}",
            f"{ratio(s.stall_us / 1e3, seconds):.1f}",
        ]
        if now.resident:
            cells.append(Text.assemble(*(_DIGITS.get(digit, ("?", "red")) for digit in now.resident[i])))
        table.add_row(*cells, style="bold red" if s.stall_us and s.stall_us == worst else "")
    if len(indices) < len(delta.layers):
        table.add_row("...", f"{len(delta.layers) - len(indices)} more")
    return table


def watch(
    url: str,
    *,
    api_key: str | None,
    interval_s: float,
    count: int | None,
    console: Console,
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Draws until interrupted, or `count` times; a terminal gets a live picture, anything else text after text."""
    before, then = fetch(url, api_key), time.monotonic()

    def next_frame() -> RenderableType:
        nonlocal before, then
        wait(interval_s)
        now, clock = fetch(url, api_key), time.monotonic()
        # a server that was restarted counts from 0
        delta = now - before if now.steps >= before.steps and len(now.layers) == len(before.layers) else now
        picture = frame(url, now, delta, clock - then, console.height if console.is_terminal else 10_000)
        before, then = now, clock
        return picture

    if not console.is_terminal:
        for _ in range(count or 1):
            console.print(next_frame())
        return
    with suppress(KeyboardInterrupt), Live(console=console, screen=count is None, auto_refresh=False) as live:
        done = 0
        while count is None or done < count:
            live.update(next_frame(), refresh=True)
            done += 1
