"""Exact mode on a pair: the base file alone gives the logits of the unpaired model, bit for bit.

Needs hobbit-exact's --managed FILE.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import EQUAL, REFUSED, ROOT, RunExact
from test_archs import QUANTISED, write_model

from gguf_tools.pair import PairOptions, plan_pair, run_pair

TINY = ROOT / "models" / "tiny-moe" / "tiny-moe-F16.gguf"


def make_pair(source: Path, folder: Path) -> Path:
    plan = plan_pair(PairOptions(source, folder, high="keep", name="x"))
    run_pair(plan)
    plan.close()
    return folder / "x.base.gguf"


@pytest.mark.parametrize("cache", ["15%", "100%"])
def test_pair_of_tiny_moe_equals_the_unpaired_file(exact: RunExact, tmp_path: Path, cache: str) -> None:
    base = make_pair(TINY, tmp_path)
    options = ("--prompt", 200, "--generate", 64, "--ubatch", "1,32,512", "--hobbit", "precision=high")
    result = exact(TINY, "--managed", base, "--cache", cache, *options)
    assert result.code == EQUAL, result.differences()
    assert result.total("misses_high") > 0


@pytest.mark.parametrize("arch", QUANTISED)
def test_pair_of_an_architecture_equals_stock(exact: RunExact, tmp_path: Path, arch: str) -> None:
    source = write_model(arch, tmp_path)
    assert source
    base = make_pair(source, tmp_path / "out")
    options = ("--prompt", 64, "--generate", 12, "--ubatch", "1,8,512", "--hobbit", "precision=high")
    result = exact(source, "--managed", base, "--cache", "min", *options)
    assert result.code == EQUAL, result.differences()
    assert result.total("evictions") > 0


def test_experts_of_another_pair_are_refused(exact: RunExact, tmp_path: Path) -> None:
    """Same names, same shapes, another model: nothing but the pair id tells them apart."""
    bases = []
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        source = write_model("qwen3moe", folder, seed=seed)
        assert source
        bases.append(make_pair(source, folder / "out"))
    ours, theirs = (next(base.parent.glob("x.experts-*.gguf")) for base in bases)
    ours.unlink()
    ours.hardlink_to(theirs)
    result = exact(source, "--managed", bases[0], "--cache", "min")
    assert result.code == REFUSED, result.differences()
