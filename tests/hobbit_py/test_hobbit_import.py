"""Which library gets loaded, and what is said when none fits. Each case is an interpreter of its own."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from hobbit_models import BUILD, ROOT, run_python

from hobbit_py import _lib

WHERE = "import hobbit_py._lib as lib; print(lib.library_dir)"
LIBRARY = BUILD / "bin" / _lib.LIBRARY_NAMES[0]


def test_the_pin_is_the_same_everywhere() -> None:
    assert f'version = "{_lib.BINDING_VERSION}"' in re.sub(
        " +", " ", (ROOT / "llama.cpp" / "upstream.toml").read_text()
    )
    assert f'binding = ["llama-cpp-python=={_lib.BINDING_VERSION}"]' in (ROOT / "pyproject.toml").read_text()
    assert _lib.INSTALL_BINDING in (ROOT / "docs" / "python.md").read_text()


def test_a_clone_uses_its_build(tmp_path: Path) -> None:
    done = run_python(WHERE, cwd=tmp_path)
    assert done.stdout.strip() == str(ROOT / "build" / "bin"), done.stderr


@pytest.mark.parametrize("environment", [{"LLAMA_CPP_LIB_PATH": str(LIBRARY.parent)}, {"LLAMA_CPP_LIB": str(LIBRARY)}])
def test_the_environment_names_a_library(environment: dict[str, str]) -> None:
    done = run_python(WHERE + "; import llama_cpp.mtmd_cpp", **environment)
    assert done.stdout.strip() == str(LIBRARY.parent), done.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [("LLAMA_CPP_LIB_PATH", ""), ("LLAMA_CPP_LIB", "libllama.so"), ("LLAMA_CPP_LIB", "libother.so")],
)
def test_a_named_place_without_the_library_is_refused(tmp_path: Path, name: str, value: str) -> None:
    (tmp_path / "libother.so").touch()
    done = run_python("import hobbit_py", **{name: str(tmp_path / value)})
    assert done.returncode == 1
    assert re.search(rf"ImportError: {name}={re.escape(str(tmp_path))}.*{_lib.LIBRARY_NAMES[0]}", done.stderr)


def test_llama_cpp_may_come_first_if_its_library_is_ours() -> None:
    done = run_python(f"import llama_cpp; {WHERE}", LLAMA_CPP_LIB_PATH=str(LIBRARY.parent))
    assert done.stdout.strip() == str(LIBRARY.parent), done.stderr


FOREIGN = """
import ctypes, sys, types
package, module = types.ModuleType("llama_cpp"), types.ModuleType("llama_cpp.llama_cpp")
package.__path__ = []
module._lib, module._base_path = ctypes.CDLL({library!r}), "elsewhere"
package.llama_cpp = module
sys.modules |= {{"llama_cpp": package, "llama_cpp.llama_cpp": module}}
import hobbit_py
"""


def test_a_foreign_library_that_came_first_is_refused() -> None:
    done = run_python(FOREIGN.format(library=str(LIBRARY.with_name(LIBRARY.name.replace("llama", "ggml-base")))))
    assert done.returncode == 1
    assert "is not HOBBIT's; llama_cpp was imported before hobbit_py: import hobbit_py first" in done.stderr


def test_a_stock_library_is_refused(tmp_path: Path) -> None:
    """One with every function that llama-cpp-python asks for, and none of ours."""
    import llama_cpp.llama_cpp as binding

    names = set(re.findall(r'ctypes_function\(\s*"(\w+)"', Path(binding.__file__).read_text()))
    assert "llama_decode" in names
    source = "".join(f"void {name}(void) {{}}\n" for name in sorted(names))
    library = tmp_path / _lib.LIBRARY_NAMES[0]
    compiler = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(compiler, input=source, text=True, check=True)
    done = run_python("import hobbit_py", LLAMA_CPP_LIB_PATH=str(tmp_path))
    assert done.returncode == 1
    says = f"{library} is not HOBBIT's; set LLAMA_CPP_LIB_PATH to the folder of HOBBIT's library"
    assert says in done.stderr


VERSION = """
import importlib.metadata as metadata
real = metadata.version
def version(name):
    if name != "llama-cpp-python":
        return real(name)
    if {found!r} is None:
        raise metadata.PackageNotFoundError(name)
    return {found!r}
metadata.version = version
import hobbit_py
"""


@pytest.mark.parametrize("found", [None, "0.3.35"])
def test_without_the_binding_the_message_is_the_command_that_installs_it(found: str | None) -> None:
    done = run_python(VERSION.format(found=found))
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(_lib.INSTALL_BINDING)
    assert found is None or found in done.stderr
