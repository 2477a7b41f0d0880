"""A model as the tools see it: one or several GGUF files, and which of its tensors are routed experts.

`open_model` accepts any shard and finds the others; `Model.experts` holds the routed experts under their modern
names, whatever the source calls them. A routed expert tensor is `blk.N.ffn_{gate,up,down,gate_up}_exps.weight` with
shape [n_in, n_out, n_expert]; legacy files hold one matrix per expert (`blk.N.ffn_gate.E.weight`) instead, which
become the segments of one tensor here. Shared experts (`_shexp`), chunked experts (`_chexps`), biases, scales and
norms belong to the base.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from gguf_tools.errors import ExitCode, ToolError
from gguf_tools.ggml import GgufContext, TensorType
from gguf_tools.header import Header, TensorInfo, open_regular, read_header

_SHARD_NAME = re.compile(r"^(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)
_EXPERT = re.compile(r"^blk\.(0|[1-9]\d{0,4})\.ffn_(gate|up|down|gate_up)_exps\.weight$")
_LEGACY = re.compile(r"^blk\.(0|[1-9]\d{0,4})\.ffn_(gate|up|down)\.(0|[1-9]\d{0,4})\.weight$")
_ROUTER = re.compile(r"^blk\.(0|[1-9]\d{0,4})\.ffn_gate_inp\.weight$")

ROLES = ("gate", "up", "down", "gate_up")
_ROLE_SETS = ({"gate", "up", "down"}, {"up", "down"}, {"gate_up", "down"})
SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")


class GgufFile:
    """One open file: its accepted header, a descriptor for positioned reads, and its metadata through ggml."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: Header = read_header(path)
        self.fd = open_regular(path)

    @cached_property
    def context(self) -> GgufContext:
        try:
            return GgufContext.from_header(self.header.raw)
        except ToolError as error:
            raise ToolError(str(error), file=self.path) from None

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        return {t.name: t for t in self.header.tensors}

    def check_unchanged(self) -> None:
        """Raise if somebody wrote to the file since it was opened."""
        for status in (os.fstat(self.fd), os.stat(self.path)):
            if (status.st_size, status.st_mtime_ns) != (self.header.file_size, self.header.mtime_ns):
                raise ToolError("changed while it was being read", file=self.path, code=ExitCode.IO)

    def read_into(self, buffer: memoryview, offset: int, tensor: str) -> None:
        """Fill `buffer` from `offset`; a short read names the tensor."""
        done = 0
        try:
            while done < len(buffer):
                n = os.preadv(self.fd, [buffer[done:]], offset + done)
                if n == 0:
                    raise ToolError(
                        f"ends at byte {offset + done}; it shrank while being read",
                        file=self.path,
                        tensor=tensor,
                        code=ExitCode.IO,
                    )
                done += n
        except OSError as error:
            raise ToolError(
                f"cannot read byte {offset + done}: {error.strerror}", file=self.path, tensor=tensor, code=ExitCode.IO
            ) from None

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True)
class Segment:
    """`count` consecutive experts from expert `first`, contiguous in one file at `offset`."""

    file: int
    type: TensorType
    offset: int
    first: int
    count: int
    name: str  # the tensor's name in the file


@dataclass(frozen=True)
class ExpertTensor:
    """One role of one layer: `ne` = (row length, rows, experts)."""

    name: str
    layer: int
    role: str
    ne: tuple[int, int, int]
    segments: tuple[Segment, ...]

    @property
    def n_expert(self) -> int:
        return self.ne[2]

    @property
    def type(self) -> TensorType | None:
        """The type, or None when a legacy file mixes types among the experts."""
        types = {s.type.index for s in self.segments}
        return self.segments[0].type if len(types) == 1 else None

    @property
    def legacy(self) -> bool:
        return self.segments[0].name != self.name

    def expert_bytes(self, t: TensorType) -> int:
        """Bytes of one expert's matrix when stored as `t`."""
        return t.row_bytes(self.ne[0]) * self.ne[1]

    def bytes_as(self, t: TensorType) -> int:
        return self.expert_bytes(t) * self.ne[2]

    @property
    def source_bytes(self) -> int:
        return sum(self.expert_bytes(s.type) * s.count for s in self.segments)


@dataclass
class Model:
    """The files of a model in shard order and its tensors in file order."""

    files: list[GgufFile]
    notes: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.files[0].path

    @property
    def context(self) -> GgufContext:
        """The metadata: that of the first shard."""
        return self.files[0].context

    @property
    def stem(self) -> str:
        """The file name without `.gguf` and shard number."""
        match = _SHARD_NAME.match(self.path.name)
        if match and len(self.files) > 1:
            return match["stem"]
        return self.path.name[:-5] if self.path.name.endswith(".gguf") else self.path.name

    @cached_property
    def tensors(self) -> list[tuple[int, TensorInfo]]:
        return [(i, t) for i, f in enumerate(self.files) for t in f.header.tensors]

    @property
    def architecture(self) -> str:
        arch = self.context.get_str("general.architecture")
        if not arch:
            raise ToolError("has no general.architecture", file=self.path, code=ExitCode.UNSUPPORTED)
        return arch

    def arch_int(self, key: str) -> int | None:
        """An integer of the architecture, e.g. `expert_count`; the largest element if it is an array."""
        value = self.context.get(f"{self.architecture}.{key}")
        if isinstance(value, bool):
            return None
        if isinstance(value, int):
            return value
        if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu":
            return int(value.max())
        return None

    @cached_property
    def experts(self) -> list[ExpertTensor]:
        """Routed expert tensors by layer and role; raises for shapes that no MoE layer has. Empty for a dense model."""
        return _find_experts(self)

    @cached_property
    def merged_names(self) -> list[str]:
        """All tensors in source order, legacy experts as one tensor where their first matrix stood."""
        legacy = {s.name: e.name for e in self.experts for s in e.segments}
        return list(dict.fromkeys(legacy.get(t.name, t.name) for _, t in self.tensors))

    @cached_property
    def base_tensors(self) -> list[tuple[int, TensorInfo]]:
        """Everything but routed experts, in source order."""
        used = {s.name for e in self.experts for s in e.segments}
        return [(i, t) for i, t in self.tensors if t.name not in used]

    @cached_property
    def routers(self) -> list[tuple[int, TensorInfo]]:
        """The `ffn_gate_inp.weight` tensors in order of layer."""
        found = [(int(m[1]), i, t) for i, t in self.tensors if (m := _ROUTER.match(t.name))]
        return [(i, t) for _, i, t in sorted(found, key=lambda r: r[0])]

    @cached_property
    def router_hash(self) -> str:
        """SHA-256 over the raw bytes of all `ffn_gate_inp.weight` tensors in order of layer, in hex."""
        if not self.routers:
            raise ToolError(
                "has expert tensors but no router (blk.N.ffn_gate_inp.weight)",
                file=self.path,
                code=ExitCode.UNSUPPORTED,
            )
        digest = hashlib.sha256()
        buffer = bytearray(1 << 20)
        for i, t in self.routers:
            for start in range(0, t.size, len(buffer)):
                view = memoryview(buffer)[: min(len(buffer), t.size - start)]
                self.files[i].read_into(view, t.offset + start, t.name)
                digest.update(view)
        return digest.hexdigest()

    @cached_property
    def identity(self) -> str:
        """32 hex digits that two files share only if they come from the same weights.

        SHA-256 over the headers, the router hash and the first 4 KiB of every segment of every expert tensor: cheap,
        and the same whether a pair or only a low file is made.
        """
        digest = hashlib.sha256(b"hobbit pair 1\0")
        for f in self.files:
            digest.update(hashlib.sha256(f.header.raw).digest())
        digest.update(self.router_hash.encode())
        for e in self.experts:
            for s in e.segments:
                view = memoryview(bytearray(min(4096, e.expert_bytes(s.type))))
                self.files[s.file].read_into(view, s.offset, s.name)
                digest.update(view)
        return digest.hexdigest()[:32]

    def require_experts(self) -> list[ExpertTensor]:
        if not self.experts:
            raise ToolError(
                "is a dense model: it has no routed experts (blk.N.ffn_*_exps.weight), so there is nothing to pair",
                file=self.path,
                code=ExitCode.UNSUPPORTED,
            )
        return self.experts

    def check_unchanged(self) -> None:
        for f in self.files:
            f.check_unchanged()

    def close(self) -> None:
        for f in self.files:
            f.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---------------------------------------------------------------------------------------------------------- opening


def open_model(path: Path | str) -> Model:
    """Open a GGUF file, or all shards of a sharded one starting from any of them."""
    path = Path(path)
    first = GgufFile(path)
    opened = [first]
    try:
        count = first.context.get_int("split.count") or 0
        total = first.context.get_int("split.tensors.count")
        if count <= 1:
            return Model([first])
        if total is not None and total == len(first.header.tensors):
            return Model(
                [first], [f"{path.name}: stale split.* keys (it claims {count} shards but holds all {total} tensors)"]
            )
        shards = _shard_paths(path, first, count)
        files: list[GgufFile] = []
        for i, shard in enumerate(shards):
            f = first if _same_file(shard, path) else GgufFile(shard)
            if f is not first:
                opened.append(f)
            _check_shard(f, i, count, total)
            files.append(f)
        seen: dict[str, Path] = {}
        for f in files:
            for name in f.tensors:
                if name in seen:
                    raise ToolError(f"is also in {seen[name].name}", file=f.path, tensor=name)
                seen[name] = f.path
        if total is not None and total != len(seen):
            raise ToolError(f"the {count} shards hold {len(seen)} tensors, split.tensors.count says {total}", file=path)
        return Model(files)
    except BaseException:
        for f in opened:
            f.close()
        raise


def _same_file(a: Path, b: Path) -> bool:
    try:
        return os.path.samefile(a, b)
    except OSError:
        return False


def _shard_paths(path: Path, first: GgufFile, count: int) -> list[Path]:
    no = first.context.get_int("split.no")
    match = _SHARD_NAME.match(path.name)
    if not match or int(match["count"]) != count or no is None or int(match["no"]) != no + 1:
        number = "?" if no is None else no + 1
        raise ToolError(
            f"is shard {number} of {count}, but its name does not end in -{number:0>5}-of-{count:05}.gguf, "
            "so the others cannot be found",
            file=path,
        )
    paths = [path.with_name(f"{match['stem']}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ToolError(f"of its {count} shards these are missing: {', '.join(missing[:3])}{more}", file=path)
    return paths


def _check_shard(f: GgufFile, i: int, count: int, total: int | None) -> None:
    for key, expected in (("split.no", i), ("split.count", count), ("split.tensors.count", total)):
        value = f.context.get_int(key)
        if value != expected:
            raise ToolError(f"{key} is {value}, expected {expected}: it belongs to another set of shards", file=f.path)


# ---------------------------------------------------------------------------------------------------------- experts


def _find_experts(model: Model) -> list[ExpertTensor]:
    modern: list[ExpertTensor] = []
    legacy: dict[tuple[int, str], dict[int, tuple[int, TensorInfo]]] = {}
    for i, t in model.tensors:
        if match := _EXPERT.match(t.name):
            ne = t.ne + (1,) * (4 - len(t.ne))
            if ne[3] != 1 or 0 in ne or len(t.ne) < 2:
                raise ToolError(
                    f"has shape {list(t.ne)}, not [n_in, n_out, n_expert]", file=model.files[i].path, tensor=t.name
                )
            segment = Segment(i, t.type, t.offset, 0, ne[2], t.name)
            modern.append(ExpertTensor(t.name, int(match[1]), match[2], (ne[0], ne[1], ne[2]), (segment,)))
        elif match := _LEGACY.match(t.name):
            legacy.setdefault((int(match[1]), match[2]), {})[int(match[3])] = (i, t)
    modern += [_fuse_legacy(model, layer, role, parts) for (layer, role), parts in legacy.items()]
    modern.sort(key=lambda e: (e.layer, ROLES.index(e.role)))
    _check_layers(model, modern)
    return modern


def _fuse_legacy(model: Model, layer: int, role: str, parts: dict[int, tuple[int, TensorInfo]]) -> ExpertTensor:
    count = max(model.arch_int("expert_count") or 0, max(parts) + 1)
    for e in range(count):
        if e not in parts:
            raise ToolError(
                f"expert {e} of {count} is missing", file=model.path, tensor=f"blk.{layer}.ffn_{role}.{e}.weight"
            )
    shape = parts[0][1].ne
    segments = []
    for e in range(count):
        i, t = parts[e]
        if t.ne != shape or len(shape) != 2 or 0 in shape:
            raise ToolError(
                f"has shape {list(t.ne)}, expert 0 has {list(shape)}", file=model.files[i].path, tensor=t.name
            )
        segments.append(Segment(i, t.type, t.offset, e, 1, t.name))
    name = f"blk.{layer}.ffn_{role}_exps.weight"
    return ExpertTensor(name, layer, role, (shape[0], shape[1], count), tuple(segments))


def _check_layers(model: Model, experts: list[ExpertTensor]) -> None:
    layers: dict[int, dict[str, ExpertTensor]] = {}
    for e in experts:
        roles = layers.setdefault(e.layer, {})
        if e.role in roles:
            raise ToolError("exists under its modern and its legacy name", file=model.path, tensor=e.name)
        roles[e.role] = e
    for layer, roles in layers.items():
        if set(roles) not in _ROLE_SETS:
            raise ToolError(f"layer {layer} has experts for {', '.join(roles)} only", file=model.path)
        counts = {e.n_expert for e in roles.values()}
        if len(counts) > 1:
            raise ToolError(
                f"layer {layer} has tensors of {' and '.join(map(str, sorted(counts)))} experts", file=model.path
            )
        down = roles["down"]
        for role, e in roles.items():
            width = down.ne[0] * (2 if role == "gate_up" else 1)
            if role != "down" and e.ne[1] != width:
                raise ToolError(f"has {e.ne[1]} rows, the down tensor needs {width}", file=model.path, tensor=e.name)
    if layers:
        stated = model.arch_int("expert_count")
        found = {e.n_expert for e in experts}
        if stated is not None and stated not in found:
            raise ToolError(f"states {stated} experts, its tensors have {sorted(found)}", file=model.path)


def layers_of(experts: list[ExpertTensor]) -> dict[int, list[ExpertTensor]]:
    """Expert tensors by layer, in order."""
    layers: dict[int, list[ExpertTensor]] = {}
    for e in experts:
        layers.setdefault(e.layer, []).append(e)
    return layers
