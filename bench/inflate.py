"""Widens the experts of a MoE model k times without changing what it computes.

    bench/inflate.py models/tiny-moe/tiny-moe-F16.gguf -o build/bench/tiny-moe-x40.gguf -k 40

Every neuron of an expert is repeated k times (gate and up rows), and the down projection is repeated and divided by k,
so that the expert's output is the same sum: real routing and perplexity meet large experts. Only the rounding of down
weights to F16 differs. Everything else is copied. Tensors are written one expert tensor at a time.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import gguf
import numpy as np

EXPERTS = re.compile(r"blk\.\d+\.ffn_(gate|up|down)_exps\.weight")


def inflate(source: Path, target: Path, k: int) -> None:
    """Raises SystemExit if the experts are not F16 or F32: repeating needs plain numbers."""
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    width_key = f"{arch}.expert_feed_forward_length"
    writer = gguf.GGUFWriter(target, arch)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value = field.contents() * k if field.name == width_key else field.contents()
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(field.name, value, field.types[0], field.types[1] if is_array else None)

    def axis(name: str) -> int | None:
        found = EXPERTS.fullmatch(name)
        return None if not found else 2 if found[1] == "down" else 1

    for tensor in reader.tensors:
        if axis(tensor.name) is not None and tensor.data.dtype not in (np.float16, np.float32):
            raise SystemExit(f"{source}: tensor {tensor.name} is {tensor.tensor_type.name}; F16 or F32 is needed")
        shape = list(tensor.data.shape)
        if axis(tensor.name) is not None:
            shape[axis(tensor.name)] *= k
        raw = tensor.tensor_type if tensor.data.dtype == np.uint8 else None
        nbytes = int(np.prod(shape)) * tensor.data.dtype.itemsize
        writer.add_tensor_info(tensor.name, shape, tensor.data.dtype, nbytes, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        data = tensor.data
        where = axis(tensor.name)
        if where == 2:
            data = np.tile((data.astype(np.float32) / k).astype(data.dtype), (1, 1, k))
        elif where == 1:
            data = np.tile(data, (1, k, 1))
        writer.write_tensor_data(data)
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("-k", type=int, default=40)
    args = parser.parse_args()
    partial = args.output.with_suffix(".partial")
    inflate(args.model, partial, args.k)
    partial.rename(args.output)


if __name__ == "__main__":
    main()
