"""`inspect`: what is in a model or a pair, how its experts lie in the file, and what fits into a given memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gguf_tools.keys import K_VERSION
from gguf_tools.model import ExpertTensor, Model, layers_of, open_model
from gguf_tools.pairfile import ExpertsFile, kind_of, open_pair

BLOCK = 4096  # bytes that a direct read must be aligned to, on any current disk


@dataclass(frozen=True)
class Copy:
    """One precision of one layer's experts."""

    label: str
    types: dict[str, str]  # role -> type
    expert_bytes: int  # one expert, all roles
    layer_bytes: int
    reads: int  # contiguous pieces per expert
    aligned: bool  # every piece of every expert starts and ends on a block


@dataclass(frozen=True)
class Layer:
    layer: int
    n_expert: int
    copies: list[Copy]


@dataclass
class Inspection:
    """`layers` is empty for a dense model."""

    kind: str
    files: list[dict[str, Any]]
    architecture: str
    name: str
    n_layers: int | None
    n_expert: int
    n_used: int | None
    n_shared: int | None
    base_bytes: int
    layers: list[Layer] = field(default_factory=list)
    pair_id: str | None = None
    router_hash: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def labels(self) -> list[str]:
        return [c.label for c in self.layers[0].copies] if self.layers else []

    def expert_bytes(self, label: str) -> int:
        """Bytes of all experts in one precision."""
        return sum(c.layer_bytes for layer in self.layers for c in layer.copies if c.label == label)

    def copies(self, label: str) -> list[Copy]:
        return [c for layer in self.layers for c in layer.copies if c.label == label]

    @property
    def total_experts(self) -> int:
        return sum(layer.n_expert for layer in self.layers)

    def fits(self, memory: int, label: str) -> dict[str, float | int]:
        """How many experts of one precision fit beside the base in `memory` bytes."""
        per_expert = self.expert_bytes(label) / self.total_experts
        left = memory - self.base_bytes
        n = max(0, min(self.total_experts, int(left / per_expert)))
        return {
            "experts": n,
            "share": n / self.total_experts,
            "bytes": int(n * per_expert),
            "left": left - int(n * per_expert),
        }

    def to_json(self) -> dict[str, Any]:
        result = asdict(self)
        result["total_experts"] = self.total_experts
        result["expert_bytes"] = {label: self.expert_bytes(label) for label in self.labels}
        return result


def inspect(path: Path) -> Inspection:
    """Look at a base file with its experts, an expert file, or an ordinary GGUF; nothing but headers is read."""
    kind = kind_of(path)
    if kind == "base":
        with open_pair(path) as pair:
            base = Model([pair.base])
            copies = [(f"{f.role} {f.label}", f.model) for f in pair.expert_files]
            result = _inspect("pair", base, copies)
            result.files += [_file(f.model) for f in pair.expert_files]
            result.pair_id, result.router_hash = pair.id, pair.router_hash
            return result
    if kind == "experts":
        part = ExpertsFile(path)
        try:
            result = _inspect("experts", part.model, [(f"{part.role} {part.label}", part.model)])
            result.pair_id, result.router_hash = part.id, part.router_hash
            result.base_bytes = 0
            return result
        finally:
            part.file.close()
    with open_model(path) as model:
        return _inspect("model", model, [("model", model)] if model.experts else [])


def _file(model: Model, i: int = 0) -> dict[str, Any]:
    h = model.files[i].header
    return {
        "path": str(h.path),
        "bytes": h.file_size,
        "version": h.version,
        "tensors": len(h.tensors),
        "alignment": h.alignment,
        "pair": K_VERSION in model.files[i].context,
    }


def _inspect(kind: str, model: Model, copies: list[tuple[str, Model]]) -> Inspection:
    experts = [(label, m, layers_of(m.experts)) for label, m in copies]
    layers = []
    if experts:
        for number, first in experts[0][2].items():
            row = [_copy(label, m, by_layer[number]) for label, m, by_layer in experts]
            layers.append(Layer(number, first[0].n_expert, row))
    return Inspection(
        kind=kind,
        files=[_file(model, i) for i in range(len(model.files))],
        architecture=model.architecture,
        name=model.context.get_str("general.name") or "",
        n_layers=model.arch_int("block_count"),
        n_expert=max((layer.n_expert for layer in layers), default=0),
        n_used=model.arch_int("expert_used_count"),
        n_shared=model.arch_int("expert_shared_count"),
        base_bytes=sum(t.size for _, t in model.base_tensors),
        layers=layers,
        notes=list(model.notes),
    )


def _copy(label: str, model: Model, experts: list[ExpertTensor]) -> Copy:
    types = {e.role: "/".join(sorted({s.type.name for s in e.segments})) for e in experts}
    layer_bytes = sum(e.source_bytes for e in experts)
    aligned = all(s.offset % BLOCK == 0 and e.expert_bytes(s.type) % BLOCK == 0 for e in experts for s in e.segments)
    return Copy(label, types, layer_bytes // experts[0].n_expert, layer_bytes, len(experts), aligned)
