"""What the tests of hobbit_py share: the models they load, and how.

HOBBIT_TEST_MODEL and HOBBIT_TEST_LOW name other files than the embedded model and its quantised copy.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

# threads that spin while they wait make a busy machine twenty times slower; read when the library is loaded
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from hobbit_py import CacheStats, Counters, Hobbit, LayerStats
from hobbit_py.hobbit import Llama
from hobbit_py.stats import COUNTERS

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("HOBBIT_BUILD", ROOT / "build"))
_HIGH = Path(os.environ.get("HOBBIT_TEST_MODEL", ROOT / "models" / "tiny-moe" / "tiny-moe-F16.gguf"))
_LOW = Path(os.environ.get("HOBBIT_TEST_LOW", BUILD / "models" / "tiny-moe-Q4_0.gguf"))

PROMPT = "In the beginning God created the heaven and the earth."
SMALL = "6MiB"  # holds a few of the model's experts
LARGE = "64MiB"  # holds all, in both precisions
COMMON: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}


def high() -> str:
    assert _HIGH.is_file(), f"{_HIGH} is missing: it is part of the repository, or HOBBIT_TEST_MODEL names another"
    return str(_HIGH)


def low() -> str:
    assert _LOW.is_file(), f"{_LOW} is missing: make models, or HOBBIT_TEST_LOW names another"
    return str(_LOW)


def hobbit(**options: Any) -> Hobbit:
    return Hobbit(options.pop("model_path", None) or high(), **{**COMMON, "cache": SMALL, **options})


def stock(**options: Any) -> Llama:
    return Llama(high(), **{**COMMON, **options})


def greedy(model: Any, n: int = 24, prompt: str = PROMPT) -> list[int]:
    """The first n tokens that a fresh model continues the prompt with."""
    tokens = []
    for token in model.generate(model.tokenize(prompt.encode()), temp=0.0):
        tokens.append(token)
        if len(tokens) == n:
            return tokens
    raise AssertionError("generate() ended by itself")


def logits(model: Any, tokens: list[int]) -> np.ndarray:
    """[token, vocabulary]: what a model that was loaded with logits_all says after each token."""
    model.reset()
    model.eval(tokens)
    return model.scores[: len(tokens)].copy()


def example(scale: int = 1, layers: int = 3) -> CacheStats:
    """Statistics whose total is the sum of its layers; twice the scale is twice of everything."""
    rows = []
    for i in range(layers):
        counts = {name: scale * (10 + i) for name in COUNTERS}
        counts |= {"hits": scale * (5 + i), "misses_high": scale * 3, "misses_low": scale, "skips": scale}
        rows.append(LayerStats(block=i + 1, **counts))
    total = Counters(**{name: sum(getattr(row, name) for row in rows) for name in COUNTERS})
    return CacheStats(
        precision="hobbit",
        policy="lru",
        cache_bytes=6 << 20,
        slots_high=12,
        slots_low=10,
        resident_high=11,
        resident_low=10,
        prompt_tokens=scale * 5,
        prompt_us=scale * 1000,
        decode_tokens=scale * 20,
        decode_us=scale * 10_000,
        steps=scale * 21,
        total=total,
        layers=tuple(rows),
    )


def run_python(code: str, *, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter with the repository on its path."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_", "MTMD_"))}
    env["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env | environment, capture_output=True, text=True, timeout=120
    )


def run_hobbit(*arguments: object, cwd: Path | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The command `hobbit` in a process of its own."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_", "MTMD_"))}
    env["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        [sys.executable, "-m", "hobbit_py", *map(str, arguments)],
        cwd=cwd,
        env=env,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
    )
