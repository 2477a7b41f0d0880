r"""Perplexity and bytes of large batches by --hobbit-prefill-precision.

    .venv/bin/python bench/prefill_precision.py models/tiny-moe/tiny-moe-F16.gguf \
        --low build/models/tiny-moe-Q4_0.gguf --text models/tiny-moe/heldout.txt

Runs build/bin/llama-perplexity with one ubatch per chunk, so that every token is computed in a large batch, through a
cache that holds next to nothing, and prints a Markdown table: perplexity, its difference from exact mode, the share of
selections in high precision, and expert bytes read per ubatch, relative to exact mode.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def measure(args: argparse.Namespace, options: list[str]) -> tuple[float, float, dict[str, Any]]:
    """Perplexity, its standard error, and the totals of the cache's statistics."""
    with tempfile.TemporaryDirectory() as folder:
        stats = Path(folder) / "stats.json"
        command = [args.bin / "llama-perplexity", "-m", args.model, "-f", args.text, "-t", args.threads, "--no-repack"]
        command += ["-c", args.context, "-b", args.context, "-ub", args.context, "--chunks", args.chunks]
        command += ["--hobbit-cache", args.cache, "--hobbit-deterministic", "--hobbit-stats", stats, *options]
        done = subprocess.run(
            [str(c) for c in command],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            env=os.environ | {"OMP_WAIT_POLICY": "passive"},
            check=False,
        )
        found = re.search(r"Final estimate: PPL = ([\d.]+) \+/- ([\d.]+)", done.stdout + done.stderr)
        if done.returncode != 0 or not found:
            raise SystemExit(f"{' '.join(str(c) for c in command)}\nfailed ({done.returncode}):\n{done.stderr[-2000:]}")
        return float(found[1]), float(found[2]), json.loads(stats.read_text())["total"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--low", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache", default="4MiB")
    parser.add_argument("--bin", type=Path, default=ROOT / "build/bin")
    args = parser.parse_args()

    print(f"| {args.low.name}, {args.context} tokens per ubatch | perplexity | difference | high | bytes read |")
    print("|---|---|---|---|---|")
    exact, exact_bytes = 0.0, 0.0
    for rule in ("exact", "highest", "mass", "low"):
        options = ["--hobbit-low", str(args.low), "--hobbit-prefill-precision", rule]
        ppl, error, total = measure(args, ["--hobbit-precision", "high"] if rule == "exact" else options)
        read = total["read_bytes_high"] + total["read_bytes_low"]
        if rule == "exact":
            exact, exact_bytes = ppl, read
        high = 100 * total["selected_high"] / sum(total[f"selected_{x}"] for x in ("high", "low", "skip"))
        numbers = f"{ppl:.4f} ± {error:.3f} | {100 * (ppl / exact - 1):+.3f} % | {high:.0f} %"
        print(f"| `{rule}` | {numbers} | {100 * read / exact_bytes:.0f} % |", flush=True)


if __name__ == "__main__":
    main()
