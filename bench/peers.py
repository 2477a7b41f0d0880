"""Other systems, installed into an environment of their own and run under the cap of bench/capped.py.

`install` makes build/peers-venv with pinned versions from the package index, `checkpoint` writes the GGUF's weights as
Transformers wants them, `run` makes one generation in a cgroup. What cannot be installed or run becomes a reason, in
one line. Not installable with pip for a CPU: MoE-Infinity, Fiddler, mixtral-offloading, KTransformers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import capped
from cage import Cage, block_device, drop_caches, finish, read_ahead

VENV = capped.ROOT / "build/peers-venv"
BENCH = Path(__file__).resolve().parent
TORCH = ("torch==2.13.0", "transformers==5.24.0", "accelerate==1.15.0", "safetensors==0.8.0", "gguf==0.19.0")


@dataclass(frozen=True)
class Peer:
    """`kind` as bench/peer_run.py knows it; `packages` beside what the others need."""

    name: str
    kind: str
    packages: tuple[str, ...]
    checkpoint: bool = True  # else the GGUF itself
    dtype: str = "float16"
    header: str = ""  # of a library that it compiles against, and the package that has it
    apt: str = ""
    read_ahead_kib: int = 8192  # of the disk: what the peer decodes fastest with


PEERS = (
    Peer("Transformers, disk offload", "accelerate", TORCH),
    Peer("DeepSpeed ZeRO-3, CPU", "deepspeed-cpu", (*TORCH, "deepspeed==0.19.8", "ninja==1.13.2"), dtype="bfloat16"),
    Peer(
        "DeepSpeed ZeRO-3, NVMe",
        "deepspeed-nvme",
        (*TORCH, "deepspeed==0.19.8", "ninja==1.13.2"),
        dtype="bfloat16",
        header="libaio.h",
        apt="libaio-dev",
    ),
    Peer("ik_llama.cpp, mmap", "ik_llama", ("ik-llama-cpp-python==0.1.5",), checkpoint=False, read_ahead_kib=128),
)


@dataclass
class Result:
    ids: list[int]
    prefill: float  # tokens/s
    decode: float
    bytes_per_token: float
    peak: int


def python() -> Path:
    return VENV / "bin/python"


def environment() -> dict[str, str]:
    """Of processes in there: what DeepSpeed compiles stays in the environment."""
    tools = f"{VENV / 'bin'}{os.pathsep}{os.environ['PATH']}"
    passive = {"OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    return {
        **os.environ,
        **passive,
        "PATH": tools,
        "TORCH_EXTENSIONS_DIR": str(VENV / "extensions"),
        "DS_ACCELERATOR": "cpu",
    }


def install(peer: Peer) -> str:
    """Installs what the peer needs, once; "" or why that failed."""
    stamp = VENV / f".{peer.kind}"
    wanted = "\n".join(peer.packages)
    if stamp.exists() and stamp.read_text() == wanted:
        return ""
    if not python().exists():
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    print(f"installing {' '.join(peer.packages)} in {VENV.relative_to(capped.ROOT)}", flush=True)
    pip = [str(python()), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q", *peer.packages]
    done = subprocess.run(pip, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        return f"does not install: {last_error(done.stderr)}"
    if peer.apt and not (Path("/usr/include") / peer.header).exists():
        # without it the peer says itself what it misses
        for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", peer.apt]):
            subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False)
    stamp.write_text(wanted)
    return ""


def checkpoint(model: Path) -> Path:
    """The folder with the model's weights for Transformers, written if need be."""
    folder = model.with_suffix(".hf")
    ready = folder / "config.json"
    if not ready.exists() or ready.stat().st_mtime < model.stat().st_mtime:
        subprocess.run([str(python()), str(BENCH / "gguf_to_hf.py"), str(model), "-o", str(folder)], check=True)
    return folder


def last_error(text: str) -> str:
    """The last line that looks like the reason, without paths."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception)\b|ERROR", line)]
    line = (errors or lines or ["no output"])[-1]
    return re.sub(r"(/[\w.+-]+)+/", "", line)[:160]


def run(
    peer: Peer, args: argparse.Namespace, prompt: list[int], memory: int | None, limit_s: int = 300
) -> Result | str:
    """One generation under `memory` bytes, or why there is none."""
    device = block_device(args.model)
    model = checkpoint(args.model) if peer.checkpoint else args.model
    # beside the model: the disk that is measured
    with tempfile.TemporaryDirectory(dir=args.model.parent) as scratch, read_ahead(device, peer.read_ahead_kib):
        file = Path(scratch) / "prompt.json"
        file.write_text(json.dumps(prompt))
        command = [
            python(),
            BENCH / "peer_run.py",
            peer.kind,
            "--model",
            model,
            "--prompt",
            file,
            "--dtype",
            peer.dtype,
        ]
        command += ["--tokens", args.tokens, "--threads", args.threads, "--device", device, "--scratch", scratch]
        for lock in (VENV / "extensions").rglob("lock"):
            lock.unlink()  # of a compilation that was killed: the next would wait for it forever
        drop_caches()
        cage = Cage(memory, None, device)
        try:
            done = finish(command, cage, limit_s, environment())
        except subprocess.TimeoutExpired:
            cage.close()
            return f"not done after {limit_s} s"
        peak, kills = cage.close()
    found = re.search(r"^RESULT (.*)$", done.stdout, re.MULTILINE)
    if not found:
        return "killed at the cap" if kills or done.returncode == -9 else last_error(done.stderr)
    data = json.loads(found[1])
    n = args.tokens - 1
    return Result(data["ids"], len(prompt) / data["prompt_s"], n / data["decode_s"], data["bytes"] / n, peak)
