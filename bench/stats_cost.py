"""What reading the statistics costs: decode speed while a second thread calls cache_stats(), and without it.

    bench/stats_cost.py MODEL [--low FILE] [--cache 16MiB] [--per-second 100] [--rounds 40] [--tokens 64] [--threads 2]

One model; the two sides take turns over the same tokens, the order changes every round, and the ratio is taken round by
round. Prints medians with minimum and maximum, and the CPU time of one reading.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hobbit_py import Hobbit


class Reader(threading.Thread):
    """Reads at a fixed rate until told to stop; knows how often, and the CPU time that it took."""

    def __init__(self, model: Hobbit, per_second: float) -> None:
        super().__init__()
        self.model = model
        self.period_s = 1 / per_second
        self.ended = threading.Event()
        self.n = 0
        self.cpu_s = 0.0

    def run(self) -> None:
        due = time.perf_counter()
        while not self.ended.wait(max(0.0, due - time.perf_counter())):
            start = time.thread_time()
            _ = self.model.cache_stats().total.hit_rate
            self.cpu_s += time.thread_time() - start
            self.n += 1
            due += self.period_s


def decode(model: Hobbit, prompt: list[int], n: int) -> float:
    """Tokens per second of a greedy generation."""
    model.reset()  # type: ignore[no-untyped-call]
    model.eval(prompt)
    start = time.perf_counter()
    for _ in range(n):
        model.eval([model.sample(temp=0.0)])
    return n / (time.perf_counter() - start)


def show(name: str, values: list[float], unit: str, digits: int = 1) -> None:
    middle, low, high = statistics.median(values), min(values), max(values)
    print(f"{name:<28} {middle:10.{digits}f} {unit:<6} ({low:.{digits}f} .. {high:.{digits}f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--low", type=Path)
    parser.add_argument("--cache", default="16MiB")
    parser.add_argument("--per-second", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    options = {"n_ctx": 1024, "n_threads": args.threads, "n_threads_batch": args.threads, "verbose": False}
    speeds: dict[bool, list[float]] = {False: [], True: []}
    n_read, cpu_s = 0, 0.0
    with Hobbit(args.model, low=args.low, cache=args.cache, deterministic=True, **options) as model:
        prompt = model.tokenize(b"In the beginning God created the heaven and the earth.")
        decode(model, prompt, args.tokens)
        for i in range(args.rounds):
            for reading in (False, True) if i % 2 else (True, False):
                reader = Reader(model, args.per_second)
                if reading:
                    reader.start()
                speeds[reading].append(decode(model, prompt, args.tokens))
                if reading:
                    reader.ended.set()
                    reader.join()
                    n_read, cpu_s = n_read + reader.n, cpu_s + reader.cpu_s
        layers = model.placement.n_layer

    machine = f"{platform.machine()}, {os.cpu_count()} CPUs"
    print(f"{args.model.name}, {layers} layers, {args.tokens} tokens, {args.threads} threads, {args.rounds} rounds")
    print(machine)
    show("not read", speeds[False], "tok/s")
    show(f"read {args.per_second:g} times a second", speeds[True], "tok/s")
    show("ratio", [a / b for a, b in zip(speeds[True], speeds[False], strict=True)], "", 4)
    print(f"{'CPU time of one reading':<28} {1e6 * cpu_s / n_read:10.1f} us     ({n_read} readings)")


if __name__ == "__main__":
    main()
