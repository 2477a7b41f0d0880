"""HOBBIT's observations measured on a model: what its gate weights, router inputs and predictions are worth.

    bench/claims.py [--model FILE] [--trace TRACE of bench/simulate.py record] [--plot OUT.png]

Stock computation on pieces of the held-out text, whose intermediate tensors are read through llama.cpp's evaluation
callback: per layer, the Pearson correlation of an expert's gate weight with the norm of what it adds to the output,
and the cosine of the router inputs of consecutive layers. From the trace: how well the engine's predictions name the
next layers' experts, and the mix of precisions at T1 0.6, T2 0.9.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hobbit_py import _lib  # noqa: E402
from hobbit_py.calibrate import windows  # noqa: E402
from hobbit_py.trace import HIGH, LOW, SKIP, Trace  # noqa: E402

from llama_cpp._logger import set_verbose  # noqa: E402  isort: skip

llama = _lib.binding


class Tap:
    """Copies the tensors of wanted names while the graph runs."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.found: dict[str, list[np.ndarray]] = defaultdict(list)
        ggml = ctypes.CDLL(str(next(_lib.library_dir.glob("libggml-base.so*"))))
        ggml.ggml_get_name.restype = ctypes.c_char_p
        ggml.ggml_get_name.argtypes = [ctypes.c_void_p]
        ggml.ggml_nbytes.restype = ctypes.c_size_t
        ggml.ggml_nbytes.argtypes = [ctypes.c_void_p]
        ggml.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
        self.ggml = ggml
        self.callback = llama.ggml_backend_sched_eval_callback(self._on_tensor)

    def _on_tensor(self, tensor: int, ask: bool, user_data: Any) -> bool:
        name = self.ggml.ggml_get_name(tensor).decode()
        stem, _, layer = name.rpartition("-")
        wanted = stem in self.names and layer.isdigit()
        if not ask and wanted:
            self.found[name].append(self._read(tensor))
        return wanted if ask else True

    def _read(self, tensor: int) -> np.ndarray:
        """The tensor's values, dimensions from the slowest to the fastest."""
        shape = (ctypes.c_int64 * 8).from_address(tensor + 16)  # ne[4], nb[4] of ggml_tensor
        size = self.ggml.ggml_nbytes(tensor)
        raw = np.empty(size, np.uint8)
        self.ggml.ggml_backend_tensor_get(tensor, raw.ctypes.data, 0, size)
        ne, nb = list(shape[:4])[::-1], list(shape[4:])[::-1]
        return np.lib.stride_tricks.as_strided(raw.view(np.float32), ne, nb).copy()


def run(model_path: Path, text: Path, sequences: int, length: int) -> dict[str, np.ndarray]:
    set_verbose(False)
    tap = Tap(("ffn_norm", "ffn_moe_weighted", "ffn_moe_weights_norm"))
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(str(model_path).encode(), llama.llama_model_default_params())
    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = length
    params.n_threads = params.n_threads_batch = 2
    params.cb_eval = tap.callback
    context = llama.llama_init_from_model(model, params)
    raw = text.read_bytes()
    tokens = (llama.llama_token * len(raw))()
    n = llama.llama_tokenize(llama.llama_model_get_vocab(model), raw, len(raw), tokens, len(raw), False, False)
    batch = llama.llama_batch_init(length, 0, 1)
    for piece in windows(tokens[:n], sequences, length):
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        batch.n_tokens = length
        for i, token in enumerate(piece):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, True
            batch.seq_id[i][0] = 0
        assert llama.llama_decode(context, batch) == 0
    llama.llama_batch_free(batch)
    llama.llama_free(context)
    llama.llama_model_free(model)
    return {name: np.concatenate([p[0] for p in parts]) for name, parts in tap.found.items()}


def accuracy(trace: Trace) -> dict[int, tuple[float, float, float]]:
    """By depth: first expert named, first named is among the chosen, share of the chosen that were named."""
    actual = {}
    for route in trace.routes():
        actual[route.step, route.layer] = route
    hits: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
    for p in trace.predictions():
        route = actual.get((p.step, p.to))
        if route is None or len(route.ids) != len(p.ids):
            continue
        for named, weights, chosen in zip(p.ids, route.weights, route.ids, strict=True):
            first = chosen[np.argmax(weights)]
            hits[p.to - p.layer].append(
                (named[0] == first, named[0] in chosen, len(set(named.tolist()) & set(chosen.tolist())) / len(chosen))
            )
    return {depth: tuple(np.mean(rows, axis=0)) for depth, rows in sorted(hits.items())}  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "models/tiny-moe/tiny-moe-F16.gguf")
    parser.add_argument("--text", type=Path, default=ROOT / "models/tiny-moe/heldout.txt")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--sequences", type=int, default=24)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()

    found = run(args.model, args.text, args.sequences, args.length)
    layers = sorted(int(name.rpartition("-")[2]) for name in found if name.startswith("ffn_moe_weighted-"))
    weight = {i: found[f"ffn_moe_weights_norm-{i}"].reshape(len(found[f"ffn_moe_weighted-{i}"]), -1) for i in layers}
    norm = {i: np.linalg.norm(found[f"ffn_moe_weighted-{i}"], axis=2) for i in layers}
    r = {i: float(np.corrcoef(weight[i].ravel(), norm[i].ravel())[0, 1]) for i in layers}
    x = {i: found[f"ffn_norm-{i}"].reshape(len(weight[i]), -1) for i in layers}
    cosine = {}
    for a, b in itertools.pairwise(layers):
        dots = (x[a] * x[b]).sum(axis=1)
        cosine[b] = float((dots / np.linalg.norm(x[a], axis=1) / np.linalg.norm(x[b], axis=1)).mean())
    print(f"{args.sequences} sequences of {args.length} tokens\n")
    print("| layer | " + " | ".join(map(str, layers)) + " |")
    print("|---" * (len(layers) + 1) + "|")
    print("| gate weight and norm of the contribution, Pearson | " + " | ".join(f"{r[i]:.3f}" for i in layers) + " |")
    print("| router input and the one before, cosine | | " + " | ".join(f"{cosine[i]:.3f}" for i in layers[1:]) + " |")
    depths: dict[int, tuple[float, float, float]] = {}
    if args.trace:
        trace = Trace.load(args.trace)
        depths = accuracy(trace)
        print("\n| layers ahead | first expert named | first named is chosen | of the chosen, named |")
        print("|---|---|---|---|")
        for depth, row in depths.items():
            print(f"| {depth} | " + " | ".join(f"{100 * v:.1f} %" for v in row) + " |")
        asked = np.concatenate([route.asked.ravel() for route in trace.routes()])
        mix = ", ".join(
            f"{100 * (asked == p).mean():.1f} % {n}" for p, n in ((HIGH, "high"), (LOW, "low"), (SKIP, "skipped"))
        )
        print(f"\nprecisions asked at T1 {trace.settings['t1']:g}, T2 {trace.settings['t2']:g}: {mix}")
    if args.plot:
        plot(args.plot, layers, weight, norm, r, cosine, depths)


def plot(
    out: Path,
    layers: list[int],
    weight: dict[int, np.ndarray],
    norm: dict[int, np.ndarray],
    r: dict[int, float],
    cosine: dict[int, float],
    depths: dict[int, tuple[float, float, float]],
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, (len(layers) + 3) // 2, figsize=(12, 5.5), layout="constrained")
    panels = list(axes.ravel())
    for i in layers:
        axis = panels.pop(0)
        axis.hexbin(weight[i].ravel(), norm[i].ravel(), gridsize=40, mincnt=1, bins="log", cmap="Blues")
        axis.set_title(f"layer {i}: r = {r[i]:.3f}", fontsize=9)
        axis.set(xlabel="gate weight", ylabel="norm of the contribution")
    axis = panels.pop(0)
    axis.bar(list(cosine), list(cosine.values()), color="#1f4e8c")
    axis.axhline(0.96, color="#c2542d", ls="--", lw=1, label="paper: 0.96")
    axis.set(ylim=(0, 1), xlabel="layer", title="cosine with the layer before")
    axis.legend(fontsize=7)
    axis = panels.pop(0)
    for k, label in enumerate(("first named", "first named is chosen", "share named")):
        axis.plot(list(depths), [100 * row[k] for row in depths.values()], marker="o", label=label)
    axis.plot([1, 2, 3], [96, 90, 90], color="#c2542d", ls="--", lw=1, label="paper, top-1")
    axis.set(ylim=(0, 100), xlabel="layers ahead", title="prediction, %", xticks=[1, 2, 3])
    axis.legend(fontsize=7)
    for axis in panels:
        axis.axis("off")
    figure.savefig(out, dpi=90)


if __name__ == "__main__":
    main()
