"""Sizes and rates as users write and read them."""

from __future__ import annotations

import re

from gguf_tools.errors import ExitCode, ToolError, show

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"^\s*(\d{1,15}(?:\.\d{1,15})?)\s*([kmgt]?i?)b?\s*$", re.IGNORECASE)


def parse_size(text: str, option: str = "size", binary: bool = True) -> int:
    """Bytes of '24G', '512MiB', '1.5 GB'. Without B (24G) a unit means 2^30, unless `binary` is False."""
    match = _SIZE.match(text)
    unit = match[2].lower() if match else ""
    if not match or unit not in _UNITS:
        raise ToolError(f"{option}: '{show(text, 80)}' is not a size such as 24G, 512MiB or 1.5GB", code=ExitCode.USAGE)
    factor = _UNITS[unit]
    if binary and unit in ("k", "m", "g", "t") and not text.strip().lower().endswith("b"):
        factor = _UNITS[unit + "i"]
    return int(float(match[1]) * factor)


def parse_rate(text: str, option: str = "rate") -> float:
    """Bytes per second of '25GB/s' or '800M'; units are decimal, as bandwidths are."""
    rate = parse_size(re.sub(r"/s\s*$", "", text.strip(), flags=re.IGNORECASE), option, binary=False)
    if rate <= 0:
        raise ToolError(f"{option}: '{show(text, 80)}' is not a rate such as 25GB/s", code=ExitCode.USAGE)
    return float(rate)


def format_size(n: float) -> str:
    """'1.50 GiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(n) < 1024 or unit == "TiB":
            return f"{n:.0f} B" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1024
    raise AssertionError


def format_rate(n: float) -> str:
    """'3.20 GB/s'."""
    for unit in ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"):
        if abs(n) < 1000 or unit == "TB/s":
            return f"{n:.2f} {unit}"
        n /= 1000
    raise AssertionError
