"""Does memory stay in its budget? The peak of a whole process through a long generation under a cap.

    sudo .venv/bin/python bench/memory.py MODEL [--low FILE] [--tokens 4000] [--cap-share 0.35]

The cgroup counts anonymous memory and page cache together. The process's resident set and the group's usage are read
every half second; the table has them at a tenth, a half and the end of the run, and the peak, which a kernel that had
to kill would not have reported.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cage import Cage, drop_caches
from capped import PROMPT, ROOT
from rich.console import Console
from rich.table import Table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--low", type=Path)
    parser.add_argument("--cap-share", type=float, default=0.35)
    parser.add_argument("--cache", default="auto")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bin", type=Path, default=ROOT / "build/bin")
    args = parser.parse_args()

    cap = int(args.model.stat().st_size * args.cap_share)
    command = [args.bin / "llama-completion", "-m", args.model, "-no-cnv", "-p", PROMPT, "-n", args.tokens]
    command += ["--ignore-eos", "--temp", "0.8", "--seed", "1", "-t", args.threads, "-c", args.tokens + 64, "-lv", "4"]
    command += ["--hobbit-cache", args.cache]
    command += ["--hobbit-low", args.low] if args.low else ["--hobbit-precision", "high"]
    drop_caches()
    cage = Cage(cap)
    if cage.memory is None:
        raise SystemExit(cage.note)
    usage = cage.memory / "memory.usage_in_bytes"
    samples: list[tuple[int, int]] = []
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            [str(c) for c in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=output,
            preexec_fn=cage.enter,
        )
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            resident = re.search(r"VmRSS:\s+(\d+) kB", status.read_text()) if status.exists() else None
            if resident:
                samples.append((int(resident[1]) * 1024, int(usage.read_text())))
            time.sleep(0.5)
        output.seek(0)
        log = output.read()
    peak, kills = cage.close()
    speed = re.search(r"  eval time =.*?/ *(\d+) runs.*?([\d.]+) tokens per second", log)
    if process.returncode != 0 or kills or not speed:
        raise SystemExit(f"ended with {process.returncode}, {kills} kills:\n{log[-3000:]}")

    table = Table()
    for column in ("at", "process MiB", "group MiB"):
        table.add_column(column)
    for name, where in (("a tenth", 0.1), ("a half", 0.5), ("the end", 1.0)):
        resident, group = samples[min(len(samples) - 1, int(where * len(samples)))]
        table.add_row(name, f"{resident / 2**20:.1f}", f"{group / 2**20:.1f}")
    table.add_row("peak", f"{max(s[0] for s in samples) / 2**20:.1f}", f"{peak / 2**20:.1f}")
    console = Console(width=150, highlight=False)
    console.print(table)
    console.print(f"cap {cap / 2**20:.1f} MiB, {speed[1]} tokens at {speed[2]} tok/s, nothing killed")
    console.print(f"repeat with: python {' '.join(sys.argv)}")


if __name__ == "__main__":
    main()
