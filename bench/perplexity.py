"""Perplexity of a model by precision rule, one token per ubatch: every token gets what its own gate weights ask for.

    bench/perplexity.py models/tiny-moe/tiny-moe-F16.gguf --low build/models/tiny-moe-Q4_0.gguf \\
        --text models/tiny-moe/heldout.txt [--chunks 64]

Runs build/bin/llama-perplexity with -c 256 -b 256 -ub 1 and --hobbit-deterministic; prints a Markdown table:
perplexity with its standard error, the share of selections in high and low precision and skipped, and expert bytes per
token if every selection missed, relative to high.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from pathlib import Path

from cage import finish

ROOT = Path(__file__).resolve().parent.parent


def perplexity(args: argparse.Namespace, options: list[str], ubatch: int = 1) -> tuple[float, float, dict[str, int]]:
    """The final estimate, its standard error, and the totals of the cache's statistics ({} without options)."""
    with tempfile.TemporaryDirectory() as folder:
        stats = Path(folder) / "stats.json"
        command = [args.bin / "llama-perplexity", "-m", args.model, "-f", args.text, "-t", args.threads, "--no-repack"]
        command += ["-c", args.context, "-b", args.context, "-ub", ubatch, "--chunks", args.chunks, *options]
        if options:
            command += ["--hobbit-stats", stats]
        done = finish(command, env=os.environ | {"OMP_WAIT_POLICY": "passive"})
        found = re.search(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)", done.stdout + done.stderr)
        if done.returncode != 0 or not found:
            raise SystemExit(f"{' '.join(str(c) for c in command)}\nfailed ({done.returncode}):\n{done.stderr[-2000:]}")
        return float(found[1]), float(found[2]), json.loads(stats.read_text())["total"] if options else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--low", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", default="64MiB")
    parser.add_argument("--bin", type=Path, default=ROOT / "build/bin")
    args = parser.parse_args()

    base = ["--hobbit-cache", args.cache, "--hobbit-deterministic"]
    low = ["--hobbit-low", str(args.low)]
    settings = {
        "stock": [],
        "`high`": [*base, "--hobbit-precision", "high"],
        "`paper`: `hobbit` at T1 0.6, T2 0.9": [*base, *low, "--hobbit-precision", "paper"],
        "`hobbit`, the default: T1 0.6, T2 1": [*base, *low],
        "`low`": [*base, *low, "--hobbit-precision", "low"],
        "`article`, 0.6, 0.9": [*base, *low, "--hobbit-precision", "article"],
    }
    ratio = 18 / 64  # bytes of a Q4_0 block of 32 weights over F16
    print("| experts | perplexity | high | low | skipped | bytes if all missed |")
    print("|---|---|---|---|---|---|")
    for name, options in settings.items():
        ppl, error, total = perplexity(args, options)
        estimate = f"{ppl:.4f} ± {error:.5f}"
        if not total:
            print(f"| {name} | {estimate} | | | | |", flush=True)
            continue
        n = total["selected_high"] + total["selected_low"] + total["selected_skip"]
        high, low_share, skip = (100 * total[f"selected_{x}"] / n for x in ("high", "low", "skip"))
        shares = f"{high:.1f} % | {low_share:.1f} % | {skip:.1f} % | {high + ratio * low_share:.0f} %"
        print(f"| {name} | {estimate} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
