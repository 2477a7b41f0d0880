"""Hugging Face folders: what our side does around upstream's converter, which is replaced by a script here."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_models import Moe

from gguf_tools import cli
from gguf_tools.errors import ExitCode
from gguf_tools.hf import explain

SCRIPT = """
import shutil, sys
out = sys.argv[sys.argv.index("--outfile") + 1]
assert sys.argv[sys.argv.index("--outtype") + 1] == "auto"
open(__file__ + ".calls", "a").write("x")
mode = open(sys.argv[1] + "/mode").read()
if mode == "good":
    shutil.copy(sys.argv[1] + "/source.gguf", out)
else:
    open(out, "w").write("half")
    sys.exit(mode)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder whose `mode` file tells the converter what to do."""
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp" / "convert_hf_to_gguf.py").write_text(SCRIPT)
    monkeypatch.setenv("HOBBIT_LLAMA_CPP_DIR", str(tmp_path / "llama.cpp"))
    folder = tmp_path / "my-moe"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "mode").write_text("good")
    Moe(type="BF16").build().write(folder / "source.gguf")
    return folder


def calls(folder: Path) -> int:
    return len((folder.parent / "llama.cpp" / "convert_hf_to_gguf.py.calls").read_text())


def test_folder_becomes_a_pair_and_the_intermediate_file_goes(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli.run(["pair", str(folder), "-o", str(out)]) == 0
    assert sorted(p.name for p in out.iterdir()) == [
        "my-moe.base.gguf",
        "my-moe.experts-BF16.gguf",
        "my-moe.experts-Q4_0.gguf",
    ]
    assert cli.run(["verify", str(out / "my-moe.base.gguf")]) == 0


def test_a_second_run_does_not_convert_again(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli.run(["pair", str(folder), "-o", str(out), "--low", "q2_k", "--no-fallback"]) == ExitCode.UNSUPPORTED
    assert [p.name for p in out.iterdir()] == ["my-moe.converted.gguf"]
    assert cli.run(["pair", str(folder), "-o", str(out), "--low", "q4_0"]) == 0
    assert calls(folder) == 1 and len(list(out.iterdir())) == 3


def test_an_unknown_tokenizer_is_reported_as_such(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    message = "NotImplementedError: BPE pre-tokenizer was not recognized - update get_vocab_base_pre()"
    (folder / "mode").write_text(message)
    assert cli.run(["pair", str(folder), "-o", str(tmp_path / "out")]) == ExitCode.UNSUPPORTED
    error = capfd.readouterr().err
    assert "does not know this tokenizer" in error and error.count("\n") == 1
    assert list((tmp_path / "out").iterdir()) == []


def test_reasons_are_one_line() -> None:
    assert "[hf]" in explain("Traceback ...\nModuleNotFoundError: No module named 'torch'\n")
    assert "Model FooForCausalLM is not supported" in explain(
        "ERROR:hf-to-gguf:Model FooForCausalLM is not supported\n"
    )
    assert explain("a\nlast words\n\n").endswith("last words")
    assert explain("") == "upstream's converter failed: it said nothing"


def test_folders_that_cannot_be_converted_are_usage_errors(folder: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert cli.run(["pair", str(folder), "-o", out, "--dry-run"]) == ExitCode.USAGE
    (folder / "config.json").unlink()
    assert cli.run(["pair", str(folder), "-o", out]) == ExitCode.USAGE
    assert not (tmp_path / "out").exists()


def test_missing_converter_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gguf_tools import hf

    monkeypatch.delenv("HOBBIT_LLAMA_CPP_DIR")
    monkeypatch.setattr(hf, "__file__", str(tmp_path / "elsewhere" / "gguf_tools" / "hf.py"))
    assert cli.run(["pair", str(folder), "-o", str(tmp_path / "out")]) == ExitCode.LIBRARY
