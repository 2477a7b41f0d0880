"""`plan`: where the experts of a model would live, what a token costs, and whether a cache is worth having.

The estimate is deliberately small: bytes over bandwidths. Every number that goes in is an option or printed as an
assumption.

    time per token = bytes read by computing / bandwidth of that memory + bytes missed / bandwidth of the tier below

* Computing reads VRAM when there is some, else RAM. What a cache of some size misses comes from the statistics of real
  runs (interpolated between their sizes), else from a trace (replayed through an LRU of the same number of bytes), else
  from `hit_rate`: a published curve for a fine-grained model, weakened for models with few experts.
* A miss stops the layer that needs it, so times add up; what prefetching may hide is the other end of the range.
* The cache's bytes are divided between high and low copies so that the expected bytes missed are least.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import statistics
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gguf_tools.errors import ExitCode, ToolError
from gguf_tools.inspect import Inspection, inspect
from gguf_tools.model import open_model
from gguf_tools.pairfile import kind_of
from gguf_tools.units import format_size

# Share of lookups that an LRU answers when it holds this share of the experts: Qwen3-30B-A3B (128 experts, top-8).
_CURVE_SHARE = (0.0, 0.15, 0.25, 0.35, 0.40, 0.45, 1.0)
_CURVE_HITS = (0.0, 0.60, 0.742, 0.845, 0.864, 0.885, 1.0)

# The high share of HOBBIT's selections on Mixtral-8x7B at T1 0.6; the engine skips none by default: high, low, skipped.
PAIR_MIX = (0.67, 0.33, 0.0)


@dataclass(frozen=True)
class Machine:
    """Sizes in bytes, rates in bytes per second. `vram` 0: the CPU computes."""

    vram: int
    ram: int
    link: float = 25e9
    disk: float = 3e9
    ram_rate: float = 30e9
    vram_rate: float = 500e9
    reserve: int = 512 << 20  # of each memory: compute buffers, the rest of the system
    measured: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tier:
    """Experts held in one memory, by precision."""

    name: str
    bytes: int
    high: int
    low: int


@dataclass
class Plan:
    """The estimate; times in seconds per token."""

    kind: str
    architecture: str
    total_experts: int
    base_bytes: int
    kv_bytes: int
    expert_bytes: dict[str, int]
    mix: tuple[float, float, float]
    tiers: list[Tier] = field(default_factory=list)
    hit_rate: float = 0.0  # of lookups, in compute memory
    bytes_compute: float = 0.0  # read from compute memory per token
    bytes_link: float = 0.0  # brought over the link per token
    bytes_disk: float = 0.0  # read from disk per token
    tokens_per_s: float = 0.0
    tokens_per_s_overlapped: float = 0.0
    alternatives: dict[str, float] = field(default_factory=dict)  # tokens/s without the cache
    recommendation: str = ""
    use_cache: bool = False
    assumptions: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def hit_rate(share: float, n_expert: int) -> float:
    """Expected LRU hit rate when `share` of the experts are resident.

    Between uniform routing (the hit rate is the share) and the curve of a 128-expert model; how far towards the curve
    follows from the number of experts: 0.2 for 8 (Mixtral's repeats at the next token), 1 from 128 on.
    """
    share = min(max(share, 0.0), 1.0)
    local = float(np.interp(share, _CURVE_SHARE, _CURVE_HITS))
    weight = min(1.0, max(0.2, 0.2 + 0.2 * math.log2(max(n_expert, 1) / 8)))
    return share + weight * (max(local, share) - share)


def parse_mix(text: str) -> tuple[float, float, float]:
    """'0.67,0.3,0.03': shares of high, low and skipped selections, scaled to sum to 1."""
    try:
        parts = [float(x) for x in text.split(",")]
    except ValueError:
        parts = []
    if len(parts) != 3 or not all(0 <= x < 1e9 for x in parts) or parts[0] + parts[1] <= 0:
        raise ToolError(f"--mix: '{text}' is not three shares such as 0.67,0.3,0.03", code=ExitCode.USAGE)
    total = sum(parts)
    return parts[0] / total, parts[1] / total, parts[2] / total


# ---------------------------------------------------------------------------------------------------------------- trace


@dataclass(frozen=True)
class Trace:
    """Selections in order: per (token, layer) the expert ids and, where known, their normalised gate weights."""

    events: list[tuple[int, tuple[int, ...], tuple[float, ...]]]

    @property
    def mix(self) -> tuple[float, float, float]:
        """Shares of high, low and skipped selections by the engine's default rule."""
        counts = [0, 0, 0]
        for _, ids, weights in self.events:
            for p in precisions(ids, weights):
                counts[p] += 1
        total = max(1, sum(counts))
        return counts[0] / total, counts[1] / total, counts[2] / total


def precisions(ids: Sequence[int], weights: Sequence[float]) -> list[int]:
    """0 high, 1 low for each expert of one token, by cumulative gate weight against T1 0.6; none is skipped."""
    if len(weights) != len(ids):
        return [0] * len(ids)
    result = [0] * len(ids)
    total, score = sum(weights) or 1.0, 0.0
    for i in sorted(range(len(ids)), key=lambda i: -weights[i]):
        result[i] = 0 if score <= 0.6 else 1
        score += weights[i] / total
    return result


def read_trace(path: Path) -> Trace:
    """Read JSON lines, {"layer": 3, "ids": [5, 1], "weights": [0.7, 0.3]}; weights may be absent."""
    events: list[tuple[int, tuple[int, ...], tuple[float, ...]]] = []
    try:
        with open(path, encoding="utf-8") as f:
            for number, line in enumerate(f, 1):
                if not line.strip():
                    continue
                try:
                    entry = json.loads(line)
                    weights = tuple(float(w) for w in entry.get("weights", ()))
                    events.append((int(entry["layer"]), tuple(int(i) for i in entry["ids"]), weights))
                except (ValueError, KeyError, TypeError, AttributeError):
                    raise ToolError(f"line {number} is not a selection", file=path) from None
    except OSError as error:
        raise ToolError(f"cannot read: {error.strerror}", file=path, code=ExitCode.IO) from None
    except UnicodeDecodeError:
        raise ToolError("is not a text of JSON lines", file=path) from None
    if not events:
        raise ToolError("holds no selection", file=path)
    return Trace(events)


def replay(trace: Trace, budget: int, high: int, low: int) -> tuple[float, float, float, int]:
    """An LRU of `budget` bytes over whole experts; (hit rate, high misses, low misses, lookups), misses per lookup.

    The first quarter fills the cache and is not counted. A resident high copy also answers a request for the low one.
    """
    cache: OrderedDict[tuple[int, int, int], int] = OrderedDict()
    used = hits = lookups = 0
    misses = [0, 0]
    size = (high, low or high)
    warm = len(trace.events) // 4
    for n, (layer, ids, weights) in enumerate(trace.events):
        wanted = precisions(ids, weights) if low else [0] * len(ids)
        for expert, precision in zip(ids, wanted, strict=True):
            if precision == 2:
                continue
            key = (layer, expert, 0) if (layer, expert, 0) in cache else (layer, expert, precision)
            hit = key in cache
            if n >= warm:
                lookups += 1
                hits += hit
                misses[precision] += not hit
            if hit:
                cache.move_to_end(key)
                continue
            cache[key] = size[precision]
            used += size[precision]
            while used > budget and cache:
                used -= cache.popitem(last=False)[1]
    n = max(1, lookups)
    return hits / n, misses[0] / n, misses[1] / n, lookups


# ----------------------------------------------------------------------------------------------------------- statistics


@dataclass(frozen=True)
class Observed:
    """One run of the engine, from its `--hobbit-stats` file. Bytes and seconds are per token."""

    cache: int
    hits: float
    high_missed: float
    low_missed: float
    computing: float
    rate: float  # bytes read per second of stall; 0 when nothing stalled
    mix: tuple[float, float, float]


def read_stats(path: Path, high: float, low: float) -> Observed:
    """Read a statistics file, without the first filling of the cache; `high`, `low`: bytes of one expert."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        total = {key: float(number) for key, number in value["total"].items()}
        tokens = float(value["decode_tokens"]) + float(value["prompt_tokens"])
        seconds = (float(value["decode_us"]) + float(value["prompt_us"])) / 1e6
        selected = [total[f"selected_{p}"] for p in ("high", "low", "skip")]
        stall = total["stall_us"] / 1e6
        read = total["read_bytes_high"] + total["read_bytes_low"]
        high_read = max(0.0, total["read_bytes_high"] - float(value["resident_high"]) * high)
        low_read = max(0.0, total["read_bytes_low"] - float(value["resident_low"]) * low)
        cache, hits, lookups = int(value["cache_bytes"]), total["hits"], total["lookups"]
    except OSError as error:
        raise ToolError(f"cannot read: {error.strerror}", file=path, code=ExitCode.IO) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ToolError("is not a statistics file of --hobbit-stats", file=path) from None
    numbers = (tokens, seconds, stall, read, cache, hits, lookups, *selected)
    if not all(math.isfinite(n) and n >= 0 for n in numbers) or tokens < 1 or lookups < 1 or sum(selected) < 1:
        raise ToolError("holds no complete run", file=path)
    return Observed(
        cache=cache,
        hits=min(1.0, hits / lookups),
        high_missed=high_read / tokens,
        low_missed=low_read / tokens,
        computing=max(seconds - stall, 0.0) / tokens,
        rate=read / stall if stall > 0 else 0.0,
        mix=(selected[0] / sum(selected), selected[1] / sum(selected), selected[2] / sum(selected)),
    )


def _by_cache(runs: Sequence[Observed]) -> list[Observed]:
    """One observation for each cache size, ascending: the medians of its runs."""
    groups: dict[int, list[Observed]] = {}
    for o in runs:
        groups.setdefault(o.cache, []).append(o)
    median = statistics.median
    return [
        Observed(
            cache=cache,
            hits=median(o.hits for o in group),
            high_missed=median(o.high_missed for o in group),
            low_missed=median(o.low_missed for o in group),
            computing=median(o.computing for o in group),
            rate=median(o.rate for o in group),
            mix=group[0].mix,
        )
        for cache, group in sorted(groups.items())
    ]


# ------------------------------------------------------------------------------------------------------------ measuring


def measure_disk(path: Path, piece: int, threads: int = 4, budget_bytes: int = 512 << 20) -> float:
    """Random reads of `piece` bytes past the page cache, as the engine reads experts; bytes per second."""
    piece = max(4096, min(16 << 20, -(-piece // 4096) * 4096))
    size = os.path.getsize(path) // 4096 * 4096
    if size <= piece:
        raise ToolError(f"is too small to measure reads of {piece} bytes", file=path, code=ExitCode.UNSUPPORTED)
    rng = np.random.default_rng()
    count = max(threads, min(budget_bytes // piece, 4096))
    offsets = (rng.integers(0, (size - piece) // 4096 + 1, count) * 4096).tolist()
    flags = os.O_RDONLY | getattr(os, "O_DIRECT", 0)
    try:
        fd = os.open(path, flags)
    except OSError:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    local = threading.local()

    def read(offset: int) -> int:
        if not hasattr(local, "buffer"):
            local.buffer = mmap.mmap(-1, piece)  # page-aligned, as direct reads need it
        return os.preadv(fd, [local.buffer], offset)

    try:
        with ThreadPoolExecutor(threads) as pool:
            started = time.perf_counter()
            done = sum(pool.map(read, offsets))
            seconds = time.perf_counter() - started
    except OSError as error:
        raise ToolError(f"cannot measure reads: {error.strerror}", file=path, code=ExitCode.IO) from None
    finally:
        os.close(fd)
    return done / seconds


def measure_ram(threads: int, size: int = 256 << 20) -> float:
    """All threads reading their own part of a buffer larger than the caches; bytes per second, best of five."""
    data = np.ones(size // 4, np.float32)
    parts = np.array_split(data, threads)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(5):
            started = time.perf_counter()
            list(pool.map(np.add.reduce, parts))
            best = max(best, data.nbytes / (time.perf_counter() - started))
    return best


# ------------------------------------------------------------------------------------------------------------- planning


@dataclass(frozen=True)
class _Sizes:
    """Mean bytes of one expert and demand per token."""

    high: float
    low: float  # 0 without a low copy
    selections: float  # per token, all layers
    n_expert: int
    total: int
    mix: tuple[float, float, float]
    largest: int  # one layer's selections in high precision: the least a cache must hold

    @property
    def demand(self) -> float:
        """Expert bytes that one token uses."""
        return self.selections * (self.mix[0] * self.high + self.mix[1] * self.low)


def make_plan(
    path: Path,
    machine: Machine,
    *,
    trace: Path | None = None,
    stats: Sequence[Path] = (),
    context: int = 4096,
    mix: tuple[float, float, float] | None = None,
    resident_speed: float | None = None,
) -> Plan:
    """Estimate for one machine.

    `resident_speed`, tokens/s measured with everything in memory, replaces the guess from bandwidth; so do `stats`, of
    runs of the same model with other cache sizes, which also tell what is missed and how fast it comes (unless the
    machine's disk was measured).
    """
    info = inspect(path)
    if not info.layers:
        raise ToolError("is a dense model: it has no experts to place", file=path, code=ExitCode.UNSUPPORTED)
    if info.kind == "experts":
        raise ToolError("is an expert file; give the base file or the model", file=path, code=ExitCode.USAGE)
    if not info.n_used:
        raise ToolError(
            "does not state how many experts a token uses (expert_used_count)", file=path, code=ExitCode.UNSUPPORTED
        )
    events = read_trace(trace) if trace else None
    paired = len(info.labels) > 1
    one = [info.expert_bytes(label) / info.total_experts for label in info.labels[:2]]
    runs = _by_cache([read_stats(f, one[0], one[1] if paired else 0.0) for f in stats])
    if mix is None:
        known = runs[len(runs) // 2].mix if runs else events.mix if events else PAIR_MIX
        mix = known if paired else (1.0, 0.0, 0.0)
    if runs and resident_speed is None:
        resident_speed = 1 / max(1e-9, statistics.median(o.computing for o in runs))
    if rates := [o.rate for o in runs if o.rate]:
        if "disk" not in machine.measured and not machine.vram:
            machine = replace(machine, disk=statistics.median(rates), measured=(*machine.measured, "disk"))
    sizes = _sizes(info, mix, paired)
    base, embedding, kv = _resident(path, info, context)
    plan = Plan(
        kind=info.kind,
        architecture=info.architecture,
        total_experts=info.total_experts,
        base_bytes=base,
        kv_bytes=kv,
        expert_bytes={label: info.expert_bytes(label) for label in info.labels},
        mix=mix,
    )
    _assume(plan, machine, sizes, events, runs, context, resident_speed, paired)
    lookup = _lookup_from_runs(runs, sizes) if runs else _lookup_function(events, sizes)
    _estimate(plan, machine, sizes, lookup, base - embedding, resident_speed)
    _recommend(plan, machine, sizes, base - embedding, resident_speed)
    return plan


def _sizes(info: Inspection, mix: tuple[float, float, float], paired: bool) -> _Sizes:
    total = info.total_experts
    used = min(info.n_used or 1, info.n_expert)
    return _Sizes(
        high=info.expert_bytes(info.labels[0]) / total,
        low=info.expert_bytes(info.labels[1]) / total if paired else 0.0,
        selections=float(sum(min(used, layer.n_expert) for layer in info.layers)),
        n_expert=info.n_expert,
        total=total,
        mix=mix,
        largest=max(min(used, layer.n_expert) * layer.copies[0].expert_bytes for layer in info.layers),
    )


def _resident(path: Path, info: Inspection, context: int) -> tuple[int, int, int]:
    """(everything but experts, the part that a token does not read, KV cache) in bytes."""
    with open_model(path) as model:
        tensors = {t.name: t.size for _, t in model.base_tensors}
        embedding = tensors.get("token_embd.weight", 0) if "output.weight" in tensors else 0
        heads = model.arch_int("attention.head_count_kv") or model.arch_int("attention.head_count") or 0
        width = model.arch_int("embedding_length") or 0
        all_heads = model.arch_int("attention.head_count") or 1
        key = model.arch_int("attention.key_length") or width // all_heads
        value = model.arch_int("attention.value_length") or width // all_heads
        kv = (info.n_layers or 0) * heads * (key + value) * 2 * context
        return info.base_bytes, embedding, kv


def _assume(
    plan: Plan,
    m: Machine,
    sizes: _Sizes,
    events: Trace | None,
    runs: Sequence[Observed],
    context: int,
    resident_speed: float | None,
    paired: bool,
) -> None:
    how = ", ".join(m.measured)
    rates = [f"disk {m.disk / 1e9:.2f} GB/s", f"RAM {m.ram_rate / 1e9:.1f} GB/s"]
    if m.vram:
        rates += [f"link {m.link / 1e9:.1f} GB/s", f"VRAM {m.vram_rate / 1e9:.0f} GB/s"]
    plan.assumptions.append("bandwidths: " + ", ".join(rates) + (f" (measured: {how})" if how else " (not measured)"))
    plan.assumptions.append(f"kept free in each memory: {format_size(m.reserve)}; KV cache F16, {context} tokens")
    if paired:
        shares = "/".join(f"{100 * x:.0f}" for x in plan.mix)
        plan.assumptions.append(f"selections {shares} % high/low/skipped")
    if runs:
        sizes_known = ", ".join(format_size(o.cache) for o in runs)
        plan.assumptions.append(f"misses: interpolated between runs with caches of {sizes_known}")
    elif events:
        plan.assumptions.append(f"hit rates: LRU over {len(events.events)} recorded selections")
    else:
        plan.assumptions.append(
            f"hit rates: no trace; LRU locality as of published models with {sizes.n_expert} experts"
            if sizes.n_expert >= 8
            else "hit rates: no trace; nearly uniform routing (few experts)"
        )
    if resident_speed:
        plan.assumptions.append(
            f"with everything in memory: {resident_speed:g} tokens/s ({'from the runs' if runs else 'given'})"
        )
    else:
        plan.assumptions.append("computing is limited by memory bandwidth")


Lookup = Callable[[float], tuple[float, float, float]]
"""Cache bytes -> (hit rate, high bytes missed, low bytes missed per token)."""


def _lookup_from_runs(runs: Sequence[Observed], s: _Sizes) -> Lookup:
    everything = max(s.total * (s.high + s.low), runs[-1].cache + 1.0)
    sizes = [0.0, *(float(o.cache) for o in runs), everything]
    hits = [0.0, *(o.hits for o in runs), 1.0]
    high = [s.selections * s.mix[0] * s.high, *(o.high_missed for o in runs), 0.0]
    low = [s.selections * s.mix[1] * s.low, *(o.low_missed for o in runs), 0.0]

    def from_runs(budget: float) -> tuple[float, float, float]:
        at = [float(np.interp(budget, sizes, values)) for values in (hits, high, low)]
        return at[0], at[1], at[2]

    return from_runs


def _lookup_function(events: Trace | None, s: _Sizes) -> Lookup:
    if events is not None:
        trace = events
        known: dict[int, tuple[float, float, float]] = {}

        def from_trace(budget: float) -> tuple[float, float, float]:
            b = int(budget)
            if b not in known:
                hits, high, low, _ = replay(trace, b, int(s.high), int(s.low))
                n = s.selections * (1 - s.mix[2])
                known[b] = hits, high * n * s.high, low * n * (s.low or s.high)
            return known[b]

        return from_trace

    def from_curve(budget: float) -> tuple[float, float, float]:
        best: tuple[float, float, float] | None = None
        for step in range(51 if s.low else 1):
            to_low = budget * step / 50
            high_hits = hit_rate((budget - to_low) / (s.total * s.high), s.n_expert)
            low_hits = hit_rate(to_low / (s.total * s.low), s.n_expert) if s.low else 0.0
            low_hits = max(low_hits, high_hits)  # a resident high copy is used for both
            missed = (
                s.selections * s.mix[0] * s.high * (1 - high_hits),
                s.selections * s.mix[1] * s.low * (1 - low_hits),
            )
            used = s.mix[0] + s.mix[1]
            hits = (s.mix[0] * high_hits + s.mix[1] * low_hits) / used if used else 1.0
            if best is None or sum(missed) < best[1] + best[2]:
                best = hits, *missed
        assert best is not None
        return best

    return from_curve


def _tier(name: str, budget: float, s: _Sizes) -> Tier:
    """Places in one memory, in the proportion in which a token asks for the precisions."""
    if budget >= s.total * (s.high + s.low):
        return Tier(name, int(s.total * (s.high + s.low)), s.total, s.total if s.low else 0)
    weight = s.mix[0] * s.high + s.mix[1] * s.low or 1.0
    high = min(s.total, int(budget * s.mix[0] * s.high / weight / s.high))
    low = min(s.total, int((budget - high * s.high) / s.low)) if s.low else 0
    return Tier(name, int(high * s.high + low * s.low), high, low)


def _estimate(plan: Plan, m: Machine, s: _Sizes, lookup: Lookup, base_read: int, resident_speed: float | None) -> None:
    everything = s.total * (s.high + s.low)
    compute = m.vram or m.ram
    rate = m.vram_rate if m.vram else m.ram_rate
    budget = max(0.0, min(everything, compute - m.reserve - plan.base_bytes - plan.kv_bytes))
    plan.tiers.append(_tier("VRAM" if m.vram else "RAM", budget, s))
    hits, high, low = lookup(budget)
    missed = high + low
    plan.hit_rate = hits
    plan.bytes_compute = base_read + s.demand
    if m.vram:
        below = max(0.0, min(everything, m.ram - m.reserve))
        plan.tiers.append(_tier("RAM", below, s))
        if below >= everything:
            plan.bytes_disk = 0.0
        else:
            _, deep_high, deep_low = lookup(min(everything, max(below, budget)))
            plan.bytes_disk = min(missed, deep_high + deep_low)
        plan.bytes_link = missed
    else:
        plan.bytes_disk = missed
    computing = 1 / resident_speed if resident_speed else plan.bytes_compute / rate
    moving = plan.bytes_disk / m.disk + (plan.bytes_link / m.link if m.vram else 0.0)
    plan.tokens_per_s = 1 / (computing + moving)
    plan.tokens_per_s_overlapped = 1 / max(computing, moving)


def _recommend(plan: Plan, m: Machine, s: _Sizes, base_read: int, resident_speed: float | None) -> None:
    all_high = plan.base_bytes + plan.kv_bytes + s.total * s.high
    full = base_read + s.selections * s.high
    compute = (m.vram or m.ram) - m.reserve
    budget = compute - plan.base_bytes - plan.kv_bytes
    if m.vram:
        if all_high <= compute:
            plan.alternatives["everything in VRAM"] = resident_speed or m.vram_rate / full
        if s.total * s.high <= m.ram - m.reserve and plan.base_bytes + plan.kv_bytes <= compute:
            on_cpu = 1 / (base_read / m.vram_rate + s.selections * s.high / m.ram_rate)
            plan.alternatives["experts computed by the CPU from RAM (--cpu-moe)"] = on_cpu
    elif all_high <= compute:
        plan.alternatives["everything in RAM"] = resident_speed or m.ram_rate / full
    if s.low and plan.base_bytes + plan.kv_bytes + s.total * s.low <= compute:
        rate = m.vram_rate if m.vram else m.ram_rate
        plan.alternatives["only the low experts (gguf-tools merge --experts low)"] = rate / (
            base_read + s.selections * s.low
        )
    if budget < s.largest:
        need = plan.base_bytes + plan.kv_bytes + m.reserve + s.largest
        plan.tokens_per_s = plan.tokens_per_s_overlapped = 0.0
        plan.recommendation = (
            f"does not fit: {'VRAM' if m.vram else 'RAM'} of at least {format_size(need)} is needed "
            "for the rest of the model and one layer's experts"
        )
        return
    exact = {name: speed for name, speed in plan.alternatives.items() if "low" not in name}
    if exact:
        name, speed = max(exact.items(), key=lambda item: item[1])
        if name.startswith("everything") or speed >= plan.tokens_per_s:
            plan.recommendation = f"do not use a cache: {name}, about {speed:.1f} tokens/s"
            return
    plan.use_cache = True
    plan.recommendation = (
        f"use the cache with {format_size(budget)} for experts (--hobbit-cache {int(budget) >> 20}MiB): "
        f"about {plan.tokens_per_s:.1f} tokens/s, up to {plan.tokens_per_s_overlapped:.1f} "
        "if loads overlap with computing"
    )


def expert_piece(path: Path) -> tuple[Path, int]:
    """(file, bytes) of a typical expert read: what `--measure` should measure the disk with."""
    from gguf_tools.pairfile import open_pair

    if kind_of(path) == "base":
        with open_pair(path) as pair:
            e = next(iter(pair.high.experts.values()))
            return pair.high.path, e.expert_bytes(e.segments[0].type)
    with open_model(path) as model:
        e = model.require_experts()[0]
        return model.files[e.segments[0].file].path, e.expert_bytes(e.segments[0].type)
