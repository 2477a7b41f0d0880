#!/usr/bin/env python3
"""Compile the CUDA files that the patches touch, for one GPU architecture, without a GPU.

    cuda_check.py --tree build/llama.cpp-src --out build/cuda-check [--arch 90] [FILE.cu ...]

A whole CUDA build takes long and a toolkit; this one catches the errors that a patch can
make in minutes and needs nvcc alone. A touched header is checked through the .cu files of
its folder that include it directly, and through one of the template instances that do; a
header that most files include, through the touched files alone. FILE.cu (relative to
ggml/src/ggml-cuda) adds files.
Where the toolkit has no cuBLAS headers, they come from the nvidia-cublas wheel, which is
unpacked into the output folder. Without nvcc this says so and succeeds.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
CUDA_FOLDER = "ggml/src/ggml-cuda/"
MANY_USERS = 16
DEFINITIONS = {
    "GGML_CUDA_PEER_MAX_BATCH_SIZE": "128",
    "GGML_CUDA_USE_GRAPHS": "1",
    "GGML_USE_CUDA": "1",
    "GGML_BACKEND_SHARED": "1",
    "GGML_BACKEND_BUILD": "1",
    "GGML_SHARED": "1",
    "NDEBUG": "1",
}


def touched_files(folder: Path) -> list[str]:
    """Paths below ggml-cuda/ that patches change or add."""
    found = set()
    for patch in sorted((HERE / "patches").glob("*.patch")):
        for match in re.finditer(r"^\+\+\+ b/(\S+)", patch.read_text(encoding="utf-8"), re.M):
            if match[1].startswith(CUDA_FOLDER) and (folder / match[1][len(CUDA_FOLDER) :]).is_file():
                found.add(match[1][len(CUDA_FOLDER) :])
    return sorted(found)


def files_to_compile(folder: Path, touched: list[str]) -> list[str]:
    files = {name for name in touched if name.endswith(".cu")}
    for header in {Path(name).name for name in touched if not name.endswith(".cu")}:
        include = re.compile(rf'^\s*#\s*include\s+"(?:[^"]*/)?{re.escape(header)}"', re.M)
        users = [
            sorted(str(p.relative_to(folder)) for p in folder.glob(pattern) if include.search(p.read_text("utf-8")))
            for pattern in ("*.cu", "template-instances/*.cu")
        ]
        if len(users[0]) > MANY_USERS:
            continue
        files.update(users[0])
        files.update(users[1][-1:])
    return sorted(files)


def toolkit_release(nvcc: str) -> str:
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"release (\d+\.\d+)", text)
    if match is None:
        raise SystemExit(f"cuda-check: error: {nvcc} --version names no release:\n{text}")
    return match[1]


def has_cublas(nvcc: str) -> bool:
    probe = subprocess.run(
        [nvcc, "-E", "-x", "cu", "-"], input="#include <cublas_v2.h>\n", capture_output=True, text=True
    )
    return probe.returncode == 0


def cublas_headers(release: str, out: Path) -> Path:
    """The include folder of the cuBLAS wheel for this toolkit release; only headers are kept."""
    headers = out / f"cublas-{release}"
    if headers.is_dir():
        return headers
    print(f"cuda-check: fetching the cuBLAS headers for CUDA {release}", flush=True)
    wheels = out / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    package = "nvidia-cublas" if int(release.split(".")[0]) >= 13 else "nvidia-cublas-cu12"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "-qq"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(wheels), f"{package}=={release}.*"]
    if subprocess.run(command, stdin=subprocess.DEVNULL).returncode != 0:
        raise SystemExit(f"cuda-check: error: pip could not download {package} {release}.*")
    partial = out / f"cublas-{release}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if "/include/" in name and name.endswith((".h", ".hpp")):
                    (partial / Path(name).name).write_bytes(archive.read(name))
    shutil.rmtree(wheels)
    if not (partial / "cublas_v2.h").is_file():
        raise SystemExit(f"cuda-check: error: {package} {release}.* holds no cublas_v2.h")
    partial.rename(headers)
    return headers


def compile_file(nvcc: str, tree: Path, name: str, arch: str, extra: list[str], out: Path) -> tuple[str, str]:
    """(file, compiler messages, empty when it compiled)."""
    target = out / f"{name.replace('/', '_')}.o"
    command = [nvcc, "-c", "-O1", "-std=c++17", f"-gencode=arch=compute_{arch},code=sm_{arch}"]
    command += ["-use_fast_math", "-extended-lambda", "-Xcompiler", "-fPIC"]
    command += [f"-I{tree / folder}" for folder in ("ggml/include", "ggml/src", "ggml/src/ggml-cuda")]
    command += extra + [f"-D{key}={value}" for key, value in DEFINITIONS.items()]
    command += [str(tree / CUDA_FOLDER / name), "-o", str(target)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return name, "" if done.returncode == 0 else (done.stderr or done.stdout or f"{nvcc} exited {done.returncode}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tree", type=Path, required=True, help="the prepared source tree")
    parser.add_argument("--out", type=Path, required=True, help="where objects and headers go")
    parser.add_argument("--arch", default="90", help="compute capability without the dot (default: 90)")
    parser.add_argument("files", nargs="*", metavar="FILE.cu", help="also compile these files of ggml-cuda")
    args = parser.parse_args()

    tree, out = args.tree.resolve(), args.out.resolve()
    folder = tree / CUDA_FOLDER
    files = sorted({*args.files, *files_to_compile(folder, touched_files(folder))})
    if not files:
        print("cuda-check: the patches touch no CUDA file")
        return 0
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        print(f"cuda-check: skipped, no nvcc; it would compile {', '.join(files)}")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    extra = [] if has_cublas(nvcc) else [f"-I{cublas_headers(toolkit_release(nvcc), out)}"]

    failed = 0
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for name, messages in pool.map(lambda f: compile_file(nvcc, tree, f, args.arch, extra, out), files):
            print(f"cuda-check: {name} {'failed' if messages else 'ok'}", flush=True)
            if messages:
                failed += 1
                print(messages)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
