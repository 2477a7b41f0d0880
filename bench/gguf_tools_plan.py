"""Is `gguf-tools plan` right? Its tokens/s against the engine's, on an inflated tiny-moe at several memory caps.

    python bench/gguf_tools_plan.py --model models/tiny-moe/tiny-moe-F16.gguf --caps 0.25,0.4,0.6

The model's experts are widened with zeros (the same function, the same routing, larger reads), paired as F16 + Q4_0,
and run by llama-completion with a cache of each share of the high experts' bytes, in a memory cgroup that leaves
little beside it, so that misses are read from the disk. `plan` gets what a user has before the first run: the cap, the
measured disk, and the speed with everything in memory. `with --stats` gets the statistics of the runs with the *other*
cache sizes instead, so it predicts a size it has not seen. Runs take turns; medians with their range.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from cage import Cage, spread
from rich.console import Console
from rich.table import Table

from gguf_tools.ggml import GgufContext, find_library
from gguf_tools.header import read_header
from gguf_tools.model import open_model
from gguf_tools.pair import PairOptions, plan_pair, run_pair
from gguf_tools.plan import Machine, expert_piece, make_plan, measure_disk

PROCESS = 192 << 20  # what the program needs beside the model: code, buffers, a little page cache


def inflate(source: Path, target: Path, factor: int) -> None:
    """Write `source` (F16 experts) with its experts' hidden width multiplied by `factor`, filled with zeros."""
    with open_model(source) as model:
        header = model.files[0].header
        experts = {e.name: e for e in model.experts}
        ctx = GgufContext.from_header(header.metadata_only())
        for key in ("expert_feed_forward_length", "feed_forward_length"):
            value = model.arch_int(key)
            if value:
                ctx.set_u32(f"{model.architecture}.{key}", value * factor)
        shapes = []
        for _, t in model.tensors:
            ne = list(t.ne)
            if t.name in experts:
                ne[0 if experts[t.name].role == "down" else 1] *= factor
            shapes.append((t.name, t.type, ne))
        ctx.add_tensors(shapes)
        with open(source, "rb") as src, open(target, "wb") as out:
            out.write(ctx.meta_bytes())
            for _, t in model.tensors:
                src.seek(t.offset)
                data = src.read(t.size)
                if t.name in experts:
                    ne0, ne1, n = experts[t.name].ne
                    values = np.frombuffer(data, np.float16).reshape(n, ne1, ne0)
                    down = experts[t.name].role == "down"
                    wide = np.zeros((n, ne1, ne0 * factor) if down else (n, ne1 * factor, ne0), np.float16)
                    wide[:, :ne1, :ne0] = values
                    data = wide.tobytes()
                out.write(data)
                out.write(b"\0" * (-out.tell() % ctx.alignment))


def run(base: Path, cache: int, limit: int, options: argparse.Namespace, stats: Path) -> tuple[float, float]:
    """(tokens/s, hit rate) of one run, whose statistics stay in `stats`."""
    for path in base.parent.glob("*.gguf"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    program = find_library().parent / "llama-completion"
    command = [str(program), "-m", str(base), "--hobbit-cache", str(max(1, cache >> 20)), "--hobbit-stats", str(stats)]
    command += ["-p", options.prompt, "-n", str(options.tokens), "-t", str(options.threads), "-c", "512", "--seed", "1"]
    command += ["-no-cnv", "--ignore-eos", "--no-warmup"]
    cap = Cage(limit) if limit else None
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, preexec_fn=cap.enter if cap else None
    )
    if cap:
        cap.close()
    if done.returncode != 0:
        raise SystemExit(f"llama-completion ended with {done.returncode}:\n{done.stderr[-2000:]}")
    value = json.loads(stats.read_text())
    return value["decode_tokens"] / value["decode_us"] * 1e6, value["total"]["hits"] / max(1, value["total"]["lookups"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--factor", type=int, default=8)
    parser.add_argument("--caps", default="0.25,0.4,0.6", help="cache sizes, as shares of the high experts' bytes")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", default="And it came to pass in those days that")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="gguf-tools-bench-") as scratch:
        folder = Path(scratch)
        model = folder / "inflated.gguf"
        inflate(options.model, model, options.factor)
        plan = plan_pair(PairOptions(model, folder / "pair", high="keep"))
        run_pair(plan)
        plan.close()
        model.unlink()
        base = folder / "pair" / "inflated.base.gguf"
        high = read_header(plan.files[0].path).file_size
        everything = high + read_header(plan.files[1].path).file_size
        caches = [int(float(x) * high) for x in options.caps.split(",")]
        file, piece = expert_piece(base)
        resident: list[float] = []
        disk: list[float] = []
        measured: dict[int, list[float]] = {c: [] for c in caches}
        hits: dict[int, list[float]] = {c: [] for c in caches}
        for i in range(options.repeat):
            resident.append(run(base, everything + (64 << 20), 0, options, folder / "all.json")[0])
            disk.append(measure_disk(file, piece))
            for c in caches:
                limit = c + read_header(base).file_size + PROCESS
                speed, hit = run(base, c, limit, options, folder / f"{c}-{i}.json")
                measured[c].append(speed)
                hits[c].append(hit)
        table = Table(
            title=f"{options.model.name}, experts {options.factor} times as wide, F16 + Q4_0", title_justify="left"
        )
        for column in ("cache", "tokens/s", "hit rate", "plan", "/ measured", "hit rate", "with --stats", "/ measured"):
            table.add_column(column)
        machine = Machine(vram=0, ram=1 << 40, disk=statistics.median(disk), reserve=0)
        free = make_plan(base, machine, context=512)
        for c in caches:
            machine = replace(machine, ram=free.base_bytes + free.kv_bytes + c)
            others = [folder / f"{x}-{i}.json" for x in caches if x != c for i in range(options.repeat)]
            guess = make_plan(base, machine, context=512, resident_speed=statistics.median(resident))
            known = make_plan(base, machine, context=512, stats=others)
            middle = statistics.median(measured[c])
            table.add_row(
                f"{c >> 20} MiB ({100 * c / high:.0f} %)",
                spread(measured[c]),
                f"{100 * statistics.median(hits[c]):.1f} %",
                f"{guess.tokens_per_s:.2f}",
                f"{guess.tokens_per_s / middle:.2f}",
                f"{100 * guess.hit_rate:.1f} %",
                f"{known.tokens_per_s:.2f}",
                f"{known.tokens_per_s / middle:.2f}",
            )
        console = Console(width=150, highlight=False)
        console.print(table)
        console.print(f"all in memory: {spread(resident)} tokens/s; disk {spread(disk, 1e9)} GB/s")
        console.print(f"{os.cpu_count()} CPUs, Linux {os.uname().release}, median (min-max) of {options.repeat} runs")
        console.print(f"repeat with: python {' '.join(sys.argv)}")


if __name__ == "__main__":
    main()
