"""Kills, full disks, read-only folders, files in use: nothing is lost or overwritten, nothing half-done looks done."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_models import Gguf, Moe

from gguf_tools import cli, output
from gguf_tools.errors import ExitCode, ToolError
from gguf_tools.merge import plan_merge, run_merge
from gguf_tools.output import Journal, NoProgress
from gguf_tools.pair import PairOptions, PairResult, plan_pair, run_pair

ROOT = Path(__file__).resolve().parents[2]

# Runs a pair and kills its own process with SIGKILL at a given point.
KILLED = """
import os, signal, sys
from pathlib import Path
from gguf_tools import output, pair
from gguf_tools.output import NoProgress

source, folder, where, count = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
left = count

def tick():
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)

class Killer(NoProgress):
    def advance(self, n_bytes):
        if where == "data":
            tick()

def wrap(owner, name, before):
    inner = getattr(owner, name)
    def call(*args, **kwargs):
        if before:
            tick()
        result = inner(*args, **kwargs)
        if not before:
            tick()
        return result
    setattr(owner, name, call)

if where == "journal":
    wrap(output.Journal, "add", True)
if where == "publish":
    wrap(output.OutputFile, "publish", True)
if where == "published":
    wrap(output.OutputFile, "publish", False)
plan = pair.plan_pair(pair.PairOptions(source, folder, low=("q4_0", "q8_0")))
pair.run_pair(plan, Killer())
"""

OPTIONS = {"low": ("q4_0", "q8_0")}


def make_pair(model: Path, folder: Path, progress: NoProgress | None = None, **options: object) -> PairResult:
    plan = plan_pair(PairOptions(model=model, folder=folder, **options))  # type: ignore[arg-type]
    try:
        return run_pair(plan, progress)
    finally:
        plan.close()


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()} if folder.exists() else {}


class After(NoProgress):
    """Calls a function when the n-th piece of data is through."""

    def __init__(self, n: int, then: Callable[[], None]) -> None:
        self.n = n
        self.then = then

    def advance(self, n_bytes: int) -> None:
        self.n -= 1
        if self.n == 0:
            self.then()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return Moe(n_layer=4).build().write(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("where", "count"),
    [
        ("data", 0),
        ("data", 5),
        ("data", 15),
        ("data", 21),
        ("journal", 0),
        ("journal", 3),
        ("journal", 22),
        ("journal", 24),
    ]
    + [("publish", n) for n in range(4)]
    + [("published", n) for n in range(3)],
)
def test_killed_pair_goes_on_and_ends_with_the_same_bytes(where: str, count: int, source: Path, tmp_path: Path) -> None:
    make_pair(source, tmp_path / "whole", **OPTIONS)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, source, tmp_path / "out", where, str(count)], cwd=ROOT, timeout=120
    )
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out" / "m.base.gguf").exists()  # the base comes last
    result = make_pair(source, tmp_path / "out", **OPTIONS)
    assert result.resumed_tensors > 0 or count == 0 or where == "data"
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_kill_after_everything_was_published_is_harmless(source: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, source, tmp_path / "out", "published", "3"], cwd=ROOT, timeout=120
    )
    assert done.returncode == -signal.SIGKILL
    result = make_pair(source, tmp_path / "out", **OPTIONS)
    assert result.resumed_tensors == 22
    assert len(contents(tmp_path / "out")) == 4


def test_data_that_was_lost_after_a_kill_is_made_again(source: Path, tmp_path: Path) -> None:
    make_pair(source, tmp_path / "whole", **OPTIONS)
    subprocess.run([sys.executable, "-c", KILLED, source, tmp_path / "out", "publish", "0"], cwd=ROOT, timeout=120)
    part = tmp_path / "out" / "m.experts-F16.gguf.part"
    data = bytearray(part.read_bytes())
    data[5000:6000] = b"\xff" * 1000
    part.write_bytes(data)
    assert make_pair(source, tmp_path / "out", **OPTIONS).resumed_tensors == 21
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_journal_of_another_source_is_not_continued(source: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, source, tmp_path / "out", "data", "15"], cwd=ROOT, timeout=120)
    other = Moe(n_layer=4, seed=2).build().write(source)
    assert make_pair(other, tmp_path / "out", **OPTIONS).resumed_tensors == 0
    make_pair(other, tmp_path / "whole", **OPTIONS)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_only_one_process_writes_a_pair(source: Path, tmp_path: Path) -> None:
    plan = plan_pair(PairOptions(source, tmp_path / "out"))
    (tmp_path / "out").mkdir()
    held = Journal(plan.journal_path, "x")
    with pytest.raises(ToolError, match="another gguf-tools") as error:
        run_pair(plan)
    assert error.value.code == ExitCode.CONFLICT
    held.close(remove=True)
    run_pair(plan)
    plan.close()


def test_interrupt_stops_cleanly_and_can_be_continued(source: Path, tmp_path: Path) -> None:
    make_pair(source, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        make_pair(source, tmp_path / "out", After(8, lambda: signal.raise_signal(signal.SIGINT)))
    assert not list((tmp_path / "out").glob("*.gguf"))
    make_pair(source, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_source_that_changes_during_the_run_is_noticed(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="changed while it was being read"):
        make_pair(source, tmp_path / "out", After(8, lambda: os.utime(source, (1, 1))))
    assert not list((tmp_path / "out").glob("*.gguf"))


def test_source_that_shrinks_during_the_run_is_an_error(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="shrank while being read"):
        make_pair(source, tmp_path / "out", After(1, lambda: os.truncate(source, 2000)), workers=1)
    assert not list((tmp_path / "out").glob("*.gguf"))


# ----------------------------------------------------------------------------------------------------------- disks


def test_disk_that_fills_up_is_a_clean_error_and_can_be_continued(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pair(source, tmp_path / "whole")
    real, left = os.pwrite, [200_000]

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(ToolError, match=r"No space left.*run the same command again") as error:
        make_pair(source, tmp_path / "out")
    assert error.value.code == ExitCode.IO and error.value.tensor
    assert not list((tmp_path / "out").glob("*.gguf"))
    monkeypatch.undo()
    assert make_pair(source, tmp_path / "out").resumed_tensors > 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_disk_that_is_too_small_is_refused_before_writing(source: Path, tmp_path: Path) -> None:
    """On a real 256 KiB file system, where the platform lets a test mount one."""
    small = tmp_path / "small"
    small.mkdir()
    command = f'mount -t tmpfs -o size=256k none "{small}" || exit; '
    command += (
        f'"{sys.executable}" -m gguf_tools pair "{source}" -o "{small}/out"; code=$?; ls -A "{small}"; exit $code'
    )
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no private mounts here: {done.stderr.strip()}")
    assert done.returncode == ExitCode.IO
    assert "too few" in done.stderr and done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_too_small_a_disk_is_refused_before_writing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs

    class Small:
        f_bavail, f_frsize = 10, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: (real(path), Small())[1])
    with pytest.raises(ToolError, match=r"needs \d+ bytes, 40960 are free \(\d+ too few\)"):
        plan_pair(PairOptions(source, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_read_only_folder_is_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    folder.chmod(0o555)
    if os.access(folder, os.W_OK):  # root may write anywhere: ask the check itself
        monkeypatch.setattr(output.os, "access", lambda *_: False)
    with pytest.raises(ToolError, match="cannot be written to") as error:
        make_pair(source, folder)
    assert error.value.code == ExitCode.IO
    folder.chmod(0o755)
    assert contents(folder) == {}


def test_read_only_file_system_is_an_error(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "ro"
    folder.mkdir()
    command = (
        f'mount -t tmpfs -o ro none "{folder}" && "{sys.executable}" -m gguf_tools pair "{source}" -o "{folder}/out"'
    )
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no private mounts here: {done.stderr.strip()}")
    assert done.returncode == ExitCode.IO and done.stderr.count("\n") == 1
    assert "Read-only file system" in done.stderr or "too few" in done.stderr


# ------------------------------------------------------------------------------------------------- inputs and outputs


def test_existing_outputs_are_kept_unless_forced(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    make_pair(source, out)
    before = contents(out)
    (out / "m.experts-F16.gguf").write_bytes(b"mine")
    with pytest.raises(ToolError, match="exists; --force replaces it") as error:
        plan_pair(PairOptions(source, out))
    assert error.value.code == ExitCode.CONFLICT
    assert (out / "m.experts-F16.gguf").read_bytes() == b"mine"
    make_pair(source, out, force=True)
    assert contents(out) == before


@pytest.mark.parametrize("link", ["same", "symlink", "hardlink", "part"])
def test_an_input_is_never_an_output(link: str, tmp_path: Path) -> None:
    model = Moe().build()
    source = model.write(tmp_path / "x.base.gguf")
    if link == "part":
        source = source.rename(tmp_path / "x.base.gguf.part")
    if link == "symlink":
        source = source.rename(tmp_path / "m.gguf")
        (tmp_path / "x.base.gguf").symlink_to(source)
    if link == "hardlink":
        os.link(source, tmp_path / "m.gguf")
        source = tmp_path / "m.gguf"
    with pytest.raises(ToolError, match="is an input and an output") as error:
        plan_pair(PairOptions(source, tmp_path, name="x", force=True))
    assert error.value.code == ExitCode.CONFLICT
    assert source.read_bytes() == model.to_bytes()


def test_merge_never_writes_over_its_pair(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    make_pair(source, out)
    before = contents(out)
    for name in before:
        with pytest.raises(ToolError, match="is an input and an output"):
            plan_merge(out / "m.base.gguf", out / name, force=True)
    assert contents(out) == before


def test_merge_keeps_an_existing_file(source: Path, tmp_path: Path) -> None:
    make_pair(source, tmp_path / "out")
    target = tmp_path / "merged.gguf"
    target.write_bytes(b"mine")
    with pytest.raises(ToolError, match="exists"):
        plan_merge(tmp_path / "out" / "m.base.gguf", target)
    plan = plan_merge(tmp_path / "out" / "m.base.gguf", target, force=True)
    run_merge(plan)
    plan.close()
    assert target.read_bytes()[:4] == b"GGUF"


def test_same_type_for_high_and_low_is_refused(tmp_path: Path) -> None:
    source = Moe(type="Q8_0").build().write(tmp_path / "m.gguf")
    with pytest.raises(ToolError, match="would be written twice"):
        plan_pair(PairOptions(source, tmp_path / "out", low=("q8_0",)))


def test_dry_run_writes_nothing(source: Path, tmp_path: Path) -> None:
    assert cli.run(["pair", str(source), "-o", str(tmp_path / "out"), "--dry-run"]) == 0
    assert not (tmp_path / "out").exists()
    make_pair(source, tmp_path / "out")
    before = contents(tmp_path / "out")
    assert cli.run(["merge", str(tmp_path / "out" / "m.base.gguf"), "-o", str(tmp_path / "x.gguf"), "--dry-run"]) == 0
    assert contents(tmp_path / "out") == before and not (tmp_path / "x.gguf").exists()


@pytest.mark.parametrize("name", ["modèle 日本語 😀", "m [red]x[bold]", "-q", "a'b\"c", "m-00001-of-00002"])
def test_odd_names_work(name: str, tmp_path: Path) -> None:
    folder = tmp_path / f"{name}-00001-of-00002.dir"
    source = Moe(type="F16").build().write(folder / f"{name}.gguf")
    out = folder / "out"
    assert cli.run(["pair", "-o", str(out), "--high", "keep", "--", str(source)]) == 0
    base = out / f"{name}.base.gguf"
    assert cli.run(["verify", "--", str(base)]) == 0
    assert cli.run(["inspect", "--", str(base)]) == 0
    assert cli.run(["merge", "-o", str(folder / "merged.gguf"), "--", str(base)]) == 0
    assert (folder / "merged.gguf").read_bytes() == source.read_bytes()


def test_name_that_is_not_unicode_needs_another(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.gguf"))
    try:
        Moe().build().write(path)
    except OSError:
        pytest.skip("this file system has only Unicode names")
    assert cli.run(["pair", str(path), "-o", str(tmp_path / "out")]) == ExitCode.USAGE
    assert "--name" in capfd.readouterr().err
    assert cli.run(["pair", str(path), "-o", str(tmp_path / "out"), "--name", "m"]) == 0


@pytest.mark.parametrize("name", ["", "a/b", "..", ".x", "/x"])
def test_name_must_be_plain(name: str, source: Path, tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="not a plain file name"):
        plan_pair(PairOptions(source, tmp_path / "out", name=name))


def test_output_folder_that_is_a_file_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(ToolError) as error:
        make_pair(source, tmp_path / "out")
    assert error.value.code in (ExitCode.CONFLICT, ExitCode.IO)


def test_memory_does_not_follow_the_model(tmp_path: Path) -> None:
    """A 96 MiB model is converted under an address-space limit that its tensors alone would break."""
    moe = Moe(n_embd=1024, n_ff=1024, n_expert=8, n_layer=1, type="F32")
    source = moe.build().write(tmp_path / "m.gguf")
    script = (
        "import sys, resource\n"
        "from gguf_tools import cli, ggml\n"
        "import gguf_tools.imatrix\n"
        "ggml.tensor_types()\n"
        "size = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "limit = size + (64 << 20) + (160 << 20)  # buffers; and thread stacks with malloc arenas\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))\n"
        "base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "code = cli.run(sys.argv[1:])\n"
        "grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base\n"
        "print('grown', grown)\n"
        "sys.exit(code or (99 if grown > 64 << 10 else 0))\n"
    )
    arguments = ["pair", str(source), "-o", str(tmp_path / "out"), "--low", "q4_0", "-t", "2"]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]


def test_unused_models_stay_untouched(source: Path, tmp_path: Path) -> None:
    before = source.read_bytes(), source.stat().st_mtime_ns
    make_pair(source, tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    assert (source.read_bytes(), source.stat().st_mtime_ns) == before


def test_trailing_gguf_in_a_tensor_is_data(tmp_path: Path) -> None:
    """The check for joined files looks behind the last tensor only."""
    model: Gguf = Moe(type="F16").build()
    t = model.tensors[2]
    model.tensors[2] = type(t)(t.name, t.type, t.ne, b"GGUF" + t.data[4:])
    make_pair(model.write(tmp_path / "m.gguf"), tmp_path / "out")


@pytest.mark.parametrize("stem", ["qwen3:30b", "back\\slash", "x" * 245])
def test_names_that_a_reader_would_refuse_are_not_written(stem: str, tmp_path: Path) -> None:
    source = Moe().build().write(tmp_path / f"{stem}.gguf")
    with pytest.raises(ToolError, match="use --name"):
        plan_pair(PairOptions(source, tmp_path / "out"))
    make_pair(source, tmp_path / "out", name="m")
