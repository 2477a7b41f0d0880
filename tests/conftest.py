"""What the tests of the built programs share: where they are, and how to ask hobbit-exact."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# a runner in the background may leave SIGINT ignored, and programs started from here would inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
BUILD = Path(os.environ.get("HOBBIT_BUILD", ROOT / "build"))

EQUAL, DIFFERENT, BROKEN, REFUSED = 0, 1, 2, 3  # exit codes of hobbit-exact


def clean_environment(**more: str) -> dict[str, str]:
    """Ours without the variables that change what the programs do, and with `more`.

    Threads wait without spinning: on a busy machine the tiny steps of the tests would take fifty times as long.
    """
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_", "HOBBIT_", "GGML_"))}
    return ours | {"OMP_WAIT_POLICY": "passive"} | more


def program(name: str) -> Path:
    path = BUILD / "bin" / name
    assert path.is_file(), f"{path} is missing: make build, then cmake --build {BUILD}"
    return path


def finish(*command: object, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end without input; what it says may hold any bytes."""
    return subprocess.run(
        list(map(str, command)),
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
    )


@dataclass(frozen=True)
class Exact:
    """One answer of hobbit-exact: its exit code, and its line of JSON."""

    code: int
    report: dict[str, Any]
    stderr: str

    @property
    def runs(self) -> list[dict[str, Any]]:
        return list(self.report.get("runs", []))

    def total(self, counter: str) -> int:
        """A counter of the cache over all layers and runs."""
        return sum(run["stats"]["total"][counter] for run in self.runs)

    def differences(self) -> str:
        """What a failed assertion should show: everything but the statistics."""
        runs = [{k: v for k, v in run.items() if k != "stats"} for run in self.runs]
        return f"exit code {self.code}: { ({**self.report, 'runs': runs}) } {self.stderr}"


RunExact = Callable[..., Exact]


@pytest.fixture(scope="session")
def exact() -> RunExact:
    """exact(model, "--prompt", 200, ..., HOBBIT_SIM_SEED=2): run hobbit-exact on a model."""

    def run(model: Path, *arguments: object, **environment: object) -> Exact:
        done = subprocess.run(
            [str(program("hobbit-exact")), "--model", str(model), *map(str, arguments)],
            env=clean_environment(**{k: str(v) for k, v in environment.items()}),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode in (EQUAL, DIFFERENT, REFUSED), (
            f"exit code {done.returncode}: {done.stdout}{done.stderr}"
        )
        return Exact(done.returncode, json.loads(done.stdout), done.stderr)

    return run
