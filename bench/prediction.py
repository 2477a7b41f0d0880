"""How well the next layers' routers are predicted from a layer's router input: top-1 and recall@k by depth and layer.

    .venv/bin/python bench/prediction.py models/tiny-moe/tiny-moe-F16.gguf --text models/tiny-moe/heldout.txt

Runs the model once over the text through llama.cpp's evaluation callback, keeps each layer's normalised FFN input and
router logits, and asks every later layer's router with them: as they are, and with the norm weights folded in (divided
by the layer's own, multiplied by the target's), which is what --hobbit-prefetch does. top-1: the expert predicted first
is the one chosen first; recall@k: the share of a token's k experts among the k predicted.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
from pathlib import Path

import gguf
import numpy as np
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("LLAMA_CPP_LIB_PATH", str(ROOT / "build/bin"))


def record(model: Path, text: str, n_tokens: int) -> dict[tuple[str, int], np.ndarray]:
    """("ffn_norm" or "ffn_moe_logits", layer) -> F32 [n_tokens, width]."""
    import llama_cpp

    base = ctypes.CDLL(str(Path(os.environ["LLAMA_CPP_LIB_PATH"]) / "libggml-base.so"))
    for name, result in (("ggml_get_name", ctypes.c_char_p), ("ggml_get_data", ctypes.c_void_p)):
        function = getattr(base, name)
        function.restype, function.argtypes = result, [ctypes.c_void_p]
    base.ggml_nelements.restype, base.ggml_nelements.argtypes = ctypes.c_int64, [ctypes.c_void_p]

    found: dict[tuple[str, int], np.ndarray] = {}

    @ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
    def see(tensor: int, ask: bool, _data: int) -> bool:
        match = re.fullmatch(r"(ffn_norm|ffn_moe_logits)-(\d+)", base.ggml_get_name(tensor).decode())
        if match and not ask:
            size = base.ggml_nelements(tensor)
            values = np.ctypeslib.as_array(
                ctypes.cast(base.ggml_get_data(tensor), ctypes.POINTER(ctypes.c_float)), (size,)
            )
            found[match[1], int(match[2])] = values.reshape(n_tokens, -1).copy()
        return bool(match) if ask else True

    params = llama_cpp.llama_model_default_params()
    loaded = llama_cpp.llama_model_load_from_file(str(model).encode(), params)
    vocab = llama_cpp.llama_model_get_vocab(loaded)
    ids = (ctypes.c_int32 * (n_tokens * 8))()
    raw = text.encode()
    n = llama_cpp.llama_tokenize(vocab, raw, min(len(raw), n_tokens * 4), ids, len(ids), True, False)
    if n < n_tokens:
        raise SystemExit(f"the text gives {n} tokens, {n_tokens} are asked for")
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = n_tokens
    options.n_threads = options.n_threads_batch = 2
    options.cb_eval = ctypes.cast(see, type(options.cb_eval))
    context = llama_cpp.llama_init_from_model(loaded, options)
    batch = llama_cpp.llama_batch_init(n_tokens, 0, 1)
    batch.n_tokens = n_tokens
    for i in range(n_tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = ids[i], i, 1, 0, 1
    if llama_cpp.llama_decode(context, batch) != 0:
        raise SystemExit("decoding failed")
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(loaded)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--depth", type=int, default=3)
    args = parser.parse_args()

    reader = gguf.GGUFReader(args.model)
    arch = reader.fields["general.architecture"].contents()
    k = int(reader.fields[f"{arch}.expert_used_count"].contents())
    weights = {
        t.name: np.asarray(t.data, dtype=np.float32) for t in reader.tensors if re.search("ffn_(gate_inp|norm)", t.name)
    }
    seen = record(args.model, args.text.read_text(errors="replace"), args.tokens)
    layers = sorted(layer for name, layer in seen if name == "ffn_moe_logits")

    def best(logits: np.ndarray) -> np.ndarray:
        return np.argsort(-logits, axis=1)[:, :k]

    table = Table(title=f"{args.model.name}: {args.tokens} tokens, top-{k}; % as they are / with folded norms")
    for column in ("depth", "measure", *(f"layer {layer}" for layer in layers[1:]), "mean"):
        table.add_column(column, justify="right")
    for depth in range(1, args.depth + 1):
        scores: dict[str, list[str]] = {"top-1": [], f"recall@{k}": []}
        sums = np.zeros((2, 2))
        n = 0
        for to in layers[1:]:
            source = to - depth
            if source not in layers:
                for row in scores.values():
                    row.append("")
                continue
            chosen = best(seen["ffn_moe_logits", to])
            router = weights[f"blk.{to}.ffn_gate_inp.weight"]
            ratio = weights[f"blk.{to}.ffn_norm.weight"] / weights[f"blk.{source}.ffn_norm.weight"]
            result = []
            for x in (seen["ffn_norm", source], seen["ffn_norm", source] * ratio):
                predicted = best(x @ router.T)
                top = float(np.mean(predicted[:, 0] == chosen[:, 0]))
                recall = float(np.mean([len(set(a) & set(b)) / k for a, b in zip(predicted, chosen, strict=True)]))
                result.append((top, recall))
            sums += np.array(result)
            n += 1
            for i, row in enumerate(scores.values()):
                row.append(f"{100 * result[0][i]:.0f} / {100 * result[1][i]:.0f}")
        for i, (name, row) in enumerate(scores.items()):
            table.add_row(str(depth), name, *row, f"{100 * sums[0, i] / n:.1f} / {100 * sums[1, i] / n:.1f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
