"""Speed and memory of `gguf-tools pair` against `llama-quantize` on one synthetic MoE model, under a memory cap.

    python bench/gguf_tools_throughput.py --size-gb 3 --cap-mib 1024 --repeat 3

The model (F16, qwen3moe, almost all of it experts) is written to a scratch folder first. Every run starts with the
model out of the page cache, in a fresh cgroup whose limit covers page cache too (version 1 or 2; needs the right to
make one, otherwise the runs are uncapped and the table says so). `low only` does what llama-quantize does; `pair`
also copies the F16 experts and writes the base. Speed is bytes of source experts per second. Programs take turns, so
that a disturbance meets all of them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from cage import Cage, spread
from rich.console import Console
from rich.table import Table

from gguf_tools.ggml import find_library
from gguf_tools.header import read_header

ROOT = Path(__file__).resolve().parent.parent
N_EMBD, N_FF, N_EXPERT = 1024, 1024, 32


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def write_model(path: Path, size: int) -> int:
    """A loadable F16 qwen3moe of about `size` bytes; returns the bytes of its experts."""
    expert_tensor = N_EMBD * N_FF * N_EXPERT * 2
    n_layer = max(1, size // (3 * expert_tensor))
    a = "qwen3moe"
    numbers = {
        f"{a}.block_count": n_layer,
        f"{a}.context_length": 512,
        f"{a}.embedding_length": N_EMBD,
        f"{a}.feed_forward_length": N_FF,
        f"{a}.expert_feed_forward_length": N_FF,
        f"{a}.attention.head_count": 8,
        f"{a}.attention.head_count_kv": 8,
        f"{a}.expert_count": N_EXPERT,
        f"{a}.expert_used_count": 4,
        f"{a}.vocab_size": 32,
        "general.file_type": 1,
    }
    kv = [text("general.architecture") + struct.pack("<i", 8) + text(a)]
    kv.append(text("tokenizer.ggml.model") + struct.pack("<i", 8) + text("no_vocab"))
    kv.append(text(f"{a}.attention.layer_norm_rms_epsilon") + struct.pack("<if", 6, 1e-6))
    kv += [text(key) + struct.pack("<iI", 4, value) for key, value in numbers.items()]
    tensors: list[tuple[str, tuple[int, ...], int]] = [
        ("token_embd.weight", (N_EMBD, 32), 1),
        ("output_norm.weight", (N_EMBD,), 0),
    ]
    for i in range(n_layer):
        tensors.append((f"blk.{i}.ffn_gate_inp.weight", (N_EMBD, N_EXPERT), 0))
        tensors += [(f"blk.{i}.ffn_{role}_exps.weight", (N_EMBD, N_FF, N_EXPERT), 1) for role in ("gate", "down", "up")]
    header = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(kv)) + b"".join(kv))
    offset = 0
    sizes = []
    for name, ne, kind in tensors:
        n = int(np.prod(ne)) * (2 if kind else 4)
        header += text(name) + struct.pack(f"<I{len(ne)}qiQ", len(ne), *ne, kind, offset)
        sizes.append(n)
        offset += n  # every size here is a multiple of the alignment
    header += b"\0" * (-len(header) % 32)
    rng = np.random.default_rng(1)
    block = (rng.standard_normal(16 << 20, dtype=np.float32) * 0.05).astype(np.float16).tobytes()
    with open(path, "wb") as f:
        f.write(header)
        for (_, _, kind), n in zip(tensors, sizes, strict=True):
            left = n
            while left:
                piece = block[: min(left, len(block))] if kind else np.full(left // 4, 0.01, np.float32).tobytes()
                f.write(piece)
                left -= len(piece)
    return sum(n for (name, _, _), n in zip(tensors, sizes, strict=True) if "_exps" in name)


@dataclass
class Runs:
    """Measurements of one program."""

    label: str
    command: list[str]
    outputs: list[Path]
    seconds: list[float] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    peak: list[int] = field(default_factory=list)
    killed: int = 0
    note: str = ""

    def run(self, cap_bytes: int, model: Path) -> None:
        for path in self.outputs:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        fd = os.open(model, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        os.sync()
        cap = Cage(cap_bytes)
        started = time.monotonic()
        process = subprocess.Popen(
            self.command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=cap.enter
        )
        assert process.stderr is not None
        errors = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        self.seconds.append(time.monotonic() - started)
        peak, kills = cap.close()
        self.rss.append(usage.ru_maxrss * 1024)
        self.peak.append(peak)
        self.killed += kills
        self.note = cap.note
        if process.returncode != 0:
            raise SystemExit(
                f"{self.label} ended with {process.returncode}:\n{errors.decode(errors='replace')[-2000:]}"
            )


def equal_experts(a: Path, b: Path) -> int:
    """Compare all expert tensors of two files; returns how many there are."""
    first, second = ({t.name: t for t in read_header(p).tensors if "_exps" in t.name} for p in (a, b))
    assert first.keys() == second.keys() and first
    with open(a, "rb") as fa, open(b, "rb") as fb:
        for name, t in first.items():
            other = second[name]
            assert (t.size, t.type.name) == (other.size, other.type.name), name
            fa.seek(t.offset)
            fb.seek(other.offset)
            for at in range(0, t.size, 16 << 20):
                n = min(16 << 20, t.size - at)
                if fa.read(n) != fb.read(n):
                    raise SystemExit(f"{name} differs between {a.name} and {b.name}")
    return len(first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-gb", type=float, default=3.0, help="size of the model (10^9 bytes)")
    parser.add_argument("--cap-mib", type=int, default=1024, help="memory limit of each run, page cache included")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--type", default="q4_0", help="type of the low experts")
    parser.add_argument("--folder", type=Path, help="scratch folder (default: a temporary one)")
    options = parser.parse_args()
    quantize = find_library().parent / "llama-quantize"
    if not quantize.exists():
        raise SystemExit(f"{quantize} is missing: make build")

    with tempfile.TemporaryDirectory(dir=options.folder, prefix="gguf-tools-bench-") as scratch:
        folder = Path(scratch)
        model = folder / "model.gguf"
        source = write_model(model, int(options.size_gb * 1e9))
        tool = [
            sys.executable,
            "-m",
            "gguf_tools",
            "pair",
            str(model),
            "--low",
            options.type,
            "-q",
            "-t",
            str(options.threads),
        ]
        runs = [
            Runs(
                "llama-quantize --pure",
                [
                    str(quantize),
                    "--pure",
                    str(model),
                    str(folder / "q.gguf"),
                    options.type.upper(),
                    str(options.threads),
                ],
                [folder / "q.gguf"],
            ),
            Runs("gguf-tools pair --low-only", [*tool, "-o", str(folder / "low"), "--low-only"], [folder / "low"]),
            Runs(
                "gguf-tools pair --high keep", [*tool, "-o", str(folder / "pair"), "--high", "keep"], [folder / "pair"]
            ),
        ]
        for i in range(options.repeat):
            for r in runs[i % 3 :] + runs[: i % 3]:
                r.run(options.cap_mib << 20, model)
        n = equal_experts(folder / "q.gguf", folder / "low" / f"model.experts-{options.type.upper()}.gguf")

        table = Table(
            title=f"{source / 1e9:.2f} GB of F16 experts to {options.type.upper()}, {options.threads} threads",
            title_justify="left",
        )
        for column in (
            "program",
            "seconds",
            "MB/s of source",
            "of llama-quantize",
            "process, MiB",
            "cgroup peak, MiB",
            "killed",
        ):
            table.add_column(column)
        reference = statistics.median(runs[0].seconds)
        for r in runs:
            rate = [source / s for s in r.seconds]
            table.add_row(
                r.label,
                spread(r.seconds, 1, 1),
                spread(rate, 1e6, 0),
                f"{100 * reference / statistics.median(r.seconds):.0f} %",
                spread([float(v) for v in r.rss], 1 << 20, 0),
                spread([float(v) for v in r.peak], 1 << 20, 0) if any(r.peak) else "-",
                str(r.killed),
            )
        console = Console(width=150, highlight=False)
        console.print(table)
        cap = runs[0].note or f"memory limit {options.cap_mib} MiB per run, page cache included"
        console.print(f"median (min-max) of {options.repeat} runs; {cap}; {n} expert tensors byte-equal")
        console.print(f"{os.cpu_count()} CPUs, Linux {os.uname().release}; repeat with: python {' '.join(sys.argv)}")


if __name__ == "__main__":
    main()
