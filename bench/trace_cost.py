"""What a trace costs: decode speed with --hobbit-trace being written, and without.

    bench/trace_cost.py MODEL [--low FILE] [--cache 16MiB] [--rounds 40] [--tokens 64] [--threads 2]

One model; the two sides take turns over the same tokens, the order changes every round, and the ratio is taken round by
round. Prints medians with minimum and maximum, the ratio's 95 % interval from resampling rounds, and bytes per token.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import numpy as np  # noqa: E402
from stats_cost import decode, spread  # noqa: E402

from hobbit_py import Hobbit  # noqa: E402


def traced(model: Hobbit, path: Path, prompt: list[int], n: int) -> float:
    """Seconds, as `decode`, while a trace is written; the file is closed after the clock has stopped."""
    with model.trace(path):
        seconds = decode(model, prompt, n)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--low", type=Path)
    parser.add_argument("--cache", default="16MiB")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    options = {"n_ctx": args.tokens + 64, "n_threads": args.threads, "n_threads_batch": args.threads, "verbose": False}
    speeds: dict[bool, list[float]] = {False: [], True: []}
    with (
        tempfile.TemporaryDirectory() as folder,
        Hobbit(args.model, low=args.low, cache=args.cache, deterministic=True, **options) as model,
    ):
        prompt = model.tokenize(b"In the beginning God created the heaven and the earth.")
        trace = Path(folder) / "trace"
        decode(model, prompt, args.tokens)
        for i in range(args.rounds):
            for on in (False, True) if i % 2 else (True, False):
                seconds = traced(model, trace, prompt, args.tokens) if on else decode(model, prompt, args.tokens)
                speeds[on].append(args.tokens / seconds)
        size = trace.stat().st_size / (args.tokens + len(prompt))

    ratios = np.array([a / b for a, b in zip(speeds[True], speeds[False], strict=True)])
    draws = np.random.default_rng(1).choice(ratios, (2000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    print(f"{args.model.name}, cache {args.cache}, {args.tokens} tokens, {args.threads} threads, {args.rounds} rounds")
    print(f"{platform.machine()}, {os.cpu_count()} CPUs")
    print(f"{'without, tok/s':<28} {spread(speeds[False], 1)}")
    print(f"{'with a trace, tok/s':<28} {spread(speeds[True], 1)}")
    print(f"{'ratio':<28} {spread(list(ratios), 4)}")
    print(f"{'median ratio, 95 %':<28} {low:10.4f} .. {high:.4f}")
    print(f"{'written':<28} {size:10.0f} bytes a token, the first residents and counters among them")


if __name__ == "__main__":
    main()
