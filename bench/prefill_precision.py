r"""Perplexity and bytes of large batches by --hobbit-prefill-precision.

    .venv/bin/python bench/prefill_precision.py models/tiny-moe/tiny-moe-F16.gguf \
        --low build/models/tiny-moe-Q4_0.gguf --text models/tiny-moe/heldout.txt

Runs build/bin/llama-perplexity with one ubatch per chunk, so that every token is computed in a large batch, through a
cache that holds next to nothing, and prints a Markdown table: perplexity, its difference from exact mode, the share of
selections in high precision, and expert bytes read per ubatch, relative to exact mode.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from perplexity import ROOT, perplexity


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
    cache = ["--hobbit-cache", args.cache, "--hobbit-deterministic"]
    for rule in ("exact", "highest", "mass", "low"):
        options = ["--hobbit-low", str(args.low), "--hobbit-prefill-precision", rule]
        options = ["--hobbit-precision", "high"] if rule == "exact" else options
        ppl, error, total = perplexity(args, [*cache, *options], args.context)
        read = total["read_bytes_high"] + total["read_bytes_low"]
        if rule == "exact":
            exact, exact_bytes = ppl, read
        high = 100 * total["selected_high"] / sum(total[f"selected_{x}"] for x in ("high", "low", "skip"))
        numbers = f"{ppl:.4f} ± {error:.3f} | {100 * (ppl / exact - 1):+.3f} % | {high:.0f} %"
        print(f"| `{rule}` | {numbers} | {100 * read / exact_bytes:.0f} % |", flush=True)


if __name__ == "__main__":
    main()
