"""What an expert that does not start on a block costs: random direct reads, aligned and with the blocks around it.

    python bench/gguf_tools_alignment.py --size-mib 2048

`aligned` reads pieces that start and end on a 4 KiB block; `shifted` reads pieces of the same length from an offset
that does not, so that the first and the last block are read besides; `one read` reads three times the bytes at once,
as if gate, up and down of an expert lay side by side. The three take turns in one run.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

BLOCK = 4096
PIECES = {
    "36 KiB (tiny-moe, Q4_0)": 36 << 10,
    "128 KiB (tiny-moe, F16)": 128 << 10,
    "864 KiB (768 x 2048, Q4_0)": 864 << 10,
    "3 MiB (768 x 2048, F16)": 3 << 20,
}


class Reader:
    """Random reads by a few threads on one descriptor past the page cache."""

    def __init__(self, path: Path, threads: int, largest: int) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self.size = os.path.getsize(path)
        self.pool = ThreadPoolExecutor(threads)
        self.largest = largest
        self.local = threading.local()

    def read(self, where: tuple[int, int]) -> int:
        offset, n = where
        if not hasattr(self.local, "buffer"):
            self.local.buffer = mmap.mmap(-1, self.largest)
        return os.preadv(self.fd, [memoryview(self.local.buffer)[:n]], offset)

    def rate(self, piece: int, reads: int, extra: int) -> float:
        """Useful bytes per second for pieces that need `extra` bytes besides."""
        n = piece + extra
        places = [(random.randrange((self.size - n) // BLOCK) * BLOCK, n) for _ in range(reads)]
        started = time.perf_counter()
        done = sum(self.pool.map(self.read, places))
        seconds = time.perf_counter() - started
        assert done == reads * n
        return reads * piece / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mib", type=int, default=2048)
    parser.add_argument("--per-run-mib", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    random.seed(1)
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="gguf-tools-bench-") as scratch:
        path = Path(scratch) / "data"
        block = random.randbytes(16 << 20)
        with open(path, "wb") as f:
            for _ in range(options.size_mib // 16):
                f.write(block)
            f.flush()
            os.fsync(f.fileno())
        reader = Reader(path, options.threads, 3 * max(PIECES.values()) + 2 * BLOCK)
        table = Table(
            title=f"random direct reads, {options.threads} threads, MB/s of useful bytes", title_justify="left"
        )
        for column in (
            "piece",
            "aligned",
            "shifted",
            "shifted / aligned",
            "one read of three pieces",
            "one read / aligned",
        ):
            table.add_column(column)
        for label, piece in PIECES.items():
            reads = max(12, (options.per_run_mib << 20) // piece // 3 * 3)
            runs: dict[str, list[float]] = {"aligned": [], "shifted": [], "one": []}
            for _ in range(options.repeat):
                runs["aligned"].append(reader.rate(piece, reads, 0))
                runs["shifted"].append(
                    reader.rate(piece, reads, BLOCK)
                )  # [x, x + n) unaligned covers n / 4096 + 1 blocks
                runs["one"].append(reader.rate(3 * piece, reads // 3, 0))
            middle = {name: statistics.median(v) for name, v in runs.items()}

            def show(name: str, runs: dict[str, list[float]] = runs) -> str:
                v = [x / 1e6 for x in runs[name]]
                return f"{statistics.median(v):.0f} ({min(v):.0f}-{max(v):.0f})"

            table.add_row(
                label,
                show("aligned"),
                show("shifted"),
                f"{middle['shifted'] / middle['aligned']:.2f}",
                show("one"),
                f"{middle['one'] / middle['aligned']:.2f}",
            )
    console = Console(width=150, highlight=False)
    console.print(table)
    console.print(f"median (min-max) of {options.repeat} runs; {os.cpu_count()} CPUs, Linux {os.uname().release}")
    console.print(f"repeat with: python {' '.join(sys.argv)}")


if __name__ == "__main__":
    main()
