"""llama-cpp-python's own tests, from the pinned source distribution, with Hobbit in exact mode in the place of Llama.

Run are those that need no download, and the prompt cache's with the embedded model as the downloaded one. The files are
unpacked at test time; packages that they import only for other tests are replaced by empty ones.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

from hobbit_models import ROOT, SMALL, high

from hobbit_py._lib import BINDING_VERSION

NAME = f"llama_cpp_python-{BINDING_VERSION}"
FILES = (
    "tests/test_llama.py",
    "tests/test_llama_chat_format.py",
    "tests/test_llama_grammar.py",
    "tests/test_llama_speculative.py",
    "vendor/llama.cpp/models/ggml-vocab-llama-spm.gguf",
)

CONFTEST = """
import sys, types
from hobbit_py import Hobbit

sys.modules |= {name: types.ModuleType(name) for name in ("scipy", "scipy.special", "huggingface_hub")}
sys.modules["scipy.special"].log_softmax = None
sys.modules["huggingface_hub"].hf_hub_download = lambda repo_id, filename: MODEL

class Exact(Hobbit):
    def __init__(self, model_path, **llama):
        super().__init__(model_path, precision="high", cache=CACHE, **llama)

import llama_cpp
llama_cpp.Llama = Exact
"""


def unpack(folder: Path) -> None:
    """FILES of the source distribution, from the folder HOBBIT_SDIST or the archive that the build keeps."""
    named = Path(os.environ.get("HOBBIT_SDIST", ROOT / "build" / "_upstream" / f"{NAME}.tar.gz"))
    assert named.exists(), f"{named} is missing: make build fetches it"
    if named.is_dir():
        for name in FILES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((named / name).read_bytes())
        return
    left = {f"{NAME}/{name}" for name in FILES}
    with tarfile.open(named) as archive:
        for member in archive:
            if member.name in left:
                left.remove(member.name)
                content = archive.extractfile(member)
                assert content is not None
                target = folder / member.name.removeprefix(NAME + "/")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content.read())
            if not left:
                return
    raise AssertionError(f"{named} lacks {left}")


def test_upstreams_tests_pass_with_hobbit_in_exact_mode(tmp_path: Path) -> None:
    unpack(tmp_path)
    (tmp_path / "tests" / "conftest.py").write_text(f"MODEL, CACHE = {high()!r}, {SMALL!r}\n{CONFTEST}")
    # of test_llama.py, what needs no download or only a transformer; of the other files, all
    ours = "(version or tokenization or fresh) and not llama_cpp_recurrent and not llama_cpp_hybrid"
    chosen = ["tests", "-k", f"(test_llama.py and {ours}) or not test_llama.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 12, done.stdout
