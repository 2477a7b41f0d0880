"""Exact mode on the embedded model: the same logits as stock, bit for bit, whatever the cache holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import BUILD, DIFFERENT, EQUAL, ROOT, RunExact

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


def test_swapping_two_experts_changes_the_logits_of_stock(exact: RunExact, tmp_path: Path) -> None:
    result = exact(HIGH, "--swap-experts", tmp_path / "swapped.gguf")
    assert result.code == EQUAL, result.differences()
    assert result.report["swapped"]["different"] > 0
    assert not list(tmp_path.iterdir())


MIXED = ("--hobbit", f"low={LOW}", "--hobbit", "precision=hobbit")


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


def test_low_precision_changes_the_logits(exact: RunExact) -> None:
    result = exact(HIGH, *TOKENS, "--hobbit", f"low={LOW}", "--hobbit", "precision=low", "--cache", "100%")
    assert result.code == DIFFERENT
    assert result.total("misses_low") > 0 and result.total("misses_high") == 0
