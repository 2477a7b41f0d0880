"""What a benchmark of models larger than memory needs: a cgroup that caps memory and reads, and the disk's settings.

`Cage` is a child cgroup for one run: anonymous memory and page cache together stay under `memory` bytes, reads of the
block device under `read_bps` bytes per second (cgroup v1; v2 for memory alone). It wants root. `block_device`,
`read_ahead`, `bytes_read` and `drop_caches` act on the disk that holds a file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


class Cage:
    """A cgroup for one run; `note` says why there is no limit on memory where there is none.

    Pass `enter` as `preexec_fn`; `close` after the run has ended.
    """

    def __init__(self, memory: int | None = None, read_bps: int | None = None, device: Path | None = None) -> None:
        self.groups: list[Path] = []
        self.memory: Path | None = None
        self.note = ""
        self.v2 = (CGROUPS / "cgroup.controllers").exists()
        name = f"hobbit-bench-{os.getpid()}-{time.monotonic_ns()}"
        if memory is not None:
            parent = CGROUPS if self.v2 else CGROUPS / "memory"
            limit = "memory.max" if self.v2 else "memory.limit_in_bytes"
            if not self.v2 and not (parent / limit).exists():
                self.note = "no memory cgroup"
            else:
                self.memory = self._make(parent / name, limit, str(memory))
        if read_bps is not None:
            if self.v2 or device is None:
                raise SystemExit("throttled reads need the cgroup v1 blkio controller")
            number = (device / "dev").read_text().strip()
            if self._make(CGROUPS / "blkio" / name, "blkio.throttle.read_bps_device", f"{number} {read_bps}") is None:
                raise SystemExit(f"cannot throttle reads: {self.note}")

    def _make(self, path: Path, file: str, value: str) -> Path | None:
        try:
            path.mkdir()
            (path / file).write_text(value)
        except OSError as error:
            self.note = f"no cgroup: {error.strerror}"
            if path.exists():
                path.rmdir()
            return None
        self.groups.append(path)
        return path

    def enter(self) -> None:
        """In the child: move into the groups."""
        for group in self.groups:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    def close(self) -> tuple[int, int]:
        """(peak bytes of memory, page cache included; times the kernel killed something)."""
        peak = kills = 0
        if self.memory is not None:
            peak_file = self.memory / ("memory.peak" if self.v2 else "memory.max_usage_in_bytes")
            peak = int(peak_file.read_text()) if peak_file.exists() else 0
            events = (self.memory / ("memory.events" if self.v2 else "memory.oom_control")).read_text()
            kills = sum(int(line.split()[1]) for line in events.splitlines() if line.startswith("oom_kill "))
        for group in self.groups:
            with contextlib.suppress(OSError):
                if group == self.memory and not self.v2:
                    (group / "memory.force_empty").write_text("0")
                group.rmdir()
        return peak, kills


def finish(
    command: Sequence[object],
    cage: Cage | None = None,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, in a cage or not, without a terminal; what it wrote comes back as text.

    After `timeout` seconds it and what it started are killed: subprocess.TimeoutExpired.
    """
    process = subprocess.Popen(
        [str(c) for c in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        preexec_fn=cage.enter if cage else None,
        start_new_session=True,
        env=env,
    )
    with process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def block_device(path: Path) -> Path:
    """The sysfs folder of the disk that holds a file."""
    device = os.stat(path).st_dev
    folder = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    return folder if (folder / "queue").is_dir() else folder.parent


@contextlib.contextmanager
def read_ahead(device: Path, kib: int) -> Iterator[None]:
    """Sets the kernel's read-ahead, which mapped files live by, and restores it."""
    setting = device / "queue/read_ahead_kb"
    before = setting.read_text()
    setting.write_text(str(kib))
    try:
        yield
    finally:
        setting.write_text(before)


def bytes_read(device: Path) -> int:
    """Of the disk since the machine started, by anyone."""
    return int((device / "stat").read_text().split()[2]) * 512


def drop_caches() -> None:
    """Empties the page cache."""
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3")


def spread(values: Sequence[float], unit: float = 1.0, digits: int = 2) -> str:
    """Median with minimum and maximum, in units of `unit`."""
    middle, least, most = statistics.median(values) / unit, min(values) / unit, max(values) / unit
    return f"{middle:.{digits}f} ({least:.{digits}f} .. {most:.{digits}f})"
