"""Policies, sizes, splits and thresholds compared on traces, with the engine's own cache (docs/policy.md).

    bench/simulate.py verify TRACE                replay with the recorded settings against the recorded counters
    bench/simulate.py record OUT                  tiny-moe reads 40 pieces of its held-out text
    bench/simulate.py generate mixtral|fine OUT   routing made to the published statistics of locality
    bench/simulate.py compare TRACE...            penalty of each policy at 10 to 50 % of the experts' bytes
    bench/simulate.py sweep TRACE                 split and thresholds
    bench/simulate.py split TRACE...              what a split of the cache that moves could gain over a fixed one
    bench/simulate.py timing TRACE                prefetch depth, with reads that can be interrupted or not

Half of the sequences (the first) fit the weights of Eq. 3; numbers are of the other half, with 95 % intervals from
resampling sequences, paired. A penalty is counted in misses of a high copy; a low one costs its share of the bytes.
Each event is one layer of one token. Except with the recorded settings the router's choices stay as they were:
counterfactual, unless the trace was deterministic.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hobbit_py.calibrate import fit_weights, penalties, ratio_interval, record  # noqa: E402
from hobbit_py.replay import POLICIES, Replay, caveat  # noqa: E402
from hobbit_py.trace import Layer, Trace, TraceWriter  # noqa: E402

SIZES = (0.1, 0.2, 0.3, 0.4, 0.5)
MODEL = ROOT / "models/tiny-moe/tiny-moe-F16.gguf"
LOW = ROOT / "build/models/tiny-moe-Q4_0.gguf"
TEXT = ROOT / "models/tiny-moe/heldout.txt"


def all_bytes(trace: Trace) -> int:
    """Of every expert in high precision."""
    return sum(layer.n_expert for layer in trace.layers) * int(trace.settings["slots_high"][1])


def verify(args: argparse.Namespace) -> None:
    trace = Trace.load(args.trace)
    with Replay(args.trace) as replay:
        result = replay.run()
    wrong = result["divergences"]
    for context, stats in trace.stats():
        layers = next((c["layers"] for c in result["contexts"] if c["context"] == context), [])
        for i, (ours, theirs) in enumerate(zip(layers, stats["layers"], strict=False)):
            for name in ours:
                if name != "stall_us" and ours[name] != theirs[name]:
                    print(f"context {context}, layer {i}: {name} {ours[name]}, recorded {theirs[name]}")
                    wrong += 1
    print(f"{result['total']['lookups']} lookups, {wrong} differences")
    raise SystemExit(wrong > 0)


#
# routing
#


def generate(args: argparse.Namespace) -> None:
    kinds: dict[str, Callable[[Path, int, int], None]] = {"mixtral": generate_mixtral, "fine": generate_fine}
    kinds[args.kind](args.out, args.sequences, args.length)


def choices(
    rng: np.random.Generator,
    sequences: int,
    length: int,
    n_expert: int,
    n_used: int,
    model_sd: float,
    sequence_sd: float,
    noise_sd: float,
    memory: float,
    sharp: float,
) -> tuple[np.ndarray, np.ndarray]:
    """One layer: experts and gate weights [sequences, length, n_used].

    A logit is what the model prefers, plus what the sequence does, plus noise that remembers the last token.
    """
    wanted = rng.normal(0, model_sd, n_expert) + rng.normal(0, sequence_sd, (sequences, n_expert))
    noise = rng.normal(0, 1, (sequences, n_expert))
    ids = np.empty((sequences, length, n_used), np.int64)
    weights = np.empty((sequences, length, n_used))
    for t in range(length):
        noise = memory * noise + np.sqrt(1 - memory**2) * rng.normal(0, 1, (sequences, n_expert))
        logits = wanted + noise_sd * noise
        ids[:, t] = np.argsort(-logits, axis=1)[:, :n_used]
        top = np.take_along_axis(logits, ids[:, t], axis=1)
        w = np.exp(sharp * (top - top[:, :1]))
        weights[:, t] = w / w.sum(axis=1, keepdims=True)
    return ids, weights


def write_choices(out: Path, layers: list[tuple[np.ndarray, np.ndarray]], n_expert: int, ratio: float) -> None:
    """`ratio`: bytes of a low expert over those of a high one."""
    high = 1 << 20
    low = int(ratio * high)
    sequences, length, n_used = layers[0][0].shape
    writer = TraceWriter(
        {
            "n_expert_used": n_used,
            "slots_low": [n_used, low],
            "slots_high": [n_used, high],
            "low_cost": ratio,
            "t2": 0.9,  # the paper's
            "deterministic": 1,
        },
        [Layer(i, n_expert, low, high) for i in range(len(layers))],
    )
    for s in range(sequences):
        writer.sequence()
        for t in range(length):
            writer.step([(ids[s, t][None], weights[s, t][None]) for ids, weights in layers])
    writer.save(out)


def repeats(ids: np.ndarray) -> tuple[float, float]:
    """Shares of tokens whose first expert is the last token's first; and that share any expert with the last token."""
    first = (ids[:, 1:, 0] == ids[:, :-1, 0]).mean()
    either = (ids[:, 1:, :, None] == ids[:, :-1, None, :]).any(axis=(2, 3)).mean()
    return float(first), float(either)


def generate_mixtral(out: Path, sequences: int, length: int) -> None:
    """32 layers, 8 experts, top-2. Published for layers 0, 15, 31: either expert repeated 47, 64, 49 % of the time."""
    targets = np.interp(np.arange(32), [0, 15, 31], [0.474, 0.643, 0.490])
    layers = []
    for layer, target in enumerate(targets):
        # independent choices repeat 46.4 %; the rest is a taste of the sequence, and noise that remembers
        taste = 0.3 * (target - 0.464) / (0.643 - 0.464)
        low, high = 0.0, 0.95
        for _ in range(10):
            memory = (low + high) / 2
            found = choices(np.random.default_rng(layer), sequences, length, 8, 2, taste / 3, taste, 1, memory, 1.4)
            low, high = (memory, high) if repeats(found[0])[1] < target else (low, memory)
        layers.append(found)
    write_choices(out, layers, 8, 0.28125)
    for layer in (0, 15, 31):
        first, either = repeats(layers[layer][0])
        print(f"layer {layer}: first expert repeated {100 * first:.1f} %, either {100 * either:.1f} %")
    report_mix(out)


def generate_fine(out: Path, sequences: int, length: int) -> None:
    """24 layers, 64 experts, top-8, fitted to Qwen3-30B-A3B at 13.4 % resident: LRU 65.9, LFU 60.1, static 59.2 %."""
    best: tuple[float, tuple[float, ...]] = (np.inf, ())
    for model_sd in (1.0, 1.2, 1.4, 1.6):
        for sequence_sd in (0.3, 0.5, 0.7):
            for memory in (0.4, 0.55, 0.7):
                rng = np.random.default_rng(5)
                layers = [choices(rng, 6, 96, 64, 8, model_sd, sequence_sd, 1, memory, 1.0) for _ in range(3)]
                write_choices(out, layers, 64, 0.28125)
                lru, lfu, static = fine_hits(out, layers)
                error = abs(lru - 0.659) + abs(lfu - 0.601) + abs(static - 0.592)
                if error < best[0]:
                    best = (error, (model_sd, sequence_sd, memory, lru, lfu, static))
    model_sd, sequence_sd, memory, *_ = best[1]
    rng = np.random.default_rng(6)
    layers = [choices(rng, sequences, length, 64, 8, model_sd, sequence_sd, 1, memory, 0.7) for _ in range(24)]
    write_choices(out, layers, 64, 0.28125)
    lru, lfu, static = fine_hits(out, layers)
    print(f"spread of the model's taste {model_sd}, the sequence's {sequence_sd}; noise 1, remembered {memory}")
    print(f"hits at 13.4 %: LRU {100 * lru:.1f}, LFU {100 * lfu:.1f}, static {100 * static:.1f} %")
    for size in (0.15, 0.25, 0.35, 0.45):
        with Replay(out) as replay:
            hits = replay.run(rule="high", policy="lru", slots_low=0, slots_high=int(size * 64 * 24))["total"]
        print(f"LRU hits at {100 * size:.0f} %: {100 * hits['hits'] / hits['lookups']:.1f} %")
    report_mix(out)


def fine_hits(out: Path, layers: list[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float, float]:
    slots = int(0.134 * 64 * len(layers))
    found = []
    with Replay(out) as replay:
        for policy in ("lru", "lfu-model"):
            total = replay.run(rule="high", policy=policy, slots_low=0, slots_high=slots)["total"]
            found.append(total["hits"] / total["lookups"])
    counts = np.concatenate([np.bincount(ids.ravel(), minlength=64) for ids, _ in layers])
    static = np.sort(counts)[-slots:].sum() / counts.sum()
    return found[0], found[1], float(static)


def report_mix(path: Path) -> None:
    asked = []
    with Replay(path) as replay:
        total = replay.run(deterministic=True)["total"]
    asked = [total[f"selected_{p}"] for p in ("high", "low", "skip")]
    print("at 0.6 and 0.9: {:.0f} % high, {:.0f} % low, {:.0f} % skipped".format(*(100 * np.array(asked) / sum(asked))))


#
# comparisons
#


def compare(args: argparse.Namespace) -> None:
    out: dict[str, Any] = {}
    for path in args.traces:
        trace = Trace.load(path)
        with Replay(path) as replay:
            out[path.stem] = compare_one(path.stem, trace, replay, args)
    if args.json:
        args.json.write_text(json.dumps(out, indent=1))
    if args.plot:
        plot_compare(out, args.plot)


def compare_one(name: str, trace: Trace, replay: Replay, args: argparse.Namespace) -> dict[str, Any]:
    base: dict[str, Any] = {"deterministic": False, "prefetch": 0}
    n_sequences = len(replay.run(**base)["sequences"])
    half = n_sequences // 2

    def run(size: float, **settings: Any) -> dict[str, Any]:
        return replay.run(**base, cache_bytes=int(size * all_bytes(trace)), **settings)

    fitted, _ = fit_weights(lambda w: float(penalties(run(0.3, policy="hobbit", weights=w))[:half].sum()))
    table: dict[str, dict[float, np.ndarray]] = {}
    hits: dict[str, dict[float, float]] = {}
    rows: list[tuple[str, dict[str, Any]]] = [(p, {"policy": p}) for p in POLICIES]
    rows += [("hobbit, fitted", {"policy": "hobbit", "weights": fitted}), ("belady", {"policy": "belady"})]
    for label, settings in rows:
        table[label], hits[label] = {}, {}
        for size in args.sizes:
            seeds = range(1, 6) if label == "random" else [1]
            results = [run(size, **settings, seed=seed) for seed in seeds]
            table[label][size] = np.mean([penalties(r)[half:] for r in results], axis=0)
            total = results[0]["total"]
            hits[label][size] = total["hits"] / max(total["lookups"] - total["skips"], 1)
    print(f"\n### {name}: {n_sequences - half} sequences; fitted weights {', '.join(map(str, fitted))}\n")
    if note := caveat(results[0]):
        print(f"{note}\n")
    print("| penalty relative to LRU, % | " + " | ".join(f"{100 * s:.0f} %" for s in args.sizes) + " |")
    print("|---" * (len(args.sizes) + 1) + "|")
    for label in table:
        cells = [interval(table[label][s], table["lru"][s]) if label != "lru" else "0" for s in args.sizes]
        print(f"| {label} | " + " | ".join(cells) + " |")
    mean = {label: np.sum([table[label][s] for s in args.sizes], axis=0) for label in table}
    print("\n| all sizes together, penalty relative to | Random | LRU | LFU | Belady | hits at 30 % |")
    print("|---|---|---|---|---|---|")
    for label in table:
        others = ("random", "lru", "lfu", "belady")
        cells = [interval(mean[label], mean[o]) if label != o else "0" for o in others]
        hit = hits[label].get(0.3)
        print(
            f"| {label} | " + " | ".join(cells) + f" | {100 * hit:.1f} % |" if hit is not None else " | |", flush=True
        )
    return {
        "fitted": fitted,
        "penalty": {label: {str(s): v.tolist() for s, v in by_size.items()} for label, by_size in table.items()},
        "hits": {label: {str(s): v for s, v in by_size.items()} for label, by_size in hits.items()},
    }


def interval(ours: np.ndarray, theirs: np.ndarray) -> str:
    r, low, high = ratio_interval(ours, theirs)
    return f"{100 * (r - 1):+.1f} [{100 * (low - 1):+.1f}, {100 * (high - 1):+.1f}]"


def style(label: str) -> dict[str, Any]:
    """Lines of one policy: references black, the paper's policies thick."""
    if label in ("random", "lru", "belady"):
        return {"color": "black", "ls": {"random": ":", "lru": "-", "belady": "--"}[label], "lw": 1}
    thick = {"hobbit": "#1f4e8c", "hobbit, fitted": "#6fa8dc", "lcu": "#c2542d", "lfu": "#2e8b57"}
    thin = ["#b0b0b0", "#d9a441", "#8e63ce", "#e377c2", "#17becf", "#bcbd22", "#7f7f7f", "#8c564b"]
    return {"color": thick[label], "lw": 2} if label in thick else {"color": thin[POLICIES.index(label) % 8], "lw": 1}


def plot_compare(data: dict[str, Any], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(data), figsize=(5 * len(data), 4.2), layout="constrained", squeeze=False)
    for axis, (name, routing) in zip(axes[0], data.items(), strict=True):
        lru = {s: sum(v) for s, v in routing["penalty"]["lru"].items()}
        for label, by_size in routing["penalty"].items():
            x = [100 * float(s) for s in by_size]
            y = [100 * (sum(v) / max(lru[s], 1e-9) - 1) for s, v in by_size.items()]
            axis.plot(x, y, marker="o", ms=3, label=label, **style(label))
        axis.set(
            title=name, xlabel="cache, % of the experts' bytes", ylabel="penalty relative to LRU, %", ylim=(-60, 30)
        )
        axis.grid(alpha=0.3)
    axes[0][-1].legend(fontsize=7, bbox_to_anchor=(1.0, 1.0), loc="upper left")
    figure.savefig(out, dpi=110)


def sweep(args: argparse.Namespace) -> None:
    trace = Trace.load(args.trace)
    shares = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
    with Replay(args.trace) as replay:
        print("| penalty by low share | " + " | ".join(map(str, shares)) + " |")
        print("|---" * (len(shares) + 1) + "|")
        for size in SIZES:
            costs = []
            for share in shares:
                settings = {"cache_bytes": int(size * all_bytes(trace)), "low_share": share, "policy": args.policy}
                result = replay.run(deterministic=args.deterministic, prefetch=0, **settings)
                costs.append(result["penalty"])
            least = min(costs)
            print(
                f"| {100 * size:.0f} % | "
                + " | ".join(f"{c:.0f} ({100 * (c / least - 1):+.1f} %)" for c in costs)
                + " |"
            )
        print("\n| T1, T2 at 30 % | high | low | skipped | hits | penalty | MiB read |")
        print("|---|---|---|---|---|---|---|")
        for t1, t2 in ((0.4, 0.9), (0.6, 0.9), (0.6, 1.0), (0.8, 0.95), (0.8, 1.0), (1.0, 1.0)):
            settings = {"cache_bytes": int(0.3 * all_bytes(trace)), "t1": t1, "t2": t2, "policy": args.policy}
            result = replay.run(deterministic=args.deterministic, prefetch=0, **settings)
            total = result["total"]
            n = sum(total[f"selected_{p}"] for p in ("high", "low", "skip"))
            mix = " | ".join(f"{100 * total[f'selected_{p}'] / n:.1f} %" for p in ("high", "low", "skip"))
            read = (total["read_bytes_high"] + total["read_bytes_low"]) / 2**20
            hit = 100 * total["hits"] / (total["lookups"] - total["skips"])
            print(f"| {t1}, {t2} | {mix} | {hit:.1f} % | {result['penalty']:.0f} | {read:.0f} |")
        print(f"\n{caveat(result)}")


def split(args: argparse.Namespace) -> None:
    """The best fixed share of low copies against the default, and against the best share of each window of the text.

    The latter is a bound from below on what a moving border costs: each window counts as if its share had held all
    along and moving the border cost nothing.
    """
    shares = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
    print("| | precision | " + " | ".join(f"{100 * s:.0f} %" for s in SIZES) + " |")
    print("|---" * (len(SIZES) + 2) + "|")
    notes = set()
    for path in args.traces:
        trace = Trace.load(path)
        with Replay(path) as replay:
            for label, settings in (
                ("T2 0.9", {"t2": 0.9}),
                ("T2 0.9, deterministic", {"t2": 0.9, "deterministic": True}),
                ("T2 1", {"t2": 1.0}),
                ("T2 1, deterministic", {"t2": 1.0, "deterministic": True}),
            ):
                cells = []
                for size in SIZES:
                    base = {
                        "deterministic": False,
                        "prefetch": 0,
                        "cache_bytes": int(size * all_bytes(trace)),
                        **settings,
                    }
                    results = [replay.run(**base, low_share=share) for share in shares]
                    notes |= {caveat(r) for r in results}
                    by_sequence = np.array([penalties(r) for r in results])  # [share, sequence]
                    per_window = max(1, args.window // args.length)
                    starts = np.arange(0, by_sequence.shape[1], per_window)
                    windows = np.add.reduceat(by_sequence, starts, axis=1)
                    totals = windows.sum(axis=1)
                    best = int(totals.argmin())
                    default = totals[shares.index(0.2)] / totals[best] - 1
                    moving = windows.min(axis=0).sum() / totals[best] - 1
                    cells.append(f"{shares[best]:g}: {100 * default:+.1f}, {100 * moving:+.1f}")
                print(f"| {path.stem} | {label} | " + " | ".join(cells) + " |", flush=True)
    print(
        "\nbest fixed share: penalty of the default 0.2, and of the best share of each window, relative to that, in %"
    )
    print(f"windows of {args.window} tokens; {'; '.join(sorted(n for n in notes if n))}")


def timing(args: argparse.Namespace) -> None:
    trace = Trace.load(args.trace)
    print(
        f"seconds at 30 %, {args.compute_us:g} us a layer, {args.latency_us:g} us a read; stalled share in brackets\n"
    )
    print("| MB/s | reads | " + " | ".join(f"depth {d}" for d in range(4)) + " |")
    print("|---" * 6 + "|")
    with Replay(args.trace) as replay:
        for bandwidth in args.bandwidth:
            for interruptible in (False, True):
                cells = []
                for depth in range(4):
                    result = replay.run(
                        deterministic=False,
                        prefetch=depth,
                        adaptive=False,
                        policy=args.policy,
                        cache_bytes=int(0.3 * all_bytes(trace)),
                        bandwidth=bandwidth,
                        latency_us=args.latency_us,
                        compute_us=args.compute_us,
                        block_bytes=args.block_bytes,
                        interruptible=interruptible,
                    )
                    cells.append(
                        f"{result['time_us'] / 1e6:.3f} ({100 * result['stall_us'] / result['time_us']:.0f} %)"
                    )
                print(
                    f"| {bandwidth:g} | {'interruptible' if interruptible else 'whole'} | " + " | ".join(cells) + " |"
                )
    print(f"\n{caveat(result)}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    def command(name: str, function: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
        sub = commands.add_parser(name)
        sub.set_defaults(function=function)
        return sub

    command("verify", verify).add_argument("trace", type=Path)
    sub = command(
        "record",
        lambda a: print(
            record(MODEL, TEXT, a.out, sequences=a.sequences, length=a.length, threads=2, low=LOW, cache="64MiB").sizing
        ),
    )
    sub.add_argument("out", type=Path)
    sub.add_argument("--sequences", type=int, default=40)
    sub.add_argument("--length", type=int, default=128)
    sub = command("generate", generate)
    sub.add_argument("kind", choices=("mixtral", "fine"))
    sub.add_argument("out", type=Path)
    sub.add_argument("--sequences", type=int, default=40)
    sub.add_argument("--length", type=int, default=128)
    sub = command("compare", compare)
    sub.add_argument("traces", type=Path, nargs="+")
    sub.add_argument("--sizes", type=float, nargs="+", default=list(SIZES))
    sub.add_argument("--json", type=Path)
    sub.add_argument("--plot", type=Path)
    sub = command("sweep", sweep)
    sub.add_argument("trace", type=Path)
    sub.add_argument("--policy", default="hobbit")
    sub.add_argument("--deterministic", action="store_true")
    sub = command("split", split)
    sub.add_argument("traces", type=Path, nargs="+")
    sub.add_argument("--window", type=int, default=512, help="tokens")
    sub.add_argument("--length", type=int, default=128, help="tokens of a sequence of the trace")
    sub = command("timing", timing)
    sub.add_argument("trace", type=Path)
    sub.add_argument("--policy", default="hobbit")
    sub.add_argument("--bandwidth", type=float, nargs="+", default=[500, 1000, 3000, 16000])
    sub.add_argument("--latency-us", type=float, default=20)
    sub.add_argument("--compute-us", type=float, default=200)
    sub.add_argument("--block-bytes", type=int, default=1 << 20)
    args = parser.parse_args(arguments)
    args.function(args)


if __name__ == "__main__":
    main()
