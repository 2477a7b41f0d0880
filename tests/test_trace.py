"""Traces: a replay with the recorded settings counts what the engine counted; a reader finds what is in the file."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import BUILD, ROOT, finish, program

from hobbit_py import Hobbit, _lib
from hobbit_py import trace as trace_
from hobbit_py.replay import POLICIES, Replay, caveat
from hobbit_py.trace import Layer, Trace, TraceWriter

HIGH = ROOT / "models/tiny-moe/tiny-moe-F16.gguf"
LOW = BUILD / "models/tiny-moe-Q4_0.gguf"
TEXT = ROOT / "models/tiny-moe/heldout.txt"

TIMES = {"stall_us"}  # all that a replay does not take again


def record(folder: Path, *options: object, tool: str = "llama-completion") -> tuple[Path, dict[str, object]]:
    """A trace, and the statistics of the same run."""
    trace, stats = folder / "run.trace", folder / "stats.json"
    arguments: list[object] = [
        program(tool),
        "-m",
        HIGH,
        "--hobbit-trace",
        trace,
        "--hobbit-stats",
        stats,
        "-t",
        2,
        *options,
    ]
    if tool == "llama-completion":
        arguments += [
            "-no-cnv",
            "-p",
            "In the beginning God created the heaven and the earth",
            "-n",
            48,
            "--ignore-eos",
        ]
    done = finish(*arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return trace, json.loads(stats.read_text())


def assert_replay_equals(trace: Path, stats: dict[str, object]) -> None:
    with Replay(trace) as replay:
        result = replay.run()
    assert result["recorded"]
    assert result["divergences"] == 0
    assert len(result["contexts"]) == 1
    for ours, theirs in zip(result["contexts"][0]["layers"], stats["layers"], strict=True):
        for name, value in ours.items():
            assert name in TIMES or value == theirs[name], (theirs["block"], name)


SMALL = ["--hobbit-low", LOW, "--hobbit-precision", "paper", "--hobbit-cache", "8MiB"]


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--hobbit-deterministic", "--hobbit-prefetch", "3"],
        ["--hobbit-precision", "high", "--hobbit-low-share", "0.5", "--hobbit-policy", "lru"],
        ["--hobbit-policy", "lfu-model", "--hobbit-low-share", "0.4", "--hobbit-prefetch", "off"],
        ["--hobbit-policy", "lcu", "--hobbit-t2", "1"],
        ["--hobbit-policy", "lfru", "--hobbit-prefetch", "8"],
        ["--hobbit-policy", "gate-mass", "--hobbit-weights", "1,2,3,4"],
        ["--hobbit-policy", "random", "-ub", "4"],
        ["--hobbit-policy", "activations", "--hobbit-predictor", "activations", "--hobbit-prefetch", "2"],
        ["--hobbit-policy", "static", "--hobbit-low-share", "0.4"],
        [
            "--hobbit-policy",
            "static",
            "--hobbit-unit",
            "layer",
            "--hobbit-precision",
            "high",
            "--hobbit-prefetch",
            "off",
        ],
        ["--hobbit-unit", "layer", "--hobbit-prefetch", "1"],
    ],
    ids=lambda options: " ".join(map(str, options)) or "defaults",
)
def test_replay_with_the_recorded_settings_gives_the_engines_counters(tmp_path: Path, options: list[object]) -> None:
    trace, stats = record(tmp_path, *SMALL, *options)
    total = stats["total"]
    assert isinstance(total, dict)
    assert total["misses_high"] > 0
    assert (total["evictions"] > 0) == ("static" not in options and "layer" not in options)
    assert_replay_equals(trace, stats)


def test_replay_of_many_sequences_and_long_ubatches(tmp_path: Path) -> None:
    """Four sequences at a time, ubatches that evict and such that stream."""
    options = ["-f", TEXT, "-c", 64, "-b", 256, "-ub", 48, "--chunks", 8, *SMALL]
    trace, stats = record(tmp_path, *options, tool="llama-perplexity")
    assert stats["total"]["streamed"] > 0  # type: ignore[index]
    assert_replay_equals(trace, stats)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_replay_says_when_it_is_counterfactual(tmp_path: Path, deterministic: bool) -> None:
    trace, _ = record(tmp_path, *SMALL, *(["--hobbit-deterministic"] if deterministic else []))
    with Replay(trace) as replay:
        assert not caveat(replay.run())
        for other in ({"policy": "lru"}, {"cache_bytes": 4 << 20}):
            assert ("counterfactual" in caveat(replay.run(**other))) != deterministic
        for other in ({"t1": 0.5}, {"rule": "high"}):  # other precisions, whatever the cache holds
            assert caveat(replay.run(**other))
    done = finish(sys.executable, ROOT / "bench/simulate.py", "timing", trace, "--bandwidth", 1000)
    assert done.returncode == 0, done.stderr
    assert "counterfactual" in done.stdout  # it replays as by default: what is resident counts


def test_an_exact_run_is_never_counterfactual(tmp_path: Path) -> None:
    trace, _ = record(tmp_path, "--hobbit-precision", "high", "--hobbit-cache", "8MiB")
    with Replay(trace) as replay:
        assert not caveat(replay.run(policy="lru", cache_bytes=4 << 20))


def test_trace_is_what_its_page_says(tmp_path: Path) -> None:
    file, stats = record(tmp_path, *SMALL, "--hobbit-prefetch", "2")
    trace = Trace.load(file)
    total = stats["total"]
    assert isinstance(total, dict)
    assert [layer.n_expert for layer in trace.layers] == [16] * 6
    assert trace.settings["policy"] == stats["policy"]
    # the statistics began anew after the warm-up run
    begin = int(np.flatnonzero(trace.heads["type"] == trace_.STATS_RESET).max(initial=-1)) + 1
    warm_up = int((trace.heads["type"][:begin] == trace_.STEP).sum())
    routes = [route for route in trace.routes() if route.step >= warm_up]
    trace.heads = trace.heads[begin:]
    count = trace.count()
    assert count["step"] == count["end"] == stats["steps"]
    assert count["demand"] + count.get("stream", 0) == total["misses_high"] + total["misses_low"]
    assert count["prefetch"] == total["prefetch_issued"]
    assert count["evict"] == total["evictions"]
    assert len(routes) == 6 * count["step"]
    given = np.concatenate([r.given.ravel() for r in routes])
    for value, name in ((trace_.HIGH, "high"), (trace_.LOW, "low"), (trace_.SKIP, "skip")):
        assert (given == value).sum() == total[f"selected_{name}"]
    for route in routes:
        assert np.allclose(route.weights.sum(axis=1), 1, atol=1e-3)  # this model normalises its gate weights
        assert (np.sort(route.ids, axis=1)[:, 1:] != np.sort(route.ids, axis=1)[:, :-1]).all()
    reads = trace.heads[np.isin(trace.heads["type"], (trace_.DEMAND, trace_.STREAM))]
    assert reads["bytes"].sum() == total["read_bytes_high"] + total["read_bytes_low"]
    predicted = list(trace.predictions())
    assert {(p.to - p.layer) for p in predicted} == {1, 2}
    assert trace.stats()[-1][1]["total"] == total


def test_damaged_traces_are_refused(tmp_path: Path) -> None:
    writer = TraceWriter({"slots_high": [4, 100], "rule": "high"}, [Layer(0, 8, 0, 100)])
    writer.sequence()
    for expert in (1, 2, 1):
        writer.step([(np.array([[expert]]), np.ones((1, 1)))])
    file = tmp_path / "a.trace"
    writer.save(file)
    with Replay(file) as replay:
        total = replay.run(slots_high=4)["total"]
    assert (total["lookups"], total["hits"], total["misses_high"]) == (3, 1, 2)

    data = file.read_bytes()
    for bad, words in [
        (data.replace(b"trace 1", b"trace 7", 1), "version 7"),
        (b"GGUF" + data, "not a trace"),
        (data.replace(b"layer 0 0 8 0 100", b"layer 0 0 2 0 100", 1), "does not fit"),
    ]:
        file.write_bytes(bad)
        with pytest.raises(ValueError, match=words):
            Replay(file)
    file.write_bytes(data[:-30])  # a run that was killed: what is whole counts
    with Replay(file) as replay:
        assert replay.run(slots_high=4)["total"]["lookups"] == 2


def test_a_trace_of_an_unwritable_place_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "no/such.trace"
    done = finish(program("llama-completion"), "-m", HIGH, "--hobbit-trace", trace, "-p", "a", "-n", 1)
    assert done.returncode != 0
    assert "such.trace: the trace cannot be written" in done.stderr


def write_accesses(file: Path, accesses: list[int], n_expert: int) -> None:
    """One layer, one expert a token, 1000 bytes each."""
    writer = TraceWriter({"slots_high": [1, 1000], "rule": "high"}, [Layer(0, n_expert, 0, 1000)])
    writer.sequence()
    for expert in accesses:
        writer.step([(np.array([[expert]]), np.ones((1, 1)))])
    writer.save(file)


def least_misses(accesses: list[int], slots: int) -> int:
    """Belady's MIN as plainly as can be: whose next use is farthest goes."""
    cache: set[int] = set()
    misses = 0
    for i, wanted in enumerate(accesses):
        if wanted in cache:
            continue
        misses += 1
        if len(cache) == slots:
            rest = accesses[i + 1 :]
            cache.remove(max(cache, key=lambda e: rest.index(e) if e in rest else len(rest)))
        cache.add(wanted)
    return misses


def test_belady_is_the_least_and_every_policy_has_more(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    accesses = [int(e) for e in np.minimum(rng.integers(0, 24, 1500), rng.integers(0, 24, 1500))]
    write_accesses(tmp_path / "t", accesses, 24)
    with Replay(tmp_path / "t") as replay:
        for slots in (4, 8, 16):
            least = replay.run(slots_high=slots, policy="belady")["total"]["misses_high"]
            assert least == least_misses(accesses, slots)
            for policy in POLICIES:
                assert replay.run(slots_high=slots, policy=policy)["total"]["misses_high"] > least, policy


def test_time_of_a_link_is_latency_and_bytes(tmp_path: Path) -> None:
    write_accesses(tmp_path / "t", [1, 2, 1], 4)
    with Replay(tmp_path / "t") as replay:
        result = replay.run(slots_high=2, bandwidth=100, latency_us=5, compute_us=7)
    assert result["stall_us"] == pytest.approx(2 * (5 + 1000 / 100))
    assert result["time_us"] == pytest.approx(result["stall_us"] + 3 * 7)


@pytest.mark.parametrize("policy", ["hobbit", "lfu-model", "gate-mass", "activations"])
def test_a_trace_may_begin_in_the_middle_of_a_run(tmp_path: Path, policy: str) -> None:
    error = ctypes.create_string_buffer(1024)
    file = tmp_path / "middle.trace"
    with Hobbit(HIGH, low=LOW, cache="8MiB", policy=policy, n_ctx=128, n_threads=2, verbose=False) as llm:
        tokens = llm.tokenize(TEXT.read_bytes()[:600])[:60]
        for first in range(4):  # requests that are over
            llm.eval(tokens[10 * first : 10 * first + 20])
            llm.reset()  # type: ignore[no-untyped-call]
        llm.eval(tokens[:30])
        with llm._engine() as ctx:
            assert _lib.lib.hobbit_trace_start(ctx, bytes(file), error, len(error)), error.value
            assert not _lib.lib.hobbit_trace_start(ctx, bytes(file), error, len(error))
            assert b"already" in error.value
        with llm.stats_delta() as delta:
            for token in tokens[30:]:
                llm.eval([token])
        with llm._engine() as ctx:
            assert _lib.lib.hobbit_trace_stop(ctx, error, len(error)), error.value
        llm.eval(tokens[:1])
    with Replay(file) as replay:
        result = replay.run()
    assert result["divergences"] == 0
    assert result["total"]["evictions"] > 0
    for name, value in result["total"].items():
        assert name in TIMES or value == getattr(delta.stats.total, name, 0), name


def test_past_requests_travel_in_a_profile(tmp_path: Path) -> None:
    profile, file = tmp_path / "a.profile", tmp_path / "a.trace"
    options = {"precision": "high", "cache": "8MiB", "policy": "activations", "predictor": "activations", "prefetch": 2}

    def past() -> list[list[int]]:
        lines = [line.split() for line in profile.read_text().splitlines() if line.startswith("past ")]
        return [[int(n), *(int(count.split(":")[1]) for count in counts)] for _, n, *counts in lines]

    for run in range(2):
        more = {"trace": file} if run else {}
        with Hobbit(HIGH, profile=profile, n_ctx=128, n_threads=2, verbose=False, **options, **more) as llm:
            tokens = llm.tokenize(TEXT.read_bytes()[:600])[: 30 + run]
            for token in tokens:
                llm.eval([token])
    assert [n for n, *_ in past()] == [30, 31]
    assert [sum(counts) for _, *counts in past()] == [30 * 6 * 4, 31 * 6 * 4]
    predicted = list(Trace.load(file).predictions())
    assert predicted and all(p.weights.sum() > 0 for p in predicted)
    with Replay(file) as replay:
        result = replay.run()
    assert result["divergences"] == 0
    assert result["total"]["prefetch_issued"] > 0
