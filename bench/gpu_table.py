"""Decode and prefill on one GPU: stock with experts in RAM, stock with all in GPU memory, the cache at several sizes.

    bench/gpu_table.py MODEL [--low FILE] [--cache 25% --cache 50% --cache 75%] [--rounds 3] [--side NAME=OPTIONS]

Each measurement is one run of llama-completion; the sides take turns, round by round, and ratios to the first side that
ran are taken round by round. A cache size in % is that share of the model file. A side that cannot run says why and the
others go on: stock with all in GPU memory often does not fit. bench/gpu.sh calls this after it built and tested.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from cage import spread

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "In the beginning God created the heaven and the earth. And the earth was without form, and void; "
TIMING = r" =.*?([\d.]+) tokens per second"


@dataclass
class Side:
    name: str
    options: list[str]
    decode: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    refused: str = ""


def measure(side: Side, args: argparse.Namespace) -> None:
    command = [str(args.bin / "llama-completion"), "-m", str(args.model), "-no-cnv", "-p", args.prompt]
    command += ["-n", str(args.tokens), "--ignore-eos", "--temp", "0", "-t", str(args.threads), "-c", "4096"]
    command += ["-lv", "4", "--fit", "off", *args.common, *side.options]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=args.timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        side.refused = f"no result within {args.timeout} s"
        return
    text = done.stdout + done.stderr
    decode = re.search(r"\beval time" + TIMING, re.sub(r"prompt eval time.*", "", text))
    prefill = re.search(r"prompt eval time" + TIMING, text)
    if done.returncode != 0 or not decode or not prefill:
        reason = re.compile(r"error|refus|failed|cannot|out of memory", re.IGNORECASE)
        lines = [line for line in done.stderr.splitlines() if reason.search(line)] or done.stderr.splitlines()[-1:]
        side.refused = f"exit status {done.returncode}: {''.join(lines[:1]).strip()[:160]}"
        return
    side.decode.append(float(decode[1]))
    side.prefill.append(float(prefill[1]))
    print(f"  {side.name:<28} {decode[1]:>9} tok/s  prefill {prefill[1]:>9} tok/s", flush=True)


def cache_size(value: str, model: Path) -> str:
    if value.endswith("%"):
        return f"{max(1, int(model.stat().st_size * float(value[:-1]) / 100 / 2**20))}MiB"
    return value


def card() -> str:
    if shutil.which("nvidia-smi") is None:
        return "no NVIDIA driver"
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current"]
    done = subprocess.run([*query, "--format=csv,noheader"], capture_output=True, text=True, check=False)
    return done.stdout.strip().replace("\n", "; ") or "no card"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--low", type=Path, help="low-precision file; adds the sides 'hobbit'")
    parser.add_argument(
        "--cache", action="append", metavar="SIZE", help="of the pools on the card, or P%% of the model"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=512, help="about this many")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--ngl", type=int, default=99, help="layers on the GPU; 0 to try this script without one")
    parser.add_argument("--timeout", type=int, default=120, help="seconds for one run")
    parser.add_argument("--common", default="", help="options for every side")
    parser.add_argument("--side", action="append", default=[], metavar="NAME=OPTIONS", help="one more side")
    parser.add_argument("--bin", type=Path, default=ROOT / "build/bin")
    args = parser.parse_args()
    args.prompt = PROMPT * max(1, round(args.prompt_tokens / 22))
    args.common = ["-ngl", str(args.ngl), *args.common.split()]

    sides = [Side("stock, experts in RAM", ["--cpu-moe"]), Side("stock, all on the GPU", [])]
    for cache in args.cache or ["25%", "50%", "75%"]:
        size = cache_size(cache, args.model)
        pool = ["--hobbit-device-cache" if args.ngl > 0 else "--hobbit-cache", size]
        sides.append(Side(f"exact, {size}", [*pool, "--hobbit-precision", "high"]))
        if args.low:
            sides.append(Side(f"hobbit, {size}", [*pool, "--hobbit-low", str(args.low)]))
    for extra in args.side:
        name, _, options = extra.partition("=")
        sides.append(Side(name, options.split()))

    for _ in range(args.rounds):
        for side in sides:
            if not side.refused:
                measure(side, args)

    low = f", low {args.low.name}" if args.low else ""
    print(f"\n{args.model.name}{low}, {args.model.stat().st_size / 2**20:.0f} MiB, {args.tokens} tokens after a prompt")
    print(
        f"of about {args.prompt_tokens}, {args.threads} threads, {args.rounds} rounds; {platform.machine()}; {card()}"
    )
    print(f"{'':<28} {'decode tok/s':<30} {'against the first that ran':<28} prefill tok/s")
    ran = [side for side in sides if not side.refused]
    for side in sides:
        if side.refused:
            print(f"{side.name:<28} did not run: {side.refused}")
            continue
        ratio = spread([a / b for a, b in zip(side.decode, ran[0].decode, strict=True)])
        print(f"{side.name:<28} {spread(side.decode):<30} {ratio:<28} {spread(side.prefill)}")


if __name__ == "__main__":
    main()
