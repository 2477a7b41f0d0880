"""Exact mode on the embedded model: the same logits as stock, bit for bit, whatever the cache holds."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import BUILD, DIFFERENT, EQUAL, ROOT, RunExact, clean_environment, program

HIGH = ROOT / "models" / "tiny-moe" / "tiny-moe-F16.gguf"
LOW = BUILD / "models" / "tiny-moe-Q4_0.gguf"
TOKENS = ("--prompt", 200, "--generate", 64, "--ubatch", "1,32,512")


@pytest.mark.parametrize("cache", ["15%", "40%", "100%"])
def test_exact_mode_equals_stock(exact: RunExact, cache: str) -> None:
    result = exact(HIGH, *TOKENS, "--cache", cache, "--hobbit", "precision=high")
    assert result.code == EQUAL, result.differences()
    for run in result.runs:
        assert (run["prompt"], run["generated"]) == (200, 64)
        assert run["stats"]["total"]["selected_low"] == run["stats"]["total"]["selected_skip"] == 0
    assert result.total("misses_high") > 0
    assert result.total("evictions") > 0 or cache == "100%"
    assert result.total("streamed") > 0 or cache != "15%"  # where a layer's experts do not fit together


@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_exact_mode_equals_stock_with_and_without_flash_attention(exact: RunExact, flash_attn: str) -> None:
    result = exact(HIGH, *TOKENS, "--cache", "15%", "--flash-attn", flash_attn, "--threads", 1)
    assert result.code == EQUAL, result.differences()


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_the_policy_does_not_matter_to_the_result(exact: RunExact, policy: str) -> None:
    result = exact(HIGH, *TOKENS, "--cache", "min", "--hobbit", f"policy={policy}")
    assert result.code == EQUAL, result.differences()
    assert result.total("evictions") > 0


STRATEGIES = (
    ("policy=static", "prefetch=off"),
    ("policy=static", "unit=layer", "prefetch=off"),
    ("unit=layer",),
    ("policy=activations", "predictor=activations", "prefetch=2"),
    ("policy=lru-layer", "prefetch=1"),
)


@pytest.mark.parametrize("options", STRATEGIES, ids=" ".join)
def test_strategies_of_other_systems_are_exact(exact: RunExact, options: tuple[str, ...]) -> None:
    hobbit = [word for option in ("precision=high", *options) for word in ("--hobbit", option)]
    result = exact(HIGH, *TOKENS, "--cache", "40%", *hobbit)
    assert result.code == EQUAL, result.differences()
    keeps = "policy=static" in options or "unit=layer" in options
    assert (result.total("evictions") == 0) == keeps
    if "unit=layer" in options:  # every expert of every layer, at every step
        for run in result.runs:
            assert run["stats"]["total"]["lookups"] == 6 * 16 * run["stats"]["steps"]


def test_swapping_two_experts_changes_the_logits_of_stock(exact: RunExact, tmp_path: Path) -> None:
    result = exact(HIGH, "--swap-experts", tmp_path / "swapped.gguf")
    assert result.code == EQUAL, result.differences()
    assert result.report["swapped"]["different"] > 0
    assert not list(tmp_path.iterdir())


MIXED = ("--hobbit", f"low={LOW}", "--hobbit", "precision=paper")


@pytest.mark.parametrize("cache", ["15%", "40%", "100%"])
def test_deterministic_mode_gives_the_same_logits_whatever_the_cache_holds(exact: RunExact, cache: str) -> None:
    # all of both precisions fit into 200 % of the high one
    result = exact(HIGH, *TOKENS, *MIXED, "--hobbit", "deterministic=on", "--cache", cache, "--versus", "200%")
    assert result.code == EQUAL, result.differences()
    for counter in ("selected_high", "selected_low", "selected_skip", "evictions"):
        assert result.total(counter) > 0 or (counter, cache) == ("evictions", "100%"), counter


def test_without_deterministic_mode_a_resident_high_copy_serves_for_low(exact: RunExact) -> None:
    """Also the proof that the test above can fail."""
    result = exact(HIGH, *TOKENS, *MIXED, "--cache", "15%", "--versus", "200%")
    assert result.code == DIFFERENT


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_K", "Q8_0"])
def test_exact_mode_equals_stock_with_repacking_on(exact: RunExact, tmp_path: Path, quant: str) -> None:
    """Interleaved on this CPU or not: the same bits as stock's default; where it is, others than without repacking."""
    model = tmp_path / f"{quant}.gguf"
    quantize = [program("llama-quantize"), HIGH, model, quant, "2"]
    subprocess.run(list(map(str, quantize)), check=True, capture_output=True, env=clean_environment())
    small = ("--prompt", 60, "--generate", 8, "--ubatch", "1,12,60", "--cache", "15%")
    result = exact(model, *small, "--repack")
    assert result.code == EQUAL, result.differences()
    assert result.total("evictions") > 0 and result.total("streamed") > 0
    other = exact(model, *small, "--repack", "--hobbit", "repack=off")
    repacked = "repacked" in exact(model, *small, "--repack", "--verbose").stderr
    assert (other.code == DIFFERENT) == repacked


def test_low_precision_changes_the_logits(exact: RunExact) -> None:
    result = exact(HIGH, *TOKENS, "--hobbit", f"low={LOW}", "--hobbit", "precision=low", "--cache", "100%")
    assert result.code == DIFFERENT
    assert result.total("misses_low") > 0 and result.total("misses_high") == 0
