"""Reading a pair back: the base file, the expert files it names, and the promises they make to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from gguf_tools.errors import ExitCode, ToolError, show
from gguf_tools.keys import (
    K_HIGH,
    K_HIGH_SIZE,
    K_ID,
    K_KEPT,
    K_LOW,
    K_LOW_SHA,
    K_LOW_SIZES,
    K_ROLE,
    K_ROUTER,
    K_SHA,
    K_SOURCE_NOTES,
    K_SOURCE_SHA,
    K_SOURCE_SIZE,
    K_TENSORS,
    K_TYPE,
    K_VERSION,
    VERSION,
)
from gguf_tools.model import ExpertTensor, GgufFile, Model


def plain_name(name: str) -> bool:
    """Whether a base file may name an expert file so: a file of its own folder, on any system, whatever shows it."""
    return name not in ("", ".", "..") and len(name) <= 240 and name.isprintable() and not set(name) & set("/\\:")


def safe_name(name: str, base: Path) -> Path:
    """The path of a file that `base` names; only a plain name in the base's own folder is accepted."""
    if not plain_name(name):
        raise ToolError(
            f"names the expert file '{show(name, 120)}', which is not a plain file name in its own folder", file=base
        )
    return base.parent / name


class ExpertsFile:
    """An expert file of a pair, or one made by `--low-only`."""

    def __init__(self, path: Path) -> None:
        self.file = GgufFile(path)
        try:
            ctx = self.file.context
            check_version(self.file)
            self.role = ctx.get_str(K_ROLE)
            if self.role not in ("high", "low"):
                raise ToolError(f"{K_ROLE} is {self.role!r}, not 'high' or 'low'", file=path)
            self.label = ctx.get_str(K_TYPE) or "?"
            self.kept = ctx.get(K_KEPT) is True
            self.id = ctx.get_str(K_ID)
            self.router_hash = ctx.get_str(K_ROUTER)
            self.model = Model([self.file])
            self.experts: dict[str, ExpertTensor] = {e.name: e for e in self.model.require_experts()}
            known = self.experts.keys() | {t.name for _, t in self.model.routers}
            if len(known) != len(self.file.header.tensors):
                other = next(t.name for t in self.file.header.tensors if t.name not in known)
                raise ToolError(
                    "is not a routed expert tensor: it does not belong into an expert file", file=path, tensor=other
                )
            sums = ctx.get_strs(K_SHA)
            if sums is None or len(sums) != len(self.file.header.tensors):
                raise ToolError(
                    f"{K_SHA} does not hold one checksum for each of {len(self.file.header.tensors)} tensors", file=path
                )
            self.sums = {t.name: s for t, s in zip(self.file.header.tensors, sums, strict=True)}
        except BaseException:
            self.file.close()
            raise

    @property
    def path(self) -> Path:
        return self.file.path


@dataclass
class Pair:
    """An open pair. `tensors` is the merged model's order; `sums` and `low_sums` are what the base states."""

    base: GgufFile
    high: ExpertsFile
    lows: list[ExpertsFile]
    id: str
    router_hash: str
    tensors: list[str]
    sums: dict[str, str]
    low_sums: list[dict[str, str]]
    source_header_sha: str
    source_size: int
    source_notes: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.base.path

    @property
    def expert_files(self) -> list[ExpertsFile]:
        return [self.high, *self.lows]

    def expert_file(self, choice: str) -> ExpertsFile:
        """The file meant by 'high', 'low' (the first), a type such as 'q2_k', or a file name."""
        if choice == "low":
            return self.lows[0]
        for f in self.expert_files:
            if choice in ("high", f.path.name) and (choice != "high" or f is self.high):
                return f
        matches = [f for f in self.expert_files if f.label.lower() == choice.lower()]
        if len(matches) == 1:
            return matches[0]
        names = ", ".join(f"{f.role} ({f.label})" for f in self.expert_files)
        raise ToolError(f"has no experts '{show(choice, 120)}'; it has {names}", file=self.path, code=ExitCode.USAGE)

    def close(self) -> None:
        self.base.close()
        for f in self.expert_files:
            f.file.close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_version(file: GgufFile) -> None:
    version = file.context.get(K_VERSION)
    if not isinstance(version, int) or isinstance(version, bool):
        raise ToolError(
            "is not part of a pair (it has no hobbit.pair.version)", file=file.path, code=ExitCode.UNSUPPORTED
        )
    if version != VERSION:
        raise ToolError(
            f"has pair version {version}; this gguf-tools knows version {VERSION}",
            file=file.path,
            code=ExitCode.UNSUPPORTED,
        )


def kind_of(path: Path) -> str:
    """'base', 'experts' or 'model'."""
    file = GgufFile(path)
    try:
        if K_VERSION not in file.context:
            return "model"
        return "experts" if K_ROLE in file.context else "base"
    finally:
        file.close()


def open_pair(path: Path | str) -> Pair:
    """Open a pair from its base file and check that its parts belong together; contents are not read."""
    base = GgufFile(Path(path))
    opened: list[GgufFile] = [base]
    try:
        return _open(base, opened)
    except BaseException:
        for f in opened:
            f.close()
        raise


def _text(base: GgufFile, key: str) -> str:
    value = base.context.get_str(key)
    if value is None:
        raise ToolError(f"has no string {key}", file=base.path)
    return value


def _texts(base: GgufFile, key: str) -> list[str]:
    value = base.context.get_strs(key)
    if value is None:
        raise ToolError(f"has no list of strings {key}", file=base.path)
    return value


def _open(base: GgufFile, opened: list[GgufFile]) -> Pair:
    check_version(base)
    if K_ROLE in base.context:
        raise ToolError("is an expert file; give the base file of the pair", file=base.path, code=ExitCode.USAGE)
    identity, router = _text(base, K_ID), _text(base, K_ROUTER)
    high_name, low_names = _text(base, K_HIGH), _texts(base, K_LOW)
    sizes_low = base.context.get(K_LOW_SIZES)
    if not isinstance(sizes_low, np.ndarray) or sizes_low.dtype.kind != "u" or len(sizes_low) != len(low_names):
        raise ToolError(f"{K_LOW_SIZES} does not hold one size for each of {len(low_names)} files", file=base.path)
    sizes = [base.context.get_int(K_HIGH_SIZE), *sizes_low.tolist()]
    files: list[ExpertsFile] = []
    for name, size in zip([high_name, *low_names], sizes, strict=True):
        f = ExpertsFile(safe_name(name, base.path))
        opened.append(f.file)
        _check_part(base, f, "low" if files else "high", identity, router, size)
        files.append(f)
    high, lows = files[0], files[1:]
    for low in lows:
        _same_shapes(high, low)
    tensors = _texts(base, K_TENSORS)
    own = set(base.tensors)
    if overlap := own & set(high.experts):
        raise ToolError("is both in the base and in the expert file", file=base.path, tensor=min(overlap))
    if len(set(tensors)) != len(tensors) or set(tensors) != own | set(high.experts):
        wrong = sorted(set(tensors) ^ (own | set(high.experts)))
        raise ToolError(
            f"{K_TENSORS} does not match the tensors of the files", file=base.path, tensor=wrong[0] if wrong else None
        )
    sums, low_sums = _texts(base, K_SHA), _texts(base, K_LOW_SHA)
    n = len(high.experts)
    if len(sums) != len(tensors) or len(low_sums) != n * len(lows):
        raise ToolError(f"{K_SHA} or {K_LOW_SHA} does not hold one checksum for each tensor", file=base.path)
    pair = Pair(
        base=base,
        high=high,
        lows=lows,
        id=identity,
        router_hash=router,
        tensors=tensors,
        sums=dict(zip(tensors, sums, strict=True)),
        low_sums=[dict(zip(high.experts, low_sums[i * n : (i + 1) * n], strict=True)) for i in range(len(lows))],
        source_header_sha=base.context.get_str(K_SOURCE_SHA) or "",
        source_size=base.context.get_int(K_SOURCE_SIZE) or 0,
        source_notes=base.context.get_strs(K_SOURCE_NOTES) or [],
    )
    _check_stated_sums(pair)
    return pair


def _check_part(base: GgufFile, f: ExpertsFile, role: str, identity: str, router: str, size: int | None) -> None:
    def differ(what: str, found: object, expected: object) -> ToolError:
        return ToolError(f"{what} is {found}, {base.path.name} expects {expected}", file=f.path, code=ExitCode.MISMATCH)

    if f.id != identity:
        raise differ("pair id", f.id, identity)
    if f.router_hash != router:
        raise differ("router hash", f.router_hash, router)
    if f.role != role:
        raise differ("role", f.role, role)
    if f.file.header.file_size != size:
        raise differ("size", f"{f.file.header.file_size} bytes", f"{size} bytes")
    arch = base.context.get_str("general.architecture")
    if f.model.architecture != arch:
        raise differ("architecture", f.model.architecture, arch)


def _same_shapes(high: ExpertsFile, low: ExpertsFile) -> None:
    if list(high.experts) != list(low.experts):
        missing = sorted(set(high.experts) ^ set(low.experts)) or ["?"]
        raise ToolError(
            f"is not in both {high.path.name} and {low.path.name}",
            file=low.path,
            tensor=missing[0],
            code=ExitCode.MISMATCH,
        )
    for name, e in high.experts.items():
        if low.experts[name].ne != e.ne:
            raise ToolError(
                f"has shape {list(low.experts[name].ne)}, the high one {list(e.ne)}",
                file=low.path,
                tensor=name,
                code=ExitCode.MISMATCH,
            )


def _check_stated_sums(pair: Pair) -> None:
    """The base's and the expert file's checksums must agree: an exchanged file is noticed without reading it."""
    for f, sums in [(pair.high, pair.sums), *zip(pair.lows, pair.low_sums, strict=True)]:
        for name in f.experts:
            if f.sums[name] != sums[name]:
                raise ToolError(
                    f"states another checksum than {pair.path.name} does",
                    file=f.path,
                    tensor=name,
                    code=ExitCode.MISMATCH,
                )
