"""What the engine costs when nothing is missing: decode speed with all experts resident, against stock in one run.

    bench/resident.py MODEL [--rounds 7] [--tokens 128] [--threads 2]

Both sides are build/bin/llama-completion with --no-repack; stock is the fork without options. The two take turns, the
order changes every round, and the ratio is taken round by round. Prints medians with minimum and maximum.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
from pathlib import Path

from cage import finish

ROOT = Path(__file__).resolve().parent.parent


def decode_speed(binary: Path, model: Path, args: argparse.Namespace, extra: list[str]) -> float:
    # a prompt that touches every expert, so that decode begins with all of them resident
    prompt = "In the beginning God created the heaven and the earth. And the earth was without form, and void; " * 20
    command = [binary, "-m", model, "-p", prompt, "-n", args.tokens, "-t", args.threads, "-c", 4096]
    command += ["-no-cnv", "--ignore-eos", "--temp", 0, "--no-repack", "-lv", 4, *extra]
    done = finish(command)
    found = re.search(r"  eval time =.*?([\d.]+) tokens per second", done.stdout + done.stderr)
    if done.returncode != 0 or not found:
        raise SystemExit(f"{' '.join(str(c) for c in command)}\nfailed ({done.returncode}):\n{done.stderr[-2000:]}")
    return float(found.group(1))


def show(name: str, values: list[float], unit: str) -> None:
    print(f"{name:<24} {statistics.median(values):9.2f} {unit:<6} ({min(values):.2f} .. {max(values):.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bin", type=Path, default=ROOT / "build/bin")
    args = parser.parse_args()

    binary = args.bin / "llama-completion"
    cache = f"{2 * os.path.getsize(args.model) // 2**20 + 64}MiB"
    sides = {"stock": [], "hobbit": ["--hobbit-cache", cache, "--hobbit-precision", "high"]}
    speeds: dict[str, list[float]] = {"stock": [], "hobbit": []}
    for i in range(args.rounds):
        for side in sorted(sides, reverse=bool(i % 2)):
            speeds[side].append(decode_speed(binary, args.model, args, sides[side]))

    machine = platform.processor() or platform.machine()
    print(f"{args.model.name}, {args.tokens} tokens, {args.threads} threads, {args.rounds} rounds, {machine}")
    show("stock", speeds["stock"], "tok/s")
    show("all experts resident", speeds["hobbit"], "tok/s")
    show("ratio", [h / s for h, s in zip(speeds["hobbit"], speeds["stock"], strict=True)], "")


if __name__ == "__main__":
    main()
