"""`hobbit calibrate`: thresholds, policy, weights, split and prefetch depth for one model, from a text.

The model reads the text once, one token per step, and writes a trace; everything after that is replay on the engine's
own cache (`hobbit_py.replay`). T1 and T2 are quantiles of the unimportance score, as HOBBIT took them (67 % high, 97
% not skipped), or those that move the fewest bytes within a perplexity budget (`hobbit_py.quality`). Policy, weights
of Eq. 3 and the share of low copies minimise the miss penalty on the first part of the text; the rest says whether
that helps. The prefetch depth minimises the time that the simulator's model of one link gives. What was chosen goes
to a profile as lines `set NAME VALUE`, which --hobbit-profile applies where no option says otherwise.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hobbit_py import quality
from hobbit_py.hobbit import Hobbit
from hobbit_py.replay import POLICIES, Replay, caveat
from hobbit_py.stats import Placement
from hobbit_py.trace import Trace

Weights = tuple[float, float, float, float]
Floats = npt.NDArray[np.float64]

DEFAULT_WEIGHTS: Weights = (0.25, 0.25, 0.25, 0.25)
_VALUES = (0.0, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
_SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)


def windows(tokens: Sequence[int], n: int, length: int) -> list[list[int]]:
    """`n` pieces of `length` tokens, spread evenly over the text.

    Raises:
        ValueError: the text is too short.
    """
    if len(tokens) < n * length:
        raise ValueError(f"the text has {len(tokens)} tokens; {n} sequences of {length} need {n * length}")
    stride = (len(tokens) - length) / max(n - 1, 1)
    return [list(tokens[int(i * stride) : int(i * stride) + length]) for i in range(n)]


def record(
    model: str | os.PathLike[str],
    text: str | os.PathLike[str],
    trace: str | os.PathLike[str],
    *,
    sequences: int,
    length: int,
    threads: int | None = None,
    **options: Any,
) -> Placement:
    """Writes a trace of the model reading a text: sequences of `length` tokens, one token per ubatch, all rows routed.

    Precision is deterministic, so that the choices do not depend on the cache, and three layers are predicted.
    """
    with Hobbit(
        model,
        trace=os.fspath(trace),
        deterministic=True,
        prefetch=3,
        n_ctx=length,
        n_batch=length,
        n_ubatch=1,
        n_threads=threads,
        n_threads_batch=threads,
        logits_all=True,  # else the last layer sees the last token only
        verbose=False,
        **options,
    ) as llm:
        for piece in windows(llm.tokenize(Path(text).read_bytes(), add_bos=False), sequences, length):
            llm.reset()  # type: ignore[no-untyped-call]
            llm.eval(piece)
        return llm.placement


def unimportance(trace: Trace) -> Floats:
    """The score of every selection: the normalised gate weight that ranks before it in its row."""
    scores = []
    for route in trace.routes():
        w = -np.sort(-route.weights.astype(np.float64), axis=1)
        w /= w.sum(axis=1, keepdims=True)
        scores.append((np.cumsum(w, axis=1) - w).ravel())
    return np.concatenate(scores)


def quantiles(trace: Trace) -> tuple[float, float]:
    """T1 and T2 as HOBBIT took them: 67 % of the selections are high, 97 % not skipped."""
    t1, t2 = np.quantile(unimportance(trace), [0.67, 0.97])
    return float(t1), float(t2)


def penalties(result: dict[str, Any]) -> Floats:
    """Penalty of each sequence of a replay, in misses of a high copy."""
    return np.array([s["penalty"] for s in result["sequences"]])


def ratio_interval(ours: Floats, theirs: Floats, draws: int = 2000) -> tuple[float, float, float]:
    """Sum of ours over sum of theirs, and its 95 % interval by resampling sequences, paired."""
    rng = np.random.default_rng(1)
    at = rng.integers(0, len(ours), (draws, len(ours)))
    ratios = ours[at].sum(axis=1) / np.maximum(theirs[at].sum(axis=1), 1e-9)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(ours.sum() / max(theirs.sum(), 1e-9)), float(low), float(high)


def fit_weights(cost: Callable[[Weights], float]) -> tuple[Weights, float]:
    """Weights of Eq. 3 with the least cost, by descent along one weight at a time from three places."""
    seen: dict[Weights, float] = {}

    def known(w: Sequence[float]) -> float:
        total = sum(w)
        key: Weights = tuple(round(x / total, 4) for x in w)  # type: ignore[assignment]
        if key not in seen:
            seen[key] = cost(key)
        return seen[key]

    for start in (DEFAULT_WEIGHTS, (1.0, 0.25, 0.0, 0.0), (0.1, 1.0, 0.0, 0.02)):
        best = list(start)
        for _ in range(2):
            before = list(best)
            for i in range(4):
                tries = [[*best[:i], v, *best[i + 1 :]] for v in _VALUES]
                best = min((t for t in tries if sum(t) > 0), key=known)
            if best == before:
                break
    found = min(seen, key=lambda w: seen[w])
    return found, seen[found]


@dataclass
class Calibration:
    """What was chosen, and what it brings."""

    settings: dict[str, str] = field(default_factory=dict)  # engine options by name
    lines: list[str] = field(default_factory=list)  # for people


def calibrate(
    model: str | os.PathLike[str],
    text: str | os.PathLike[str],
    profile: str | os.PathLike[str],
    *,
    low: str | os.PathLike[str] | None = None,
    cache: str = "auto",
    sequences: int = 40,
    length: int = 128,
    bandwidth: float = 1000.0,
    perplexity_budget: float | None = None,
    threads: int | None = None,
) -> Calibration:
    """Chooses settings for a model on a text and writes them to a profile.

    Args:
        cache: size that the settings are for.
        sequences: pieces of the text; the first half calibrates, the second half judges.
        length: tokens of each.
        bandwidth: of the disk or link, MB/s (bytes per microsecond), for the prefetch depth.
        perplexity_budget: rise of the text's perplexity, in percent, up to which T1 and T2 save bytes; None: quantiles.

    Raises:
        ValueError: the model or the text will not do.
        OSError: a file cannot be read or written.
    """
    if perplexity_budget is not None and (low is None or not 0 <= perplexity_budget <= 1000):
        raise ValueError("a perplexity budget is percent from 0 to 1000, and needs a low-precision file: --low FILE")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.trace"
        placement = record(model, text, file, sequences=sequences, length=length, threads=threads, low=low, cache=cache)
        trace = Trace.load(file)
        thresholds = None
        if perplexity_budget is not None and low is not None:
            t1, t2 = quantiles(trace)
            names = [f"model+file@{t}" for t in ("paper", "noskip", *quality.CALIBRATION, f"{t1:.3f}/{t2:.3f}")]
            run = quality.Measurement(
                Path(model),
                Path(text),
                Path(folder) / "quality",
                low=Path(low),
                context=256,
                chunks=max(2, sequences * length // 256),
                caches=(),
                threads=threads or 0,
            )
            measured = run.results([quality.parse_setting(name) for name in names])
            thresholds = within_budget(list(measured), perplexity_budget)
        with Replay(file) as replay:
            result = _choose(replay, trace, sequences // 2, bandwidth, thresholds)
    _write_profile(profile, placement, trace, result.settings)
    result.lines.append(f"written to {os.fspath(profile)}")
    return result


@dataclass(frozen=True)
class Thresholds:
    """T1 and T2, and how they were found."""

    t1: float
    t2: float
    why: str


def within_budget(results: Sequence[quality.Measured], budget: float) -> Thresholds:
    """Of the measured thresholds, those that move the fewest bytes while perplexity plus a standard error stays within.

    Exact (1, 1) where none is within the budget, in percent.
    """
    within = [r for r in results if r.decode.ppl_percent + r.decode.ppl_percent_se <= budget]
    said = f"perplexity budget {budget:g} %, {len(results)} pairs of thresholds measured"
    if not within:
        return Thresholds(1.0, 1.0, f"{said}, none within it: everything in high precision")
    best = min(within, key=lambda r: r.bytes_per_token)
    d = best.decode
    rise = f"{d.ppl_percent:+.3f} % (standard error {d.ppl_percent_se:.3f})"
    return Thresholds(best.setting.t1, best.setting.t2, f"{said}: the fewest bytes within it cost {rise}")


def _choose(
    replay: Replay, trace: Trace, half: int, bandwidth: float, thresholds: Thresholds | None = None
) -> Calibration:
    result = Calibration()
    say = result.lines.append
    two = trace.settings["slots_low"][0] > 0 and trace.settings["slots_high"][0] > 0

    base: dict[str, Any] = {"deterministic": False, "prefetch": 0}
    n_bytes = sum(trace.settings[f"slots_{p}"][0] * trace.settings[f"slots_{p}"][1] for p in ("low", "high"))
    if two:
        base["cache_bytes"] = n_bytes
        if thresholds is None:
            t1, t2 = quantiles(trace)
        else:
            t1, t2 = thresholds.t1, thresholds.t2
            say(thresholds.why)
        before = _mix(replay.run(**{**base, "deterministic": True}))
        base |= {"t1": f"{t1:.3f}", "t2": f"{max(t1, t2):.3f}"}
        mix = _mix(replay.run(**{**base, "deterministic": True}))
        recorded = " and ".join(f"{trace.settings[name]:g}" for name in ("t1", "t2"))
        say(f"T1 {base['t1']}, T2 {base['t2']}: {mix}; with {recorded}: {before}")
        result.settings |= {"t1": base["t1"], "t2": base["t2"]}

    def train(**settings: Any) -> float:
        return float(penalties(replay.run(**{**base, **settings}))[:half].sum())

    # the split first: what it gives, every policy gets
    shares = {share: train(low_share=share) for share in _SHARES} if two else {}
    defaults = dict(base)
    if shares:
        share = min(shares, key=lambda s: shares[s])
        base["low_share"] = share
        say(f"low share {share}: penalty {shares[share]:.0f}; with 0.2: {shares[0.2]:.0f}")
        result.settings["low-share"] = str(share)
    weights, cost = fit_weights(lambda w: train(policy="hobbit", weights=w))
    costs = {name: train(policy=name) for name in POLICIES if name != "hobbit"} | {"hobbit": cost}
    policy = min(costs, key=lambda p: costs[p])
    say(
        "penalty on the calibrating half: "
        + ", ".join(f"{p} {c:.0f}" for p, c in sorted(costs.items(), key=lambda x: x[1]))
    )
    chosen: dict[str, Any] = {"policy": policy}
    result.settings["policy"] = policy
    if policy == "hobbit":
        chosen["weights"] = weights
        result.settings["weights"] = ",".join(map(str, weights))
        say(f"weights {result.settings['weights']} (recency, frequency, high-precision frequency, layer distance)")

    last = replay.run(**{**base, **chosen})
    ours = penalties(last)[half:]
    theirs = penalties(replay.run(**defaults))[half:]
    r, least, most = ratio_interval(ours, theirs)
    gain = f"{100 * (r - 1):+.1f} % [{100 * (least - 1):+.1f}, {100 * (most - 1):+.1f}] of the defaults' penalty"
    if most < 1:
        say(f"held-out half: {gain}, at the same thresholds")
    else:
        say(f"held-out half: {gain}: no gain; policy and split stay at the defaults")
        for name in ("policy", "weights", "low-share"):
            result.settings.pop(name, None)
        base, chosen = defaults, {}

    if any(True for _ in trace.predictions()):
        timing = {"bandwidth": bandwidth, "latency_us": 50, "compute_us": _compute_us(trace)}
        times = {d: replay.run(**{**base, **chosen, **timing, "prefetch": d})["time_us"] for d in range(4)}
        depth = min(times, key=lambda d: times[d])
        say(
            f"prefetch depth {depth}: "
            + ", ".join(f"{d}: {t / 1e6:.2f} s" for d, t in times.items())
            + f" at {bandwidth:g} MB/s"
        )
        result.settings["prefetch"] = str(depth)
    if note := caveat(last):
        say(note)
    return result


def _mix(result: dict[str, Any]) -> str:
    """Shares of the selections; those that the rule asks for, if the replay was deterministic."""
    total = result["total"]
    n = sum(total[f"selected_{p}"] for p in ("high", "low", "skip"))
    return ", ".join(f"{100 * total[f'selected_{p}'] / n:.0f} % {p}" for p in ("high", "low", "skip"))


def _compute_us(trace: Trace) -> float:
    """Time of a layer between two route events of a step, median: what was resident computes in it."""
    routes = trace.heads[trace.heads["type"] == 2]
    gaps = np.diff(routes["t_us"].astype(np.int64))[np.diff(routes["layer"].astype(int)) == 1]
    return float(np.median(gaps)) if len(gaps) else 0.0


def _write_profile(path: str | os.PathLike[str], placement: Placement, trace: Trace, settings: dict[str, str]) -> None:
    """The head names the model as the engine does: architecture, sizes, and the files' bytes (low, high)."""
    size = {pool.precision: Path(pool.file).stat().st_size for pool in placement.pools}
    head = f"hobbit-profile 1 {trace.settings['arch']} {trace.settings['n_layer']} {trace.settings['n_expert']}"
    lines = [f"{head} {size.get('low', 0)} {size.get('high', 0)}"]
    lines += [f"set {name} {value}" for name, value in settings.items()]
    if Path(path).exists():
        first, *rest = Path(path).read_text().splitlines() or [""]
        if first != lines[0]:
            raise ValueError(f"{os.fspath(path)}: of another model or other files: '{first}', not '{lines[0]}'")
        # experts of the last run, and measurements of quality, stay
        lines += [line for line in rest if not line.startswith("set ")]
    Path(path).write_text("\n".join(lines) + "\n")
