"""plan: arithmetic that can be done by hand, and recommendations that follow from it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from gguf_models import U32, Moe, run_cli

from gguf_tools.errors import ExitCode, ToolError
from gguf_tools.pair import PairOptions, plan_pair, run_pair
from gguf_tools.plan import (
    Machine,
    Trace,
    expert_piece,
    hit_rate,
    make_plan,
    measure_disk,
    measure_ram,
    parse_mix,
    precisions,
    read_trace,
    replay,
)

MOE = Moe(n_embd=256, n_ff=256, n_expert=16, n_used=4, n_layer=4)
HIGH = 3 * 256 * 256 * 2  # one expert in F16
LOW = 3 * 256 * 256 // 32 * 18  # and in Q4_0
SMALL = Machine(vram=0, ram=0, disk=1e9, ram_rate=10e9, reserve=0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(base file of a pair, the F16 model)."""
    folder = tmp_path_factory.mktemp("plan")
    model = replace(MOE, type="F16").build()
    source = model.with_kv(("qwen3moe.embedding_length", U32, 256), ("qwen3moe.attention.head_count", U32, 4)).write(
        folder / "m.gguf"
    )
    plan = plan_pair(PairOptions(source, folder / "out"))
    run_pair(plan)
    plan.close()
    return folder / "out" / "m.base.gguf", source


def write_trace(path: Path, events: list[tuple[int, list[int], list[float]]]) -> Path:
    path.write_text("".join(json.dumps({"layer": a, "ids": b, "weights": c}) + "\n" for a, b, c in events))
    return path


def test_one_precision_is_bytes_over_bandwidths(files: tuple[Path, Path]) -> None:
    p = make_plan(files[1], replace(SMALL, ram=20 * HIGH), context=1)
    kv = 4 * 4 * (64 + 64) * 2
    assert p.kv_bytes == kv and p.expert_bytes == {"model": 64 * HIGH}
    budget = 20 * HIGH - p.base_bytes - kv
    hits = hit_rate(budget / (64 * HIGH), 16)
    assert p.hit_rate == pytest.approx(hits)
    assert p.bytes_compute == p.base_bytes + 16 * HIGH  # the tied embedding is read as the output
    assert p.bytes_disk == pytest.approx(16 * HIGH * (1 - hits))
    assert p.tokens_per_s == pytest.approx(1 / (p.bytes_compute / 10e9 + p.bytes_disk / 1e9))
    assert p.tokens_per_s_overlapped == pytest.approx(1 / max(p.bytes_compute / 10e9, p.bytes_disk / 1e9))
    assert p.use_cache


def test_measured_speed_replaces_the_guess(files: tuple[Path, Path]) -> None:
    p = make_plan(files[1], replace(SMALL, ram=20 * HIGH), context=1, resident_speed=100.0)
    assert p.tokens_per_s == pytest.approx(1 / (0.01 + p.bytes_disk / 1e9))


def test_more_memory_is_never_slower(files: tuple[Path, Path]) -> None:
    for path in files:
        speeds = [make_plan(path, replace(SMALL, ram=n * HIGH), context=1).tokens_per_s for n in range(6, 120, 6)]
        assert speeds == sorted(speeds)


def test_a_pair_needs_fewer_bytes_than_one_precision(files: tuple[Path, Path]) -> None:
    pair, single = (make_plan(path, replace(SMALL, ram=20 * HIGH), context=1) for path in files)
    assert pair.mix == (0.67, 0.33, 0.0)
    assert pair.bytes_disk < 0.85 * single.bytes_disk
    assert pair.tokens_per_s > single.tokens_per_s


def test_no_cache_is_recommended_when_all_fits(files: tuple[Path, Path]) -> None:
    for path in files:
        p = make_plan(path, replace(SMALL, ram=1 << 30), context=1)
        assert not p.use_cache and p.recommendation.startswith("do not use a cache: everything in RAM")
        p = make_plan(path, replace(SMALL, ram=1 << 30, vram=1 << 30), context=1)
        assert not p.use_cache and "everything in VRAM" in p.recommendation


def test_no_cache_is_recommended_on_a_slow_link(files: tuple[Path, Path]) -> None:
    machine = replace(SMALL, ram=1 << 30, vram=20 * HIGH, vram_rate=500e9)
    slow = make_plan(files[1], replace(machine, link=1e9), context=1)
    assert not slow.use_cache and "--cpu-moe" in slow.recommendation
    fast = make_plan(files[1], replace(machine, link=60e9), context=1)
    assert fast.use_cache and fast.bytes_link > 0 and fast.bytes_disk == 0


def test_what_ram_does_not_hold_comes_from_disk(files: tuple[Path, Path]) -> None:
    p = make_plan(files[1], replace(SMALL, ram=40 * HIGH, vram=20 * HIGH, vram_rate=500e9), context=1)
    assert 0 < p.bytes_disk < p.bytes_link
    assert [t.name for t in p.tiers] == ["VRAM", "RAM"]


def test_too_little_memory_says_how_much_is_needed(files: tuple[Path, Path]) -> None:
    p = make_plan(files[1], replace(SMALL, ram=3 * HIGH), context=1)
    assert p.tokens_per_s == 0 and p.recommendation.startswith("does not fit: RAM of at least")
    enough = make_plan(files[1], replace(SMALL, ram=p.base_bytes + p.kv_bytes + 4 * HIGH), context=1)
    assert enough.tokens_per_s > 0


def test_hit_rate_is_between_uniform_and_the_published_curve() -> None:
    assert hit_rate(0.25, 128) == pytest.approx(0.742) and hit_rate(0.25, 512) == pytest.approx(0.742)
    assert hit_rate(0.25, 8) == pytest.approx(0.25 + 0.2 * (0.742 - 0.25))
    assert [hit_rate(x, 64) for x in (-1, 0, 1, 2)] == [0, 0, 1, 1]
    for n in (1, 8, 60, 256):
        rates = [hit_rate(i / 100, n) for i in range(101)]
        assert rates == sorted(rates) and all(r >= i / 100 - 1e-12 for i, r in enumerate(rates))


def test_precision_follows_cumulative_weight() -> None:
    assert precisions([7, 8, 9], [0.15, 0.7, 0.15]) == [1, 0, 1]
    assert precisions([7, 8, 9], [0.35, 0.6, 0.05]) == [0, 0, 1]
    assert precisions([1, 2], []) == [0, 0]


def test_replay_equals_a_plain_lru() -> None:
    rng = random.Random(5)
    events = [(t % 3, tuple(rng.sample(range(8), 2)), ()) for t in range(300)]
    capacity, cache, hits, lookups = 7, [], 0, 0
    for n, (layer, ids, _) in enumerate(events):
        for e in ids:
            found = (layer, e) in cache
            if n >= 75:
                hits, lookups = hits + found, lookups + 1
            if found:
                cache.remove((layer, e))
            cache.append((layer, e))
            del cache[:-capacity]
    assert replay(Trace(events), capacity * 100 + 99, 100, 0) == (
        pytest.approx(hits / lookups),
        pytest.approx(1 - hits / lookups),
        0.0,
        lookups,
    )


def test_a_trace_decides_hits_and_mix(files: tuple[Path, Path], tmp_path: Path) -> None:
    events = [(layer, [1, 2, 3, 4], [0.5, 0.3, 0.15, 0.05]) for _ in range(8) for layer in range(4)]
    trace = write_trace(tmp_path / "t.jsonl", events)
    p = make_plan(files[0], replace(SMALL, ram=30 * HIGH), context=1, trace=trace)
    assert p.mix == (0.5, 0.5, 0)
    assert p.hit_rate == 1 and p.bytes_disk == 0
    assert read_trace(trace).events[0] == (0, (1, 2, 3, 4), (0.5, 0.3, 0.15, 0.05))


@pytest.mark.parametrize("text", ["", "x\n", "[1]\n", '{"layer": 1}\n', '{"layer": 0, "ids": [[]]}\n', "\x80"])
def test_bad_traces_are_refused(text: str, files: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ToolError) as error:
        make_plan(files[0], SMALL, trace=path)
    assert error.value.code == ExitCode.MALFORMED


@pytest.mark.parametrize("text", ["", "1,2", "0,0,1", "-1,1,1", "nan,1,1", "a,b,c", "inf,1,1"])
def test_bad_mixes_are_refused(text: str) -> None:
    with pytest.raises(ToolError):
        parse_mix(text)
    assert parse_mix("2,1,1") == (0.5, 0.25, 0.25)


def stats_file(path: Path, cache: int, missed: int, tokens: int = 100, **changes: object) -> Path:
    """Statistics of a run that filled its cache and then missed `missed` high experts per token."""
    slots = cache // HIGH
    total = {
        "lookups": tokens * 16,
        "hits": tokens * (16 - missed),
        "selected_high": 70,
        "selected_low": 20,
        "selected_skip": 10,
        "read_bytes_high": (slots + missed * tokens) * HIGH,
        "read_bytes_low": 0,
        "stall_us": (slots + missed * tokens) * HIGH / 2e9 * 1e6,
    }
    value = {"cache_bytes": cache, "resident_high": slots, "resident_low": 0, "prompt_tokens": 10, "decode_tokens": 90}
    value |= {"prompt_us": total["stall_us"], "decode_us": 1e6, "total": total} | changes
    path.write_text(json.dumps(value))
    return path


def test_runs_decide_misses_speed_and_disk(files: tuple[Path, Path], tmp_path: Path) -> None:
    runs = [stats_file(tmp_path / f"{n}.json", n * HIGH, missed) for n, missed in ((10, 8), (30, 2))]
    runs += [stats_file(tmp_path / f"slow{i}.json", 10 * HIGH, 8) for i in range(2)]  # medians, so order does not count
    base = make_plan(files[0], replace(SMALL, ram=1 << 30), context=1)
    ram = base.base_bytes + base.kv_bytes + 20 * HIGH
    p = make_plan(files[0], replace(SMALL, ram=ram), context=1, stats=runs)
    assert p.mix == (0.7, 0.2, 0.1)
    assert p.hit_rate == pytest.approx((0.5 + 0.875) / 2)
    assert p.bytes_disk == pytest.approx(5 * HIGH)  # half way between the runs
    assert p.tokens_per_s == pytest.approx(1 / (0.01 + 5 * HIGH / 2e9))
    p = make_plan(files[0], replace(SMALL, ram=ram, measured=("disk",)), context=1, stats=runs, resident_speed=50)
    assert p.tokens_per_s == pytest.approx(1 / (0.02 + 5 * HIGH / 1e9))


@pytest.mark.parametrize("change", [{"total": {}}, {"decode_us": "x"}, {"decode_tokens": 0, "prompt_tokens": 0}, {}])
def test_bad_statistics_are_refused(change: dict[str, object], files: tuple[Path, Path], tmp_path: Path) -> None:
    path = stats_file(tmp_path / "s.json", 10 * HIGH, 8, **change)
    if not change:
        path.write_text("[")
    with pytest.raises(ToolError):
        make_plan(files[0], SMALL, stats=[path])


def test_measuring_gives_rates(files: tuple[Path, Path]) -> None:
    for path in files:
        file, piece = expert_piece(path)
        assert piece == HIGH // 3
        assert measure_disk(file, piece, budget_bytes=1 << 20) > 0
    assert measure_ram(1, size=1 << 20) > 0


def test_command(files: tuple[Path, Path]) -> None:
    done = run_cli("plan", files[0], "--ram", "12MiB", "--reserve", "0", "--ctx", "16", "--json")
    value = json.loads(done.stdout)
    assert value["use_cache"] and value["expert_bytes"] == {"high F16": 64 * HIGH, "low Q4_0": 64 * LOW}
    done = run_cli("plan", files[0], "--ram", "64G", "--vram", "24G")
    assert "do not use a cache" in done.stdout and "assumed" in done.stdout
    done = run_cli("plan", files[0], "--ram", "64G", "--link", "fast")
    assert done.returncode == ExitCode.USAGE
