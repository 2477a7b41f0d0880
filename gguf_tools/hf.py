"""Hugging Face folders as input, through upstream's own converter.

The converter runs as a program of its own (it needs the extra `[hf]`: torch, transformers and others) from the
llama.cpp source tree that HOBBIT_LLAMA_CPP_DIR names or that the build prepared. Its GGUF lies in the output folder
until the pair is complete, so that a run that was stopped goes on without converting again.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from gguf_tools.errors import ExitCode, ToolError, io_error, show
from gguf_tools.output import make_folder
from gguf_tools.pair import PairOptions

SCRIPT = "convert_hf_to_gguf.py"


def find_converter() -> Path:
    """Upstream's conversion script; raises ToolError with the places looked at."""
    folders = []
    if os.environ.get("HOBBIT_LLAMA_CPP_DIR"):
        folders.append(Path(os.environ["HOBBIT_LLAMA_CPP_DIR"]))
    folders.append(Path(__file__).resolve().parent.parent / "build" / "llama.cpp-src")
    for folder in folders:
        if (folder / SCRIPT).is_file():
            return folder / SCRIPT
    raise ToolError(
        f"{SCRIPT} was not found in {', '.join(map(str, folders))}; "
        "name a llama.cpp source tree in HOBBIT_LLAMA_CPP_DIR",
        code=ExitCode.LIBRARY,
    )


def explain(output: str) -> str:
    """The reason in a failed converter's output, in one line."""
    if "pre-tokenizer was not recognized" in output:
        return (
            "upstream's converter does not know this tokenizer (its hash is not in get_vocab_base_pre): "
            "update llama.cpp, or convert the model elsewhere and give the GGUF"
        )
    if "is not supported" in output and "Model" in output:
        line = next(line for line in output.splitlines() if "is not supported" in line)
        return f"upstream's converter: {show(line.strip(), 300)}"
    if "ModuleNotFoundError" in output:
        line = next(line for line in output.splitlines() if "ModuleNotFoundError" in line)
        return f"the converter lacks a package ({show(line.strip(), 200)}): install the extra [hf]"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return f"upstream's converter failed: {show(lines[-1], 300) if lines else 'it said nothing'}"


@contextlib.contextmanager
def converted(options: PairOptions, *, dry_run: bool) -> Iterator[PairOptions]:
    """Convert the folder `options.model` and yield options for the GGUF; it is removed when the body succeeds."""
    folder = options.model
    if not (folder / "config.json").is_file():
        raise ToolError(
            "is a folder without config.json, so not a Hugging Face model", file=folder, code=ExitCode.USAGE
        )
    if dry_run:
        raise ToolError(
            "a Hugging Face folder must be converted to be looked at: no --dry-run", file=folder, code=ExitCode.USAGE
        )
    script = find_converter()
    name = options.name or folder.resolve().name
    make_folder(options.folder)
    gguf = options.folder / f"{name}.converted.gguf"
    if not gguf.exists():
        _convert(script, folder, gguf)
    yield replace(options, model=gguf, name=name)
    gguf.unlink(missing_ok=True)


def _convert(script: Path, folder: Path, gguf: Path) -> None:
    part = gguf.with_name(gguf.name + ".part")
    command = [sys.executable, str(script), str(folder), "--outfile", str(part), "--outtype", "auto"]
    environment = dict(os.environ, PYTHONPATH=str(script.parent / "gguf-py"))
    try:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        if done.returncode != 0 or not part.exists():
            part.unlink(missing_ok=True)
            raise ToolError(explain(done.stdout.decode("utf-8", "replace")), file=folder, code=ExitCode.UNSUPPORTED)
        os.replace(part, gguf)
    except OSError as error:
        raise io_error(error, "cannot convert", folder) from None
