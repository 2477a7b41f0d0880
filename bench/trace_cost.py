"""What a trace costs: decode speed with --hobbit-trace being written, and without.

    bench/trace_cost.py MODEL [--low FILE] [--cache 16MiB] [--rounds 40] [--tokens 64] [--threads 2]

One model; the two sides take turns over the same tokens, the order changes every round, and the ratio is taken round by
round. Prints medians with minimum and maximum, the ratio's 95 % interval from resampling rounds, and bytes per token.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import numpy as np  # noqa: E402
from stats_cost import decode, load, make_parser, show  # noqa: E402

from hobbit_py import Hobbit, _lib  # noqa: E402


def traced(model: Hobbit, path: Path, prompt: list[int], n: int) -> float:
    """Tokens per second while a trace is written; the file is closed after the clock has stopped."""
    error = ctypes.create_string_buffer(1024)
    with model._engine() as ctx:
        if not _lib.lib.hobbit_trace_start(ctx, os.fsencode(path), error, len(error)):
            raise SystemExit(os.fsdecode(error.value))
    speed = decode(model, prompt, n)
    with model._engine() as ctx:
        if not _lib.lib.hobbit_trace_stop(ctx, error, len(error)):
            raise SystemExit(os.fsdecode(error.value))
    return speed


def main() -> None:
    args = make_parser(__doc__).parse_args()
    speeds: dict[bool, list[float]] = {False: [], True: []}
    loaded, prompt = load(args)
    with tempfile.TemporaryDirectory() as folder, loaded as model:
        trace = Path(folder) / "trace"
        decode(model, prompt, args.tokens)
        for i in range(args.rounds):
            for on in (False, True) if i % 2 else (True, False):
                speed = traced(model, trace, prompt, args.tokens) if on else decode(model, prompt, args.tokens)
                speeds[on].append(speed)
        size = trace.stat().st_size / (args.tokens + len(prompt))

    ratios = np.array([a / b for a, b in zip(speeds[True], speeds[False], strict=True)])
    draws = np.random.default_rng(1).choice(ratios, (2000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    print(f"{args.model.name}, cache {args.cache}, {args.tokens} tokens, {args.threads} threads, {args.rounds} rounds")
    print(f"{platform.machine()}, {os.cpu_count()} CPUs")
    show("without", speeds[False], "tok/s")
    show("with a trace", speeds[True], "tok/s")
    show("ratio", list(ratios), "", 4)
    print(f"{'median ratio, 95 %':<28} {low:10.4f} .. {high:.4f}")
    print(f"{'written':<28} {size:10.0f} bytes a token, the first residents and counters among them")


if __name__ == "__main__":
    main()
