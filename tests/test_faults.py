"""A disk that fails, is slow, or whose files change: an error that names what it hit, or a wait. Never wrong tokens."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import BUILD, EQUAL, ROOT, clean_environment, program
from test_bad_input import Decoder

HIGH = ROOT / "models/tiny-moe/tiny-moe-F16.gguf"
LOW = BUILD / "models/tiny-moe-Q4_0.gguf"


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/faults/shim.c as a library for LD_PRELOAD."""
    library = tmp_path_factory.mktemp("faults") / "shim.so"
    source = ROOT / "tests/faults/shim.c"
    subprocess.run(["cc", "-O1", "-Wall", "-shared", "-fPIC", source, "-o", library, "-ldl"], check=True)
    return library


def run(shim: Path, mode: str, after: int, tool: str, *options: object) -> subprocess.CompletedProcess[str]:
    env = clean_environment(
        LD_PRELOAD=str(shim), FAULT_FILE="tiny-moe-F16.gguf", FAULT_MODE=mode, FAULT_AFTER=str(after)
    )
    return subprocess.run(
        [str(program(tool)), *map(str, options)],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
    )


def generate(shim: Path, mode: str, after: int, io: str = "auto") -> subprocess.CompletedProcess[str]:
    text = ("-p", "In the beginning", "-n", 24, "--temp", 0, "-t", 2, "-no-cnv", "--no-warmup", "--ignore-eos")
    cache = ("--hobbit-cache", "2MiB", "--hobbit-io", io)
    return run(shim, mode, after, "llama-completion", "-m", HIGH, *text, *cache)


@pytest.fixture(scope="module")
def right(shim: Path) -> str:
    done = generate(shim, "none", 0)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("after", [40, 400])  # in the prompt, in the generation
def test_a_read_error_ends_the_run_and_is_named(shim: Path, right: str, after: int) -> None:
    done = generate(shim, "eio", after)
    assert done.returncode != 0
    assert "Input/output error" in done.stderr
    assert "tiny-moe-F16.gguf" in done.stderr and "(tensor blk." in done.stderr and ", expert " in done.stderr
    assert right.startswith(done.stdout.rstrip("\n")), (right, done.stdout)


@pytest.mark.parametrize("io", ["direct", "buffered"])
@pytest.mark.parametrize("mode", ["short", "eintr", "slow"])
def test_partial_interrupted_and_slow_reads_change_no_bit(shim: Path, mode: str, io: str) -> None:
    steps = ("--prompt", 40, "--generate", 4, "--ubatch", "8,40")
    done = run(shim, mode, 0, "hobbit-exact", "--model", HIGH, *steps, "--cache", "15%", "--hobbit", f"io={io}")
    assert done.returncode == EQUAL, done.stdout[:300] + done.stderr[-2000:]


def test_without_io_uring_the_threads_read_and_the_log_says_so(shim: Path, right: str) -> None:
    """With it the same command reads through it, or the first half would show nothing."""
    without = generate(shim, "no-uring", 0, "uring")
    assert without.returncode == 0 and without.stdout == right
    assert "4 threads, reads" in without.stderr and "this kernel has no io_uring" in without.stderr
    with_it = generate(shim, "none", 0, "uring")
    assert with_it.returncode == 0 and with_it.stdout == right
    if "this kernel has no io_uring" in with_it.stderr:
        pytest.skip("this kernel has no io_uring anyway")
    assert "reads under way by io_uring" in with_it.stderr


def test_a_single_failed_read_fails_one_call_or_is_tried_again(shim: Path, right: str) -> None:
    """Read ahead, nobody needs it: the run goes on. Needed: the run ends. Either way no wrong token."""
    for after in range(60, 600, 90):
        done = generate(shim, "once", after)
        assert right.startswith(done.stdout.rstrip("\n")), (after, right, done.stdout)
        assert (done.stdout == right) == (done.returncode == 0), done.stderr[-2000:]


def test_a_replaced_file_is_read_to_the_end_from_where_it_was_opened(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    shutil.copy(HIGH, model)
    decoder = Decoder(model, cache="2MiB")
    try:
        assert decoder.decode(5, 6, 7) == 0
        (tmp_path / "other.gguf").write_bytes(b"another file" * 1000)
        os.replace(tmp_path / "other.gguf", model)
        assert decoder.decode(8, 9, 10) == 0
    finally:
        decoder.close()


def test_a_file_that_is_written_to_while_running_fails_the_decode_call(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    shutil.copy(HIGH, model)
    decoder = Decoder(model, cache="2MiB")
    try:
        assert decoder.decode(5, 6, 7) == 0
        with open(model, "r+b") as file:
            file.seek(model.stat().st_size // 2)
            file.write(b"\0" * 4096)
        assert decoder.decode(8, 9, 10) == -3
        assert "written to while in use" in "".join(decoder.log)
    finally:
        decoder.close()
