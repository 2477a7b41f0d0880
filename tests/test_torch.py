"""The engine's mixed precision against a forward pass in PyTorch that shares no code with it.

Skipped where this interpreter has no torch and HOBBIT_TORCH_PYTHON does not name one that has torch and transformers:

    python3 -m venv torch && torch/bin/pip install torch transformers gguf==0.19.0
    HOBBIT_TORCH_PYTHON=torch/bin/python .venv/bin/python -m pytest -s tests/test_torch.py
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
from gguf_tools.pair import PairOptions, plan_pair, run_pair
from hobbit_py import Hobbit

HIGH = ROOT / "models" / "tiny-moe" / "tiny-moe-F16.gguf"
MODES = ("high", "hobbit", "low")
N_TOKENS = 320

_here = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
PYTHON = os.environ.get("HOBBIT_TORCH_PYTHON") or (sys.executable if _here else None)
pytestmark = pytest.mark.skipif(PYTHON is None, reason="no torch here, and no HOBBIT_TORCH_PYTHON that has it")

Logits = dict[str, np.ndarray]


@dataclass(frozen=True)
class Engine:
    """What the engine said: the tokens (also in a file) and logits by mode, one token per step."""

    low: Path
    file: Path
    tokens: np.ndarray
    logits: Logits


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """A Q2_K low copy, so that a wrong precision weighs more than the rounding of activations."""
    folder = tmp_path_factory.mktemp("torch")
    plan = plan_pair(PairOptions(HIGH, folder, low=("q2_k",), low_only=True, name="x"))
    run_pair(plan)
    plan.close()
    low_file = folder / "x.experts-Q2_K.gguf"
    text = (ROOT / "models" / "tiny-moe" / "heldout.txt").read_bytes()[:4000]
    logits: Logits = {}
    tokens: list[int] = []
    for mode in MODES:
        options: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "logits_all": True, "verbose": False}
        rule = "paper" if mode == "hobbit" else mode
        with Hobbit(HIGH, low=low_file, cache="16MiB", precision=rule, deterministic=True, **options) as model:
            tokens = model.tokenize(text)[:N_TOKENS]
            for token in tokens:
                model.eval([token])
            logits[mode] = model.scores[: len(tokens)].copy()
            low, skip = model.cache_stats().total.mass
            assert (low > 0) == (mode != "high") and (skip > 0) == (mode == "hobbit")
    file = folder / "tokens.npy"
    np.save(file, np.array(tokens))
    return Engine(low_file, file, np.array(tokens), logits)


def reference(engine: Engine, *more: str) -> Logits:
    out = engine.file.with_suffix(".npz")
    arguments = ["--high", HIGH, "--low", engine.low, "--tokens", engine.file, "--out", out, *more]
    done = subprocess.run(
        [str(PYTHON), str(ROOT / "tests" / "torch_reference.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return dict(np.load(out))


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def divergence(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """KL divergence of b from a at each position, in nats."""
    la, lb = log_softmax(a), log_softmax(b)
    return np.asarray((np.exp(la) * (la - lb)).sum(axis=1))


def distance(a: np.ndarray, b: np.ndarray, tokens: np.ndarray) -> tuple[float, float]:
    """Mean KL divergence of b from a, and mean |difference of log p| of the tokens that follow."""
    la, lb = log_softmax(a), log_softmax(b)
    rows = np.arange(len(tokens) - 1)
    return float(divergence(a, b).mean()), float(np.abs(la[rows, tokens[1:]] - lb[rows, tokens[1:]]).mean())


MAX_KL, MAX_DLOGP = 5e-4, 0.02  # what rounding of activations and a few near ties of the router may do
WRONG_KL = (
    5e-3  # what a wrong precision in the first layer does to the tokens that chose the expert, in mixed precision
)


def test_torch_computes_the_same_in_every_mode(engine: Engine) -> None:
    theirs = reference(engine)
    for mode in MODES:
        kl, dlogp = distance(theirs[mode], engine.logits[mode], engine.tokens)
        print(f"{mode}: mean KL {kl:.2e}, mean |dlogp| {dlogp:.2e}")
        assert kl <= MAX_KL and dlogp <= MAX_DLOGP, f"{mode}: mean KL {kl:.2e}, mean |dlogp| {dlogp:.2e}"


@pytest.mark.parametrize(("layer", "expert"), [(0, 3), (2, 5), (5, 9)])
def test_one_expert_in_the_wrong_precision_is_seen(engine: Engine, layer: int, expert: int) -> None:
    """The proof that the test above can fail: where the router chose the expert, the distance is another one."""
    right, wrong = reference(engine), reference(engine, "--wrong-precision", f"{layer},{expert}")
    for mode in MODES:
        chosen = (wrong[f"{mode}.ids"][layer] == expert).any(axis=1)
        clean = divergence(right[mode], engine.logits[mode])[chosen].mean()
        seen = divergence(wrong[mode], engine.logits[mode])[chosen].mean()
        kl, dlogp = distance(wrong[mode], engine.logits[mode], engine.tokens)
        print(
            f"{mode}, expert {expert} of layer {layer} wrong: mean KL {kl:.2e}, mean |dlogp| {dlogp:.2e}; "
            f"at the {chosen.sum()} tokens that chose it mean KL {seen:.2e}, {clean:.2e} if right"
        )
        assert chosen.sum() >= 10, chosen.sum()
        assert seen > 2 * clean
        if layer == 0:  # what the first layer does wrong all others carry on
            assert kl > MAX_KL and dlogp > MAX_DLOGP
            assert mode != "hobbit" or seen > WRONG_KL
