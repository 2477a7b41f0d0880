"""Writes a qwen3moe GGUF as a Hugging Face checkpoint of the same weights, for systems that do not read GGUF.

    bench/gguf_to_hf.py MODEL.gguf -o FOLDER

Everything becomes F16; expert tensors of F16 keep their bits. Gate and up are stacked, as Transformers 5 keeps them.
One safetensors file per layer, written one at a time; no tokenizer. Needs gguf and safetensors.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

# names of Transformers' Qwen3MoeForCausalLM, and of the GGUF
GLOBAL = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
HEAD = {"lm_head.weight": "output.weight"}  # unless it is tied to the embedding
LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
}


def config(reader: gguf.GGUFReader) -> dict[str, Any]:
    """Keywords of Qwen3MoeConfig.

    Raises:
        SystemExit: another architecture.
    """
    meta = {name: field.contents() for name, field in reader.fields.items()}
    arch = meta["general.architecture"]
    if arch != "qwen3moe":
        raise SystemExit(f"the model is of architecture {arch}; this knows qwen3moe")
    names = {tensor.name: tensor for tensor in reader.tensors}

    def key(name: str) -> Any:
        return meta[f"{arch}.{name}"]

    return {
        "vocab_size": int(names["token_embd.weight"].shape[1]),
        "hidden_size": key("embedding_length"),
        "intermediate_size": key("feed_forward_length"),
        "moe_intermediate_size": key("expert_feed_forward_length"),
        "num_hidden_layers": key("block_count"),
        "num_attention_heads": key("attention.head_count"),
        "num_key_value_heads": key("attention.head_count_kv"),
        "head_dim": key("attention.key_length"),
        "num_experts": key("expert_count"),
        "num_experts_per_tok": key("expert_used_count"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rms_norm_eps": key("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": key("rope.freq_base")},
        "max_position_embeddings": key("context_length"),
        "tie_word_embeddings": "output.weight" not in names,
    }


def convert(source: Path, folder: Path) -> None:
    """Raises SystemExit as `config` does."""
    from safetensors.numpy import save_file

    reader = gguf.GGUFReader(source)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    kept = {**config(reader), "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "dtype": "float16"}

    def load(name: str) -> np.ndarray:
        data = tensors[name].data
        if data.dtype not in (np.float16, np.float32):
            data = gguf.dequantize(data, tensors[name].tensor_type)
        return data.astype(np.float16)

    def layer(i: int) -> dict[str, np.ndarray]:
        found = {f"model.layers.{i}.{ours}": load(f"blk.{i}.{theirs}") for ours, theirs in LAYER.items()}
        gate, up, down = (load(f"blk.{i}.ffn_{role}_exps.weight") for role in ("gate", "up", "down"))
        found[f"model.layers.{i}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        found[f"model.layers.{i}.mlp.experts.down_proj"] = down
        return found

    folder.mkdir(parents=True, exist_ok=True)
    where: dict[str, str] = {}
    size = 0
    for i in range(-1, kept["num_hidden_layers"]):
        plain = GLOBAL if kept["tie_word_embeddings"] else {**GLOBAL, **HEAD}
        part = layer(i) if i >= 0 else {ours: load(theirs) for ours, theirs in plain.items()}
        name = f"model-{i + 1:03d}.safetensors"
        save_file({k: np.ascontiguousarray(v) for k, v in part.items()}, folder / name, metadata={"format": "pt"})
        where |= dict.fromkeys(part, name)
        size += sum(v.nbytes for v in part.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(kept, indent=1))  # last: says that all is there


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args()
    convert(args.model, args.output)


if __name__ == "__main__":
    main()
