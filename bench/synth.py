"""Writes a synthetic MoE model of any shape, to measure with: random weights, a real tokenizer.

    bench/synth.py --like models/tiny-moe/tiny-moe-F16.gguf -o big.gguf --layers 12 --experts 64 --ff 768

Architecture qwen3moe, F16 matrices. The tokenizer is that of --like. Routing of random weights is close to uniform: it
says what a cache costs, not how well it hits. Tensors are written one at a time, so memory stays at one expert tensor.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np

TOKENIZER_PREFIX = "tokenizer."


def copy_tokenizer(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> int:
    """Copies every tokenizer key; returns the size of the vocabulary."""
    n_vocab = 0
    for field in reader.fields.values():
        if not field.name.startswith(TOKENIZER_PREFIX):
            continue
        value = field.contents()
        if field.name == "tokenizer.ggml.tokens":
            n_vocab = len(value)
        sub_type = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, field.types[0], sub_type)
    return n_vocab


def write_model(args: argparse.Namespace) -> None:
    rng = np.random.default_rng(args.seed)
    writer = gguf.GGUFWriter(args.output, "qwen3moe", use_temp_file=False)
    n_vocab = copy_tokenizer(gguf.GGUFReader(args.like), writer)
    n_head = args.embd // args.head_dim
    n_head_kv = max(1, n_head // 4)

    writer.add_block_count(args.layers)
    writer.add_context_length(32768)
    writer.add_embedding_length(args.embd)
    writer.add_feed_forward_length(args.ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_key_length(args.head_dim)
    writer.add_value_length(args.head_dim)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(args.experts)
    writer.add_expert_used_count(args.used)
    writer.add_expert_feed_forward_length(args.ff)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)

    shapes: list[tuple[str, tuple[int, ...], type]] = [("token_embd.weight", (n_vocab, args.embd), np.float16)]
    shapes.append(("output_norm.weight", (args.embd,), np.float32))
    for i in range(args.layers):
        kv_dim = n_head_kv * args.head_dim
        shapes += [
            (f"blk.{i}.attn_norm.weight", (args.embd,), np.float32),
            (f"blk.{i}.attn_q.weight", (n_head * args.head_dim, args.embd), np.float16),
            (f"blk.{i}.attn_k.weight", (kv_dim, args.embd), np.float16),
            (f"blk.{i}.attn_v.weight", (kv_dim, args.embd), np.float16),
            (f"blk.{i}.attn_output.weight", (args.embd, n_head * args.head_dim), np.float16),
            (f"blk.{i}.attn_q_norm.weight", (args.head_dim,), np.float32),
            (f"blk.{i}.attn_k_norm.weight", (args.head_dim,), np.float32),
            (f"blk.{i}.ffn_norm.weight", (args.embd,), np.float32),
            (f"blk.{i}.ffn_gate_inp.weight", (args.experts, args.embd), np.float32),
            (f"blk.{i}.ffn_gate_exps.weight", (args.experts, args.ff, args.embd), np.float16),
            (f"blk.{i}.ffn_up_exps.weight", (args.experts, args.ff, args.embd), np.float16),
            (f"blk.{i}.ffn_down_exps.weight", (args.experts, args.embd, args.ff), np.float16),
        ]
    for name, shape, dtype in shapes:
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        writer.add_tensor_info(name, shape, np.dtype(dtype), nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape, dtype in shapes:
        if len(shape) == 1:
            data = np.ones(shape, dtype)
        else:
            # one block of random rows, repeated: writing is then as fast as the disk
            scale = (2.0 if "gate_inp" in name else 1.0) / np.sqrt(shape[-1])
            block = (rng.standard_normal((64, shape[-1]), dtype=np.float32) * scale).astype(dtype)
            rows = int(np.prod(shape[:-1]))
            order = rng.integers(0, 64, rows)
            data = block[order].reshape(shape)
        writer.write_tensor_data(data)
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--like", type=Path, required=True, help="GGUF whose tokenizer is copied")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--used", type=int, default=8)
    parser.add_argument("--embd", type=int, default=1024)
    parser.add_argument("--ff", type=int, default=768)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    write_model(parser.parse_args())


if __name__ == "__main__":
    main()
