"""llama.cpp/prepare.py on a three-file upstream: what it writes, leaves alone and refuses."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import shutil
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "llama.cpp" / "prepare.py"
UPSTREAM = {
    "CMakeLists.txt": "project(x)\n",
    "ggml/a.c": "".join(f"int a{i};\n" for i in range(20)),
    "src/b.cpp": "".join(f"int b{i};\n" for i in range(20)),
}
PATCH = """Why: a test. Unnecessary when: never.

diff --git a/src/b.cpp b/src/b.cpp
--- a/src/b.cpp
+++ b/src/b.cpp
@@ -5,2 +5,3 @@
 int b4;
+int patched;
 int b5;
"""


class Setup:
    """The module with its folders in tmp_path, and what a build would call on it."""

    def __init__(self, module: ModuleType, root: Path) -> None:
        self.module, self.root = module, root
        self.out, self.cache, self.patches = root / "out", root / "cache", root / "patches"

    def run(self, stock: bool = False, force: bool = False) -> None:
        self.module.prepare(self.out, self.cache, stock, force)

    def contents(self) -> dict[str, str]:
        return {str(p): (self.out / p).read_text() for p in self.module.tree_files(self.out)}

    def times(self) -> dict[str, int]:
        return {str(p): (self.out / p).stat().st_mtime_ns for p in self.module.tree_files(self.out)}

    def age(self) -> None:
        """Set files and stamp back, so that a rewritten file shows in its time."""
        for path in self.out.rglob("*"):
            if path.is_file():
                os.utime(path, (10**9, 10**9))

    def write_patch(self, name: str, text: str = PATCH) -> None:
        (self.patches / name).write_text(text)

    def write_sdist(self) -> Path:
        path = self.root / "pkg-1.0.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name, text in {**UPSTREAM, ".git": "gitdir: x\n"}.items():
                info = tarfile.TarInfo(f"pkg-1.0/vendor/llama.cpp/{name}")
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text.encode()))
        return path


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setup:
    spec = importlib.util.spec_from_file_location("hobbit_prepare", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    made = Setup(module, tmp_path)
    made.patches.mkdir()
    sdist = made.write_sdist()
    checksum = hashlib.sha256(sdist.read_bytes()).hexdigest()
    pin = tmp_path / "upstream.toml"
    pin.write_text(
        f'# comment\npackage = "pkg"\nversion = "1.0"\nsha256 = "{checksum}"  # of it\n'
        'subdir = "vendor/llama.cpp"\nllama_commit = "abc"\n'
    )
    monkeypatch.setattr(module, "PATCHES", made.patches)
    monkeypatch.setattr(module, "PIN_FILE", pin)
    monkeypatch.setattr(module.read_pin, "__defaults__", (pin,))
    monkeypatch.delenv("HOBBIT_LLAMA_CPP_DIR", raising=False)
    monkeypatch.setenv("HOBBIT_SDIST", str(sdist))
    return made


def test_the_real_pin_can_be_read(setup: Setup) -> None:
    pin = setup.module.read_pin(SCRIPT.parent / "upstream.toml")
    assert pin["package"] == "llama-cpp-python" and len(pin["sha256"]) == 64


def test_without_patches_the_tree_is_upstream(setup: Setup) -> None:
    setup.run()
    assert setup.contents() == UPSTREAM


def test_a_patch_is_applied_and_stock_ignores_it(setup: Setup) -> None:
    setup.write_patch("0001-b.patch")
    setup.run()
    assert "int patched;" in setup.contents()["src/b.cpp"]
    setup.run(stock=True)
    assert setup.contents() == UPSTREAM


def test_second_run_touches_nothing_and_a_new_patch_only_its_file(setup: Setup) -> None:
    setup.run()
    setup.age()
    before = setup.times()
    setup.run()
    assert setup.times() == before
    setup.write_patch("0001-b.patch")
    setup.run()
    assert {name for name, time in setup.times().items() if time != before[name]} == {"src/b.cpp"}


def test_a_removed_patch_restores_its_file_with_a_new_time(setup: Setup) -> None:
    setup.write_patch("0001-b.patch")
    setup.run()
    setup.age()
    (setup.patches / "0001-b.patch").unlink()
    setup.run()
    assert setup.contents() == UPSTREAM
    assert setup.times()["src/b.cpp"] > 10**18 and setup.times()["ggml/a.c"] == 10**18


def test_a_patch_that_does_not_fit_is_named_and_the_tree_stays(setup: Setup) -> None:
    setup.run()
    setup.write_patch("0001-bad.patch", PATCH.replace("int b4;", "int gone;"))
    with pytest.raises(setup.module.PrepareError, match=r"(?s)0001-bad\.patch does not apply.*src/b\.cpp"):
        setup.run()
    assert setup.contents() == UPSTREAM
    assert not list(setup.root.glob("out.new"))


def test_an_interrupted_run_is_completed_by_the_next(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.write_patch("0001-b.patch")

    def interrupt(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            setup.run()
    assert not (setup.out / setup.module.STAMP).exists()
    setup.run()
    assert "int patched;" in setup.contents()["src/b.cpp"]


def test_an_edited_file_is_not_overwritten_without_force(setup: Setup) -> None:
    setup.run()
    setup.age()
    (setup.out / "src/b.cpp").write_text("mine\n")
    setup.write_patch("0001-b.patch")
    with pytest.raises(setup.module.PrepareError, match=r"edited by hand(?s:.*)src/b\.cpp"):
        setup.run()
    assert setup.contents()["src/b.cpp"] == "mine\n"
    setup.run(force=True)
    assert "int patched;" in setup.contents()["src/b.cpp"]


def test_a_download_with_another_checksum_is_refused(setup: Setup) -> None:
    with (setup.root / "pkg-1.0.tar.gz").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(setup.module.PrepareError, match="sha256 is"):
        setup.run()
    assert not setup.out.exists()


def test_an_unpacked_sdist_of_another_version_is_refused(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = setup.root / "unpacked"
    for name, text in UPSTREAM.items():
        path = folder / "vendor/llama.cpp" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("HOBBIT_SDIST", str(folder))
    (folder / "PKG-INFO").write_text("Name: pkg\nVersion: 0.9\n")
    with pytest.raises(setup.module.PrepareError, match=r"holds pkg 0\.9"):
        setup.run()
    (folder / "PKG-INFO").write_text("Name: pkg\nVersion: 1.0\n")
    setup.run()
    assert setup.contents() == UPSTREAM


def test_a_llama_cpp_tree_is_used_and_its_changes_are_seen(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.run()
    tree = setup.root / "tree"
    shutil.copytree(setup.out, tree)
    monkeypatch.setenv("HOBBIT_LLAMA_CPP_DIR", str(tree))
    (tree / "ggml/a.c").write_text("int other;\n")
    setup.run()
    assert setup.contents()["ggml/a.c"] == "int other;\n"


def test_patches_survive_edit_and_export(setup: Setup) -> None:
    setup.write_patch("0001-b.patch")
    setup.run()
    expected = setup.contents()
    setup.module.edit(setup.root / "edit", setup.cache)
    setup.module.export(setup.root / "edit")
    first = (setup.patches / "0001-b.patch").read_text()
    assert first.startswith("Why: a test. Unnecessary when: never.\n\ndiff --git ")
    shutil.rmtree(setup.root / "edit")
    setup.module.edit(setup.root / "edit", setup.cache)
    setup.module.export(setup.root / "edit")
    assert (setup.patches / "0001-b.patch").read_text() == first
    setup.run()
    assert setup.contents() == expected
