"""Decode and prefill of a model that does not fit: stock mmap against the expert cache, under one memory cap.

    sudo .venv/bin/python bench/capped.py MODEL [--low FILE] [--cap-share 0.35] [--rounds 5] [--prompt-tokens 506]

Needs root and cgroup v1. Each measurement runs build/bin/llama-completion twice in a child cgroup that caps anonymous
memory and page cache at the given share of the model file: once for the prompt alone (the prefill column), once for
the prompt and the tokens; what the second read beyond the first is what decoding read. Before each the page cache is
dropped, and read_ahead_kb of the block device is what the side asks for. All sides take turns, round by round; ratios
are taken within a round against the better of the two stock sides (read_ahead_kb 128 and 8192). The columns:

    waits     share of decode time in which compute stood still for bytes
    idle      share of decode time in which nothing was being read
    Belady    bytes per token that a rule which knows the future would read: the run's own choices and budget,
              replayed, nothing read ahead
    / bound   time per token over max(compute, bytes / bandwidth): compute from the side that runs without a cap; the
              bandwidth is the higher of two, that of random direct reads measured in the same round, and that of the
              run itself while it was reading

The text of the exact side must be stock's, or the run ends.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cage import Cage, block_device, bytes_read, drop_caches, finish, read_ahead, spread
from rich.console import Console
from rich.table import Table

from gguf_tools.plan import expert_piece, measure_disk
from hobbit_py.replay import Replay

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "In the beginning God created the heaven and the earth. And the earth was without form, and void; "
TOKENS_OF_PROMPT = 23  # of tiny-moe's tokenizer, about


@dataclass
class Side:
    """One way to run the model, and what every round measured of it (tokens/s, bytes per token, shares)."""

    name: str
    options: list[str]
    read_ahead_kib: int = 128
    capped: bool = True
    reference: str = ""  # the uncapped side that tells what computing takes
    profile: Path | None = None  # of --hobbit-profile, which every run gets as it was
    decode: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    bytes_per_token: list[float] = field(default_factory=list)
    belady: list[float] = field(default_factory=list)
    hits: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    disk: list[float] = field(default_factory=list)  # bytes/s while reading
    bound: list[float] = field(default_factory=list)
    peak: list[float] = field(default_factory=list)
    text: str = ""


@dataclass
class Run:
    text: str
    prefill: float
    decode: float
    bytes: int
    peak: int
    stats: dict[str, Any]
    belady: int  # bytes


def run(side: Side, args: argparse.Namespace, tokens: int, memory: int | None, read_bps: int | None = None) -> Run:
    """One process; tokens/s from llama.cpp's own timings, bytes from the block device."""
    device = block_device(args.model)
    with tempfile.TemporaryDirectory() as scratch, read_ahead(device, side.read_ahead_kib):
        stats, trace = Path(scratch) / "stats.json", Path(scratch) / "trace"
        command = [args.bin / "llama-completion", "-m", args.model, "-no-cnv", "-p", args.prompt, "-n", tokens]
        command += ["--ignore-eos", "--temp", 0, "-t", args.threads, "-c", args.context, "-b", 512, "-ub", 512]
        command += ["-lv", 4, "--no-warmup", "--no-display-prompt", *side.options]
        if side.profile:
            command += ["--hobbit-profile", shutil.copy(side.profile, scratch)]
        if any(option.startswith("--hobbit") for option in side.options):
            command += ["--hobbit-stats", stats, "--hobbit-trace", trace]
        drop_caches()
        cage = Cage(memory if side.capped else None, read_bps, device)
        before = bytes_read(device)
        done = finish(command, cage)
        count = bytes_read(device) - before
        peak, kills = cage.close()
        prefill = re.search(r"prompt eval time =.*?([\d.]+) tokens per second", done.stderr)
        decode = re.search(r"  eval time =.*?([\d.]+|inf) tokens per second", done.stderr)
        if done.returncode != 0 or kills or not prefill or not decode:
            shown = " ".join(str(c) for c in command)
            raise SystemExit(f"{shown}\nended with {done.returncode}, {kills} kills:\n{done.stderr[-3000:]}")
        known = json.loads(stats.read_text()) if stats.exists() else {}
        return Run(done.stdout, float(prefill[1]), float(decode[1]), count, peak, known, belady_bytes(trace))


def belady_bytes(trace: Path) -> int:
    """What the recorded choices would read at the recorded cache size if each eviction knew the future."""
    if not trace.exists():
        return 0
    with Replay(trace) as replay:
        total = replay.run(policy="belady", prefetch=0, adaptive=False)["total"]
    return int(total["read_bytes_high"] + total["read_bytes_low"])


def measure(side: Side, args: argparse.Namespace, memory: int, read_bps: int | None = None) -> None:
    prompt = run(side, args, 1, memory, read_bps)
    whole = run(side, args, args.tokens, memory, read_bps)
    side.prefill.append(prompt.prefill)
    side.decode.append(whole.decode)
    # the first token comes with the prompt
    side.bytes_per_token.append(max(0, whole.bytes - prompt.bytes) / (args.tokens - 1))
    side.peak.append(max(prompt.peak, whole.peak))
    side.text = whole.text
    if whole.stats:
        total, first = whole.stats["total"], prompt.stats["total"]
        lookups = total["lookups"] - first["lookups"]
        side.belady.append((whole.belady - prompt.belady) / (args.tokens - 1))
        side.hits.append((total["hits"] - first["hits"]) / max(1, lookups))
        if "decode_stall_us" in whole.stats:
            side.waits.append(whole.stats["decode_stall_us"] / whole.stats["decode_us"])
        if "decode_disk_us" in whole.stats:
            side.idle.append(1 - whole.stats["decode_disk_us"] / whole.stats["decode_us"])
            seconds = whole.stats["decode_disk_us"] / 1e6
            side.disk.append(side.bytes_per_token[-1] * (args.tokens - 1) / seconds if seconds > 0 else 0.0)
    print(
        f"  {side.name:<26} {whole.decode:8.2f} tok/s  prefill {prompt.prefill:8.2f} tok/s  "
        f"{side.bytes_per_token[-1] / 2**20:8.1f} MiB/token  peak {side.peak[-1] / 2**20:7.0f} MiB",
        flush=True,
    )


def make_sides(args: argparse.Namespace) -> list[Side]:
    fork = ["--hobbit-cache", args.cache]
    enough = f"{3 * args.model.stat().st_size // 2**20 + 64}MiB"
    sides = [Side("stock, read-ahead 128", [], reference="stock, no cap")]
    if not args.no_8192:
        sides.append(Side("stock, read-ahead 8192", [], 8192, reference="stock, no cap"))
    sides.append(Side("exact", [*fork, "--hobbit-precision", "high"], reference="stock, no cap"))
    if args.low:
        low = ["--hobbit-low", str(args.low)]
        sides.append(Side("hobbit", [*fork, *low], reference="hobbit, no cap"))
        variants = {"0.6/0.9": "--hobbit-precision paper", "prefill highest": "--hobbit-prefill-precision highest"}
        for name, options in variants.items():
            sides.append(Side(f"hobbit, {name}", [*fork, *low, *options.split()], reference="hobbit, no cap"))
    for extra in args.side:
        name, _, options = extra.partition("=")
        sides.append(Side(name, options.split()))
    sides.append(Side("stock, no cap", [], capped=False))
    if args.low:
        sides.append(Side("hobbit, no cap", ["--hobbit-cache", enough, *low], capped=False))
    return sides


def make_parser(description: str | None, tokens: int, prompt_tokens: int) -> argparse.ArgumentParser:
    """The options that `run` and `measure` need; `prompt_of` gives the prompt."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--low", type=Path, help="low-precision file; adds the sides with two precisions")
    parser.add_argument("--cap-share", type=float, default=0.35)
    parser.add_argument("--cache", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=tokens)
    parser.add_argument("--prompt-tokens", type=int, default=prompt_tokens, help="about this many; one ubatch is 512")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bin", type=Path, default=ROOT / "build/bin")
    return parser


def prompt_of(args: argparse.Namespace) -> str:
    return PROMPT * max(1, round(args.prompt_tokens / TOKENS_OF_PROMPT))


def main() -> None:
    parser = make_parser(__doc__, tokens=64, prompt_tokens=506)
    parser.add_argument("--no-8192", action="store_true", help="leave out stock with read_ahead_kb 8192")
    parser.add_argument("--side", action="append", default=[], metavar="NAME=OPTIONS", help="one more side of the fork")
    args = parser.parse_args()
    args.prompt = prompt_of(args)

    size = args.model.stat().st_size
    cap = int(size * args.cap_share)
    sides = make_sides(args)
    by_name = {side.name: side for side in sides}
    stock = [side for side in sides if side.capped and not side.options]
    file, piece = expert_piece(args.model)
    disk: list[float] = []
    print(f"{args.model.name}: {size / 2**20:.0f} MiB, cap {cap / 2**20:.0f} MiB, {args.threads} threads")
    for _ in range(args.rounds):
        disk.append(measure_disk(file, piece))
        for side in sides:
            measure(side, args, cap)
        for side in sides:
            if side.reference:
                bandwidth = max(disk[-1], side.disk[-1]) if side.disk else disk[-1]
                bound = max(1 / by_name[side.reference].decode[-1], side.bytes_per_token[-1] / bandwidth)
                side.bound.append(1 / side.decode[-1] / bound)
    if by_name["exact"].text != by_name["stock, no cap"].text:
        raise SystemExit("the exact side's text is not stock's")

    def ratio(side: Side, what: str) -> str:
        best = [max(values) for values in zip(*(getattr(s, what) for s in stock), strict=True)]
        return spread([a / b for a, b in zip(getattr(side, what), best, strict=True)])

    def share(values: list[float]) -> str:
        return spread(values, 0.01, 0) if values else ""

    table = Table()
    for column in ("", "decode tok/s", "/ stock", "prefill tok/s", "/ stock", "MiB/token", "Belady", "hits %"):
        table.add_column(column)
    for column in ("waits %", "idle %", "GB/s", "/ bound", "peak MiB"):
        table.add_column(column)
    for side in sides:
        table.add_row(
            side.name,
            spread(side.decode),
            ratio(side, "decode"),
            spread(side.prefill, digits=0),
            ratio(side, "prefill"),
            spread(side.bytes_per_token, 2**20, 1),
            spread(side.belady, 2**20, 1) if side.belady else "",
            share(side.hits),
            share(side.waits),
            share(side.idle),
            spread(side.disk, 1e9) if side.disk else "",
            spread(side.bound) if side.bound else "",
            f"{max(side.peak) / 2**20:.0f}" if side.capped else "",
        )
    console = Console(width=220, highlight=False)
    console.print(table)
    console.print(f"disk {spread(disk, 1e9)} GB/s at reads of {piece >> 10} KiB; medians (min .. max) of {args.rounds}")
    console.print(f"{os.cpu_count()} CPUs ({platform.machine()}), Linux {os.uname().release}")
    console.print(f"repeat with: python {' '.join(sys.argv)}")


if __name__ == "__main__":
    main()
