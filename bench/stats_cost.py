#!/usr/bin/env python3
"""What reading the statistics costs: decode speed while a second thread calls cache_stats(), and without it.

    bench/stats_cost.py MODEL [--low FILE] [--cache 16MiB] [--per-second 100] [--rounds 60] [--tokens 128] [-t 2]

One model decodes the same tokens over and over, each time with another thread beside it: none, one that only wakes up
at the rate, one that reads at the rate. All three follow each other in every round, in changing order, and the ratios
are taken within a round. Where all CPUs compute, what the thread takes is lost to the computation; its CPU time is
therefore shown too: it varies less than the speed does.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hobbit_py import Hobbit


class Beside(threading.Thread):
    """Does something at a fixed rate until told to stop; counts how often, its CPU time, and the whole thread's."""

    def __init__(self, do: Callable[[], object], per_second: float) -> None:
        super().__init__()
        self.do = do
        self.period_s = 1 / per_second
        self.ended = False
        self.n = 0
        self.do_cpu_s = 0.0
        self.cpu_s = 0.0

    def run(self) -> None:
        due = time.perf_counter()
        while not self.ended:
            start = time.thread_time()
            self.do()
            self.do_cpu_s += time.thread_time() - start
            self.n += 1
            due += self.period_s
            time.sleep(max(0.0, due - time.perf_counter()))
        self.cpu_s = time.thread_time()


def decode(model: Hobbit, prompt: list[int], n: int) -> float:
    """Seconds of a greedy generation of `n` tokens."""
    model.reset()  # type: ignore[no-untyped-call]
    model.eval(prompt)
    start = time.perf_counter()
    for _ in range(n):
        model.eval([model.sample(temp=0.0)])
    return time.perf_counter() - start


def spread(values: list[float], digits: int) -> str:
    """Median, minimum and maximum."""
    return f"{statistics.median(values):10.{digits}f}  ({min(values):.{digits}f} .. {max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--low", type=Path)
    parser.add_argument("--cache", default="16MiB")
    parser.add_argument("--per-second", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("-t", "--threads", type=int, default=2)
    args = parser.parse_args()

    options = {"n_ctx": args.tokens + 64, "n_threads": args.threads, "n_threads_batch": args.threads, "verbose": False}
    with Hobbit(args.model, low=args.low, cache=args.cache, deterministic=True, **options) as model:
        sides: dict[str, Callable[[], object] | None] = {
            "alone": None,
            "a thread that wakes up": lambda: None,
            "a thread that reads": lambda: model.cache_stats().total.hit_rate,
        }
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        beside: dict[str, list[Beside]] = {name: [] for name in sides}
        prompt = model.tokenize(b"In the beginning God created the heaven and the earth.")
        decode(model, prompt, args.tokens)
        orders = itertools.cycle(itertools.permutations(sides))
        for _ in range(args.rounds):
            for name in next(orders):
                do = sides[name]
                if do is None:
                    seconds[name].append(decode(model, prompt, args.tokens))
                    continue
                thread = Beside(do, args.per_second)
                thread.start()
                seconds[name].append(decode(model, prompt, args.tokens))
                thread.ended = True
                thread.join()
                beside[name].append(thread)
        layers, experts = model.placement.n_layer, model.placement.n_expert

    print(f"{args.model.name}, {layers} layers of {experts} experts, {args.threads} threads on {os.cpu_count()} CPUs")
    print(f"{args.per_second:g} times a second; {args.rounds} rounds of {args.tokens} tokens: median (min .. max)")
    for name, times in seconds.items():
        print(f"{name:<24} tok/s        {spread([args.tokens / s for s in times], 1)}")
        if name == "alone":
            continue
        print(f"{'':<24} / alone      {spread([a / b for a, b in zip(seconds['alone'], times, strict=True)], 4)}")
        threads = beside[name]
        share = [100 * t.cpu_s / s for t, s in zip(threads, times, strict=True)]
        print(f"{'':<24} % of one CPU {spread(share, 2)}")
        print(f"{'':<24} us each      {spread([1e6 * t.do_cpu_s / t.n for t in threads], 1)}")


if __name__ == "__main__":
    main()
