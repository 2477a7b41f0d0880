"""Does `--hobbit-prefetch auto` choose well? Decode speed with prefetch off, on (1, 2 layers) and auto, per bandwidth.

    sudo .venv/bin/python bench/prefetch.py MODEL [--low FILE] [--bandwidths 0,400,100] [--rounds 5]

Bandwidths in MB/s, set by the cgroup v1 blkio controller; 0 leaves the disk as it is. The cap on memory is a share of
the model, as in bench/capped.py. The sides take turns, round by round. `auto / best` compares with the setting that
has the highest median of all rounds: its median over rounds of auto's speed over that setting's in the same round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from cage import spread
from capped import PROMPT, ROOT, Side, measure
from rich.console import Console
from rich.table import Table

SETTINGS = ("off", "1", "2", "auto")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--low", type=Path)
    parser.add_argument("--cap-share", type=float, default=0.35)
    parser.add_argument("--cache", default="auto")
    parser.add_argument("--bandwidths", default="0,400,100", help="MB/s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bin", type=Path, default=ROOT / "build/bin")
    args = parser.parse_args()
    args.prompt = PROMPT

    cap = int(args.model.stat().st_size * args.cap_share)
    table = Table()
    for column in ("disk", *(f"prefetch {s}, tok/s" for s in SETTINGS), "auto / best", "MiB/token off", "auto"):
        table.add_column(column)
    for bandwidth in (int(b) for b in args.bandwidths.split(",")):
        print(f"{bandwidth} MB/s" if bandwidth else "as it is")
        sides = []
        for setting in SETTINGS:
            options = ["--hobbit-cache", args.cache, "--hobbit-prefetch", setting]
            options += ["--hobbit-low", str(args.low)] if args.low else ["--hobbit-precision", "high"]
            sides.append(Side(setting, options))
        for i in range(args.rounds):
            first = i % len(sides)  # what ran before matters to a throttled disk
            for side in sides[first:] + sides[:first]:
                measure(side, args, cap, bandwidth * 10**6 or None)
        best = max(sides[:-1], key=lambda side: statistics.median(side.decode))
        against = [auto / other for auto, other in zip(sides[-1].decode, best.decode, strict=True)]
        table.add_row(
            f"{bandwidth} MB/s" if bandwidth else "as it is",
            *(spread(side.decode) for side in sides),
            f"{spread(against)} of {best.name}",
            f"{statistics.median(sides[0].bytes_per_token) / 2**20:.1f}",
            f"{statistics.median(sides[-1].bytes_per_token) / 2**20:.1f}",
        )
    console = Console(width=200, highlight=False)
    console.print(table)
    console.print(f"medians (min .. max) of {args.rounds}; repeat with: python {' '.join(sys.argv)}")


if __name__ == "__main__":
    main()
