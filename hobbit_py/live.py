"""Text for people who watch: a status line below streaming text, rates between two readings, sizes and bars."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import TextIO

from hobbit_py.stats import CacheStats, ratio

MIB = 1024 * 1024
_BLOCKS = " ▏▎▍▌▋▊▉█"


def format_bytes(n: float) -> str:
    for unit, size in (("GiB", 1024 * MIB), ("MiB", MIB), ("KiB", 1024)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n:.0f} B"


def bar(share: float, width: int) -> str:
    """A bar of `width` characters, filled to an eighth of a character."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_BLOCKS[rest] if rest else "")).ljust(width)


def status_text(delta: CacheStats, seconds: float) -> str:
    """Rates of what happened within `seconds`."""
    tokens = delta.prompt_tokens + delta.decode_tokens
    t = delta.total
    return (
        f"{ratio(tokens, seconds):.1f} tok/s   hit rate {100 * t.hit_rate:.1f} %   "
        f"read {ratio(t.read_bytes, seconds) / 1e6:.1f} MB/s   "
        f"stalled {100 * ratio(t.stall_us / 1e6, seconds):.0f} %"
    )


def summary_text(delta: CacheStats) -> str:
    """One line about a finished generation."""
    t = delta.total
    high, low, skip = t.mix
    text = f"{delta.decode_tokens} tokens, {delta.decode_tokens_per_second:.1f} tok/s"
    if delta.prompt_tokens:
        text = f"prompt {delta.prompt_tokens} tokens, {delta.prompt_tokens_per_second:.1f} tok/s; " + text
    return (
        f"{text}; hit rate {100 * t.hit_rate:.1f} %; {format_bytes(t.read_bytes)} read; "
        f"{100 * high:.0f}/{100 * low:.0f}/{100 * skip:.0f} % high/low/skipped"
    )


class StatusLine:
    """The last row of a terminal shows rates while other text scrolls above it. On anything else: nothing."""

    def __init__(self, read: Callable[[], CacheStats], stream: TextIO, every_s: float = 0.25) -> None:
        self._read = read
        self._stream = stream
        self._every_s = every_s
        self._on = stream.isatty()
        self._rows = 0

    def __enter__(self) -> StatusLine:
        if self._on:
            self._columns, self._rows = shutil.get_terminal_size()
            self._stats, self._time = self._read(), time.monotonic()
            # a free last row, then a scroll region without it; the cursor stays where it was
            self._write(f"\n\x1b[1A\x1b7\x1b[1;{self._rows - 1}r\x1b8")
        return self

    def update(self) -> None:
        """Draws rates since the last drawing, at most every `every_s` seconds."""
        if not self._on or time.monotonic() - self._time < self._every_s:
            return
        stats, now = self._read(), time.monotonic()
        text = status_text(stats - self._stats, now - self._time)[: self._columns - 1]
        self._stats, self._time = stats, now
        self._write(f"\x1b7\x1b[{self._rows};1H\x1b[2K\x1b[7m{text.ljust(self._columns - 1)}\x1b[0m\x1b8")

    def __exit__(self, *exc: object) -> None:
        if self._on:
            self._write(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[2K\x1b8")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
