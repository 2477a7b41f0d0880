#!/usr/bin/env python3
"""Off means stock: the fork without a hobbit option against an unpatched build.

    check_stock.py --fork build/bin --stock build/stock/bin --model FILE.gguf

Compares, bit for bit, the logits of a 200-token prompt and of 64 greedily generated tokens,
for ubatches of 1, 32 and 512, and then `llama-bench` in interleaved runs. Each side runs in
its own process, since two copies of ggml in one process do not work. `make check-stock`
builds both sides and calls this; it is no part of `make test`, because it needs the second
build and a quiet machine. Exit code 1 when logits differ or the fork is slower than
--min-ratio allows.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

N_PROMPT, N_GENERATE = 200, 64
UBATCHES = (1, 32, 512)


def dump(model_path: str, ubatch: int, out: str) -> None:
    """Write the logits [N_PROMPT + N_GENERATE, n_vocab] of one run; LLAMA_CPP_LIB_PATH says whose."""
    import llama_cpp as lib

    lib.llama_backend_init()
    mparams = lib.llama_model_default_params()
    mparams.use_extra_bufts = False  # as --no-repack
    model = lib.llama_model_load_from_file(model_path.encode(), mparams)
    if not model:
        raise SystemExit(f"check-stock: error: cannot load {model_path}")
    cparams = lib.llama_context_default_params()
    cparams.n_ctx, cparams.n_batch, cparams.n_ubatch = 512, 512, ubatch
    cparams.n_threads = cparams.n_threads_batch = 2
    context = lib.llama_init_from_model(model, cparams)
    n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    rows = np.empty((N_PROMPT + N_GENERATE, n_vocab), np.float32)

    def decode(tokens: list[int], first: int) -> None:
        batch = lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, first + i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, True
        if lib.llama_decode(context, batch) != 0:
            raise SystemExit(f"check-stock: error: llama_decode failed at position {first}")
        for i in range(len(tokens)):
            row = ctypes.cast(lib.llama_get_logits_ith(context, i), ctypes.POINTER(ctypes.c_float * n_vocab))
            rows[first + i] = np.frombuffer(row.contents, np.float32)
        lib.llama_batch_free(batch)

    prompt = np.random.default_rng(1).integers(3, n_vocab, N_PROMPT).tolist()
    decode(prompt, 0)
    for position in range(N_PROMPT, N_PROMPT + N_GENERATE):
        decode([int(rows[position - 1].argmax())], position)
    np.save(out, rows)


def logits_of(binaries: Path, model: Path, ubatch: int, folder: Path) -> np.ndarray:
    out = folder / "logits.npy"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_", "HOBBIT_"))}
    environment["LLAMA_CPP_LIB_PATH"] = str(binaries.resolve())
    command = [sys.executable, __file__, "--dump", str(out), "--ubatch", str(ubatch), "--model", str(model)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"check-stock: error: the run with {binaries} failed:\n{done.stderr[-4000:]}")
    rows: np.ndarray = np.load(out)
    return rows


def bench(binaries: Path, model: Path) -> dict[str, float]:
    """Tokens/s of one llama-bench run, by test."""
    command = [
        str(binaries / "llama-bench"),
        "-m",
        str(model),
        "-p",
        "256",
        "-n",
        "64",
        "-r",
        "1",
        "-t",
        "2",
        "-o",
        "json",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"check-stock: error: {' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return {f"pp{test['n_prompt']} tg{test['n_gen']}": test["avg_ts"] for test in json.loads(done.stdout)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--fork", type=Path, help="folder with the fork's programs and libraries")
    parser.add_argument("--stock", type=Path, help="the same of the unpatched build")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=7, help="llama-bench runs of each side (default: 7)")
    parser.add_argument("--min-ratio", type=float, default=0.97, help="lowest median speed relative to stock")
    parser.add_argument("--ubatch", type=int, default=512, help=argparse.SUPPRESS)
    parser.add_argument("--dump", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.dump:
        dump(str(args.model), args.ubatch, args.dump)
        return 0

    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for ubatch in UBATCHES:
            fork = logits_of(args.fork, args.model, ubatch, Path(folder))
            stock = logits_of(args.stock, args.model, ubatch, Path(folder))
            different = int((fork.view(np.uint32) != stock.view(np.uint32)).any(axis=1).sum())
            failed |= different > 0
            print(f"logits, ubatch {ubatch:3}: {different} of {len(fork)} positions differ", flush=True)

    speeds: dict[str, dict[str, list[float]]] = {"fork": {}, "stock": {}}
    for run in range(args.runs):
        for side in ("fork", "stock") if run % 2 else ("stock", "fork"):
            for test, speed in bench(args.fork if side == "fork" else args.stock, args.model).items():
                speeds[side].setdefault(test, []).append(speed)
    print(f"{'test':>12} {'fork tok/s':>24} {'stock tok/s':>24} {'ratio':>7}   (median, min-max of {args.runs})")
    for test in speeds["stock"]:
        columns = []
        for side in ("fork", "stock"):
            values = speeds[side][test]
            columns.append(f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})")
        ratio = statistics.median(speeds["fork"][test]) / statistics.median(speeds["stock"][test])
        failed |= ratio < args.min_ratio
        print(f"{test:>12} {columns[0]:>24} {columns[1]:>24} {ratio:7.3f}")
    print("check-stock: " + ("FAILED" if failed else "passed"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
