"""The examples of docs/python.md, each in a fresh interpreter, with the embedded model under the names they use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hobbit_models import ROOT, high, low, run_python

EXAMPLES = re.findall(r"^\*\*(.+?)\*\*.*?^```python\n(.+?)^```", (ROOT / "docs" / "python.md").read_text(), re.M | re.S)


def test_there_are_five() -> None:
    assert len(EXAMPLES) == 5


@pytest.mark.parametrize(("title", "code"), EXAMPLES, ids=[title for title, _ in EXAMPLES])
def test_example(title: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "model-Q8_0.gguf").symlink_to(high())
    (tmp_path / "model-Q2_K.gguf").symlink_to(low())
    done = run_python(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert done.stderr == ""
