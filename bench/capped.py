"""Decode and prefill of a model that does not fit: stock mmap against the expert cache, under one memory cap.

    sudo bench/capped.py MODEL [--low FILE] [--cap-share 0.35] [--rounds 5] [--read-ahead 128]

Needs root and the cgroup v1 memory controller. Each measurement runs build/bin/llama-completion in a child cgroup
whose memory.limit_in_bytes (anonymous memory and page cache) is the given share of the model file; before it the page
cache is dropped and read_ahead_kb of the block device is set, afterwards it is restored. The sides take turns, round by
round. The table has medians with minimum and maximum, bytes read from the block device per generated token, and ratios
taken round by round.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CGROUP = Path("/sys/fs/cgroup/memory")
PROMPT = "In the beginning God created the heaven and the earth. And the earth was without form, and void; "


@dataclass
class Side:
    name: str
    options: list[str]
    decode: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    mib_per_token: list[float] = field(default_factory=list)


def block_device(path: Path) -> Path:
    """The sysfs folder of the disk that holds a file."""
    device = os.stat(path).st_dev
    folder = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    return folder if (folder / "queue").is_dir() else folder.parent


@contextlib.contextmanager
def read_ahead(device: Path, kib: int) -> Iterator[None]:
    setting = device / "queue/read_ahead_kb"
    before = setting.read_text()
    setting.write_text(str(kib))
    try:
        yield
    finally:
        setting.write_text(before)


@contextlib.contextmanager
def memory_cap(limit: int | None) -> Iterator[Path | None]:
    if limit is None:
        yield None
        return
    group = CGROUP / f"hobbit-bench-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        yield group
    finally:
        group.rmdir()


def sectors_read(device: Path) -> int:
    return int((device / "stat").read_text().split()[2])


def measure(side: Side, args: argparse.Namespace, device: Path, limit: int | None) -> None:
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3")
    command = [
        str(args.bin / "llama-completion"),
        "-m",
        str(args.model),
        "-no-cnv",
        "-p",
        args.prompt,
        "-n",
        str(args.tokens),
    ]
    command += [
        "--ignore-eos",
        "--temp",
        "0",
        "-t",
        str(args.threads),
        "-c",
        "2048",
        "-b",
        "512",
        "-lv",
        "4",
        "--no-warmup",
        *side.options,
    ]
    with memory_cap(limit) as group:
        enter = None if group is None else (lambda: (group / "cgroup.procs").write_text(str(os.getpid())))
        before = sectors_read(device)
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            preexec_fn=enter,
            check=False,
        )
        read_mib = (sectors_read(device) - before) * 512 / 2**20
    text = done.stdout + done.stderr
    decode = re.search(r"  eval time =.*?([\d.]+) tokens per second", text)
    prefill = re.search(r"prompt eval time =.*?([\d.]+) tokens per second", text)
    if done.returncode != 0 or not decode or not prefill:
        raise SystemExit(f"{' '.join(command)}\nfailed ({done.returncode}):\n{text[-3000:]}")
    side.decode.append(float(decode[1]))
    side.prefill.append(float(prefill[1]))
    side.mib_per_token.append(read_mib / args.tokens)
    print(
        f"  {side.name:<28} {decode[1]:>8} tok/s  prefill {prefill[1]:>8} tok/s  {read_mib:9.0f} MiB read", flush=True
    )


def median(values: list[float]) -> str:
    return f"{statistics.median(values):8.2f} ({min(values):.2f} .. {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--low", type=Path, help="low-precision file; adds the side 'hobbit'")
    parser.add_argument("--cap-share", type=float, default=0.35)
    parser.add_argument("--cache", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompt-tokens", type=int, default=40, help="about this many; 512 for a prefill comparison")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--read-ahead", type=int, default=128)
    parser.add_argument("--uncapped", action="store_true", help="also stock without a cap")
    parser.add_argument("--side", action="append", default=[], metavar="NAME=OPTIONS", help="one more side of the fork")
    parser.add_argument("--bin", type=Path, default=ROOT / "build/bin")
    args = parser.parse_args()
    args.prompt = PROMPT * max(1, round(args.prompt_tokens / 22))

    size = args.model.stat().st_size
    cap = int(size * args.cap_share)
    sides = [Side("stock, mmap", [])]
    sides.append(Side("exact", ["--hobbit-cache", args.cache, "--hobbit-precision", "high"]))
    if args.low:
        sides.append(Side("hobbit", ["--hobbit-cache", args.cache, "--hobbit-low", str(args.low)]))
    for extra in args.side:
        name, _, options = extra.partition("=")
        sides.append(Side(name, options.split()))
    free = Side("stock, no cap", [])

    device = block_device(args.model)
    print(f"{args.model.name}: {size / 2**20:.0f} MiB, cap {cap / 2**20:.0f} MiB, ", end="")
    print(f"read_ahead_kb {args.read_ahead}, {args.threads} threads")
    with read_ahead(device, args.read_ahead):
        for _ in range(args.rounds):
            for side in sides:
                measure(side, args, device, cap)
            if args.uncapped:
                measure(free, args, device, None)

    print(f"\n{'':<22} {'decode tok/s':<30} {'against stock':<28} {'prefill tok/s':<32} MiB read per token")
    for side in sides + ([free] if args.uncapped else []):
        ratio = [a / b for a, b in zip(side.decode, sides[0].decode, strict=True)]
        columns = [f"{median(side.decode):<30}", f"{median(ratio):<28}", f"{median(side.prefill):<32}"]
        print(f"{side.name:<22}", *columns, median(side.mib_per_token))


if __name__ == "__main__":
    main()
