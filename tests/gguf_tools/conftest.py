"""Fixtures of the gguf_tools tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gguf_tools.ggml import find_library

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).resolve().parent))

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def cli() -> Run:
    """Run the command in a process of its own: what a user sees, an abort included."""

    def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "gguf_tools", *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


@pytest.fixture(scope="session")
def llama_quantize() -> Path:
    """Upstream's quantiser from the build that the library comes from."""
    program = find_library().parent / "llama-quantize"
    assert program.is_file(), f"{program} is missing: make build"
    return program
