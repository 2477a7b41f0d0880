"""Damaged files: every outcome is success or a clean error, never a traceback, an abort, a hang or a growing process.

Valid files are mutated where it hurts (counts, lengths, types, dimensions, offsets, alignment) as well as blindly.
The commands run in this process, so that an abort inside ggml ends the test run: it cannot be overlooked.
"""

from __future__ import annotations

import resource
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from gguf_models import ARR, STR, Gguf, Moe, imatrix_gguf, imatrix_legacy, split
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gguf_tools import cli
from gguf_tools.errors import ExitCode, ToolError
from gguf_tools.imatrix import read_imatrix
from gguf_tools.pair import PairOptions, plan_pair, run_pair

SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
CLEAN = {code.value for code in ExitCode} - {ExitCode.INTERNAL, ExitCode.LIBRARY, ExitCode.INTERRUPTED}


def fields(data: bytes) -> list[tuple[int, int]]:
    """(position, width) of every number in the header of a valid file."""
    found = [(4, 4), (8, 8), (16, 8)]
    pos = 24
    n_tensors, n_kv = struct.unpack_from("<QQ", data, 8)

    def number(width: int) -> int:
        nonlocal pos
        found.append((pos, width))
        value = int.from_bytes(data[pos : pos + width], "little")
        pos += width
        return value

    def text() -> None:
        nonlocal pos
        n = number(8)
        if n:
            found.append((pos, 1))
        pos += n

    def value(kind: int) -> None:
        if kind == STR:
            text()
        elif kind == ARR:
            element, n = number(4), number(8)
            for _ in range(n):
                value(element)
        else:
            number(SCALAR_BYTES[kind])

    for _ in range(n_kv):
        text()
        value(number(4))
    for _ in range(n_tensors):
        text()
        for _ in range(number(4)):
            number(8)
        number(4)
        number(8)
    return found


EDGES = [0, 1, 2, 3, 4, 7, 8, 9, 12, 13, 31, 32, 33, 63, 64, 255, 256, 4096, 65535, 65536, 1 << 20, (1 << 30) - 1]
EDGES += [
    1 << 30,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    1 << 40,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
]
TEXTS = [
    b"\0",
    b"\x1b[31m",
    b"\xff\xfe",
    b"../../x",
    b"/x",
    b"general.alignment",
    b"blk.0.ffn_up_exps.weight",
    b"\n",
    "ü".encode(),
]


@st.composite
def mutations(draw: st.DrawFn) -> list[tuple[str, int, int, bytes]]:
    """A few (kind, where, number, text); `where` is taken modulo what there is."""
    kinds = st.sampled_from(["field", "field", "field", "add", "byte", "cut", "insert", "copy", "text"])
    step = st.tuples(
        kinds,
        st.integers(0, 1 << 20),
        st.sampled_from(EDGES) | st.integers(0, (1 << 64) - 1),
        st.sampled_from(TEXTS) | st.binary(max_size=24),
    )
    return draw(st.lists(step, min_size=1, max_size=4))


def mutate(data: bytes, steps: list[tuple[str, int, int, bytes]], header: int) -> bytes:
    positions = fields(data)
    out = bytearray(data)
    for kind, where, number, text in steps:
        pos, width = positions[where % len(positions)]
        at = where % max(1, min(len(out), header))
        if kind == "field" and pos + width <= len(out):
            out[pos : pos + width] = (number % (1 << (8 * width))).to_bytes(width, "little")
        elif kind == "add" and pos + width <= len(out):
            value = int.from_bytes(out[pos : pos + width], "little") + (number % 5) - 2
            out[pos : pos + width] = (value % (1 << (8 * width))).to_bytes(width, "little")
        elif kind == "byte" and out:
            out[at] = number & 0xFF
        elif kind == "cut":
            del out[(where * 7919) % (len(out) + 1) :]
        elif kind == "insert":
            out[at:at] = text
        elif kind == "copy":
            out[at:at] = out[at : at + number % 64]
        elif kind == "text":
            out[pos + width : pos + width + len(text)] = text
    return bytes(out)


@contextmanager
def guarded(seconds: int = 60, grown_mib: int = 300) -> Iterator[None]:
    """A hang ends in an alarm, a growing process in an assertion."""

    def hang(*_: object) -> None:
        raise AssertionError("a tool hangs on this file")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    previous = signal.signal(signal.SIGALRM, hang)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    assert grown < grown_mib, f"{grown} MiB more"


def outcome(capfd: pytest.CaptureFixture[str], *arguments: object) -> int:
    """Run one command; errors must be one line on stderr."""
    code = cli.run([str(a) for a in arguments])
    printed = capfd.readouterr()
    assert code in CLEAN, f"{arguments}: exit {code}\n{printed.err}"
    assert "Traceback" not in printed.err + printed.out
    if code not in (ExitCode.OK, ExitCode.MISMATCH):
        assert printed.err.startswith("gguf-tools: ") and printed.err.count("\n") == 1, printed.err
        assert printed.err.rstrip("\n").isprintable()
    return code


def fuzz(examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
    )


MODELS: list[Gguf] = [
    Moe(n_layer=1, n_embd=32, n_ff=32).build(),
    Moe(n_layer=1, n_embd=32, n_ff=32, legacy=True, type="F16").build(),
    Moe(n_layer=1, n_embd=32, n_ff=32, fused=True, biases=True, type="MXFP4").build(),
]
MODELS[1].alignment = 64


def header_of(data: bytes) -> int:
    return fields(data)[-1][0] + 8


@fuzz(1200)
@given(which=st.integers(0, len(MODELS) - 1), steps=mutations())
def test_damaged_models(
    which: int, steps: list[tuple[str, int, int, bytes]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = MODELS[which].to_bytes()
    path = tmp_path / "m.gguf"
    path.write_bytes(mutate(data, steps, header_of(data)))
    out = tmp_path / "out"
    shutil.rmtree(out, ignore_errors=True)
    with guarded():
        outcome(capfd, "inspect", path)
        code = outcome(capfd, "pair", path, "-o", out, "--high", "keep", "--low", "q4_0", "-q")
        outcome(capfd, "verify", path, "-q")
        if code == 0:  # what was accepted gives a pair that holds
            assert outcome(capfd, "verify", out / "m.base.gguf", "-q") in (0, ExitCode.MISMATCH)
        else:
            assert not list(out.glob("*.gguf"))


@fuzz(300)
@given(which=st.integers(0, 1), steps=mutations())
def test_damaged_shards(
    which: int, steps: list[tuple[str, int, int, bytes]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shards = split(MODELS[0], tmp_path, "m", 2)
    data = shards[which].read_bytes()
    shards[which].write_bytes(mutate(data, steps, header_of(data)))
    with guarded():
        outcome(capfd, "inspect", shards[0])
        outcome(capfd, "pair", shards[1], "-o", tmp_path / "out", "--dry-run", "-q")


@fuzz(800)
@given(which=st.sampled_from(["base", "experts-F16", "experts-Q4_0"]), steps=mutations())
def test_damaged_pairs(
    which: str, steps: list[tuple[str, int, int, bytes]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "pair"
    if not folder.exists():
        plan = plan_pair(PairOptions(MODELS[0].write(tmp_path / "m.gguf"), folder))
        run_pair(plan)
        plan.close()
    path = folder / f"m.{which}.gguf"
    good = path.read_bytes()
    merged = tmp_path / "merged.gguf"
    merged.unlink(missing_ok=True)
    try:
        path.write_bytes(mutate(good, steps, header_of(good)))
        with guarded():
            outcome(capfd, "inspect", folder / "m.base.gguf", "--json")
            outcome(capfd, "verify", folder / "m.base.gguf", "-q")
            outcome(capfd, "merge", folder / "m.base.gguf", "-o", merged, "-q")
            outcome(capfd, "verify", folder / "m.experts-Q4_0.gguf", "--model", tmp_path / "m.gguf", "-q")
    finally:
        path.write_bytes(good)


@fuzz(500)
@given(steps=mutations())
def test_damaged_importance_matrices(steps: list[tuple[str, int, int, bytes]], tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    good = imatrix_gguf({f"blk.0.ffn_{r}_exps.weight": (rng.random((4, 32)), np.ones(4)) for r in ("up", "down")})
    data = good.to_bytes()
    path = tmp_path / "imatrix.gguf"
    path.write_bytes(mutate(data, steps, header_of(data)))
    with guarded():
        try:
            for name in (imatrix := read_imatrix(path)).entries:
                imatrix.rows(name, 32, 4)
        except ToolError as error:
            assert str(error).isprintable()


@fuzz(500)
@given(at=st.integers(0, 200), number=st.sampled_from(EDGES), length=st.integers(0, 200), blob=st.binary(max_size=40))
def test_damaged_old_importance_matrices(at: int, number: int, length: int, blob: bytes, tmp_path: Path) -> None:
    data = bytearray(imatrix_legacy({"blk.0.ffn_up_exps.weight": (np.ones(16), 2), "x": (np.ones(4), 0)}))
    data[at : at + 4] = (number & 0xFFFFFFFF).to_bytes(4, "little")
    path = tmp_path / "imatrix.dat"
    path.write_bytes(bytes(data[:length] + blob) if length % 2 else bytes(data))
    with guarded():
        try:
            read_imatrix(path)
        except ToolError as error:
            assert str(error).isprintable()
