"""The mixed-precision forward pass of a qwen3moe model in PyTorch, as a check that shares no code with the engine.

    PYTHON_WITH_TORCH tests/torch_reference.py --high MODEL.gguf --low MODEL-Q4_0.gguf --tokens tokens.npy \\
        --t1 0.6 --t2 0.9 --out logits.npz [--wrong-precision LAYER,EXPERT]

Needs torch, transformers (5 or later), gguf and numpy. Weights are dequantised by the gguf package and set by hand into
transformers' Qwen3MoeForCausalLM, in F32; its experts are replaced by ones that take each (token, expert) pair in the
precision that HOBBIT's rule (section 3.2 of the paper) gives it. Writes for the modes high, hobbit and low the logits
[token, vocabulary], and as MODE.ids the chosen experts [layer, token, k]. `--wrong-precision` gives one expert the
other precision wherever it is used.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import gguf_to_hf


def weights(path: Path) -> dict[str, torch.Tensor]:
    reader = gguf.GGUFReader(path)
    found = {}
    for t in reader.tensors:
        data = gguf.dequantize(t.data, t.tensor_type).astype(np.float32)
        found[t.name] = torch.from_numpy(data.reshape(*reversed(t.shape.tolist())))
    return found


def precision(gate: torch.Tensor, mode: str, t1: float, t2: float) -> torch.Tensor:
    """[token, k]: 2 high, 1 low, 0 skip, for gate weights in any order."""
    if mode != "hobbit":
        return torch.full(gate.shape, 2 if mode == "high" else 1)
    share = gate / gate.sum(dim=-1, keepdim=True)
    ranked, order = share.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(dim=-1) - ranked
    level = torch.where(before <= t1, 2, torch.where(before <= t2, 1, 0))
    return torch.empty_like(level).scatter_(-1, order, level)


class MixedExperts(torch.nn.Module):
    """Experts in two precisions: `sets[1]` low, `sets[2]` high, each (gate, up, down) of [expert, out, in]."""

    def __init__(self, sets: dict[int, tuple[torch.Tensor, ...]], wrong: int | None) -> None:
        super().__init__()
        self.sets = sets
        self.wrong = wrong
        self.rule: Any = None  # gate weights -> levels
        self.ids = torch.empty(0)  # [token, k] of the last call

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        self.ids = ids
        levels = self.rule(gate)
        if self.wrong is not None:
            levels = torch.where(ids == self.wrong, torch.where(levels == 2, 1, 2), levels)
        out = torch.zeros_like(hidden)
        for level, (w_gate, w_up, w_down) in self.sets.items():
            for expert in range(w_gate.shape[0]):
                token, k = torch.where((ids == expert) & (levels == level))
                if len(token) == 0:
                    continue
                x = hidden[token]
                y = functional.silu(x @ w_gate[expert].T) * (x @ w_up[expert].T)
                out.index_add_(0, token, (y @ w_down[expert].T) * gate[token, k, None])
        return out


def build(high: Path, low: Path, wrong: tuple[int, int] | None) -> Any:
    w, w_low = weights(high), weights(low)
    config = transformers.Qwen3MoeConfig(**gguf_to_hf.config(gguf.GGUFReader(high)), attn_implementation="eager")
    model = transformers.Qwen3MoeForCausalLM(config).float().eval()

    parameters = dict(model.named_parameters())

    def put(ours: str, theirs: str) -> None:
        parameter = parameters[ours]
        assert parameter.shape == w[theirs].shape, (
            f"{theirs}: {tuple(w[theirs].shape)}, {tuple(parameter.shape)} wanted"
        )
        parameter.data.copy_(w[theirs])

    for ours, theirs in (gguf_to_hf.GLOBAL | gguf_to_hf.HEAD).items():
        if theirs in w:
            put(ours, theirs)
    for i, layer in enumerate(model.model.layers):
        for ours, theirs in gguf_to_hf.LAYER.items():
            put(f"model.layers.{i}.{ours}", f"blk.{i}.{theirs}")
        roles = [f"blk.{i}.ffn_{role}_exps.weight" for role in ("gate", "up", "down")]
        sets = {2: tuple(w[r] for r in roles), 1: tuple(w_low[r] for r in roles)}
        layer.mlp.experts = MixedExperts(sets, wrong[1] if wrong and wrong[0] == i else None)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--high", type=Path, required=True)
    parser.add_argument("--low", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, required=True, help=".npy of token ids")
    parser.add_argument("--t1", type=float, default=0.6)
    parser.add_argument("--t2", type=float, default=0.9)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--wrong-precision", metavar="LAYER,EXPERT")
    args = parser.parse_args()

    torch.set_num_threads(1)
    wrong = tuple(map(int, args.wrong_precision.split(","))) if args.wrong_precision else None
    model = build(args.high, args.low, wrong)  # type: ignore[arg-type]
    tokens = torch.from_numpy(np.load(args.tokens).astype(np.int64))[None]
    logits = {}
    for mode in ("high", "hobbit", "low"):
        for layer in model.model.layers:
            layer.mlp.experts.rule = lambda gate, mode=mode: precision(gate, mode, args.t1, args.t2)
        with torch.no_grad():
            logits[mode] = model(tokens).logits[0].numpy()
        logits[f"{mode}.ids"] = torch.stack([layer.mlp.experts.ids for layer in model.model.layers]).numpy()
    np.savez(args.out, **logits)


if __name__ == "__main__":
    main()
