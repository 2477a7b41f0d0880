"""One greedy generation by another system, for bench/peers.py, in the environment that it makes.

    peer_run.py KIND --model PATH --prompt IDS.json --tokens N --threads T --dtype TYPE --device DIR --scratch DIR

KIND: accelerate (Transformers, weights on disk), deepspeed-cpu and deepspeed-nvme (ZeRO-3, parameters on the CPU or on
disk), ik_llama (GGUF). Prints one line `RESULT {json}`: token ids, seconds of the prompt and of the other tokens, bytes
that the block device read during the latter.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Step = Callable[[list[int]], int]  # the next token after these more


def bytes_read(device: Path) -> int:
    return int((device / "stat").read_text().split()[2]) * 512


def torch_step(model: Any) -> Step:
    import torch

    cache = None

    def step(ids: list[int]) -> int:
        nonlocal cache
        with torch.no_grad():
            out = model(torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        return int(out.logits[0, -1].argmax())

    return step


def accelerate(args: argparse.Namespace) -> Step:
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype), device_map={"": "disk"}, offload_folder=args.scratch
    )
    return torch_step(model.eval())


def deepspeed(args: argparse.Namespace) -> Step:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29517",
    }
    import deepspeed
    import torch
    import transformers
    from transformers.integrations import HfDeepSpeedConfig

    torch.set_num_threads(args.threads)
    to = {"device": "cpu"}
    if args.kind == "deepspeed-nvme":
        to = {"device": "nvme", "nvme_path": str(args.scratch), "buffer_count": 4, "buffer_size": 2**28}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": args.dtype == "float16"},
        "bf16": {"enabled": args.dtype == "bfloat16"},
        "zero_optimization": {"stage": 3, "offload_param": to, "stage3_param_persistence_threshold": 10000},
        "aio": {"block_size": 2**20, "queue_depth": 8, "thread_count": 1},
    }
    deepspeed.init_distributed("gloo")
    keep = HfDeepSpeedConfig(settings)  # from_pretrained partitions while it loads, as long as this lives
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    del keep
    return torch_step(engine.module.eval())


def ik_llama(args: argparse.Namespace) -> Step:
    from ik_llama_cpp import IkLlama
    from ik_llama_cpp._internals import make_batch_range

    llm = IkLlama(str(args.model), n_ctx=1024, n_threads=args.threads)
    context = llm._context
    at = 0

    def step(ids: list[int], _keep: IkLlama = llm) -> int:
        nonlocal at
        for i in range(0, len(ids), 512):
            part = ids[i : i + 512]
            if context.decode(make_batch_range(part, pos_start=at, logits_last=i + 512 >= len(ids))) != 0:
                raise RuntimeError("llama_decode failed")
            at += len(part)
        return int(context.sample(-1, temperature=0.0))

    return step


KINDS = {"accelerate": accelerate, "deepspeed-cpu": deepspeed, "deepspeed-nvme": deepspeed, "ik_llama": ik_llama}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompt", type=Path, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--device", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    args = parser.parse_args()

    step = KINDS[args.kind](args)
    start = time.perf_counter()
    ids = [step(json.loads(args.prompt.read_text()))]
    middle, before = time.perf_counter(), bytes_read(args.device)
    for _ in range(args.tokens - 1):
        ids.append(step(ids[-1:]))
    result = {
        "ids": ids,
        "prompt_s": middle - start,
        "decode_s": time.perf_counter() - middle,
        "bytes": bytes_read(args.device) - before,
    }
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
