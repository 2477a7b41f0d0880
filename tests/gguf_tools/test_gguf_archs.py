"""Every MoE architecture of upstream's generator goes through pair, verify and merge, and comes back byte for byte."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from conftest import clean_environment
from gguf_models import built_program, read_back
from test_archs import QUANTISED, SAVED, TYPES, write_model

from gguf_tools.errors import ExitCode, ToolError
from gguf_tools.merge import plan_merge, run_merge
from gguf_tools.pair import PairOptions, plan_pair, run_pair
from gguf_tools.verify import verify

EXPERT = re.compile(r"^blk\.\d+\.ffn_(gate|up|down|gate_up)_exps\.weight$")


def pair_and_back(source: Path, folder: Path) -> None:
    plan = plan_pair(PairOptions(source, folder, high="keep", low=("q4_0",), name="x", force=True))
    assert not plan.source_notes
    low = next((f for f in plan.files if f.role == "low"), None)
    run_pair(plan)
    plan.close()
    names = {name for name in read_back(source) if EXPERT.match(name)}
    assert names and set(read_back(plan.files[0].path)) == names
    assert low and set(read_back(low.path)) == names
    assert not names & set(read_back(folder / "x.base.gguf"))
    report = verify(folder / "x.base.gguf")
    assert report.ok, report.problems
    assert len(report.errors) == len(names) and all(0 <= e.error < 0.2 for e in report.errors)
    merge = plan_merge(folder / "x.base.gguf", folder / "merged.gguf", force=True)
    assert run_merge(merge).identical
    merge.close()
    assert (folder / "merged.gguf").read_bytes() == source.read_bytes()
    for path in folder.iterdir():
        path.unlink()


@pytest.mark.parametrize("arch", SAVED)
def test_every_moe_architecture_is_paired_and_merged_back(arch: str, tmp_path: Path) -> None:
    source = write_model(arch, tmp_path)
    assert source
    if not any(EXPERT.match(name) for name in read_back(source)):
        with pytest.raises(ToolError, match="is a dense model") as error:
            plan_pair(PairOptions(source, tmp_path / "out"))
        assert error.value.code == ExitCode.UNSUPPORTED
    else:
        pair_and_back(source, tmp_path / "out")
    source.unlink()


@pytest.mark.parametrize("arch", QUANTISED)
def test_other_types_are_paired_and_merged_back(arch: str, tmp_path: Path) -> None:
    f32 = write_model(arch, tmp_path)
    assert f32
    path = tmp_path / "other.gguf"
    for kind in TYPES:
        command = [str(built_program("llama-quantize")), "--pure", str(f32), str(path), kind, "2"]
        subprocess.run(command, env=clean_environment(), check=True, capture_output=True, timeout=300)
        pair_and_back(path, tmp_path / "out")
    f32.unlink()
    path.unlink()
