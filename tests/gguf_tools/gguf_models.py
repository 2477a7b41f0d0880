"""Small MoE models for the tests, written byte by byte.

The writer here shares nothing with the package or with ggml: it is the second opinion that the tests compare with,
and it can write what no sane writer would.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gguf_tools import ggml

ROOT = Path(__file__).resolve().parents[2]

U32, F32, BOOL, STR, ARR, U16, U64, I32 = 4, 6, 7, 8, 9, 2, 10, 5
Kv = tuple[str, int, Any]  # for arrays the value is (element type, list)

_SCALARS = {U16: "<H", U32: "<I", I32: "<i", F32: "<f", BOOL: "<?", U64: "<Q"}


@dataclass(frozen=True)
class Tensor:
    name: str
    type: str
    ne: tuple[int, ...]
    data: bytes


@dataclass
class Gguf:
    """A file to be written; fields are what a test may want to be odd."""

    kv: list[Kv]
    tensors: list[Tensor]
    alignment: int = 32
    version: int = 3
    final_padding: bool = True
    padding_byte: bytes = b"\0"
    extra_dims: int = 0  # trailing dimensions of 1 in every tensor info
    trailing: bytes = b""

    def without(self, *keys: str) -> Gguf:
        return replace(self, kv=[kv for kv in self.kv if kv[0] not in keys])

    def with_kv(self, *kvs: Kv) -> Gguf:
        names = {kv[0] for kv in kvs}
        return replace(self, kv=[kv for kv in self.kv if kv[0] not in names] + list(kvs))

    def tensor(self, name: str) -> Tensor:
        return next(t for t in self.tensors if t.name == name)

    def write(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.to_bytes())
        return path

    def to_bytes(self) -> bytes:
        kv = list(self.kv)
        if self.alignment != 32:
            kv.append(("general.alignment", U32, self.alignment))
        out = bytearray(b"GGUF" + struct.pack("<IQQ", self.version, len(self.tensors), len(kv)))
        for key, kind, value in kv:
            out += _text(key) + struct.pack("<i", kind) + _value(kind, value)
        offset = 0
        for t in self.tensors:
            ne = t.ne + (1,) * self.extra_dims
            out += _text(t.name) + struct.pack("<I", len(ne)) + struct.pack(f"<{len(ne)}q", *ne)
            out += struct.pack("<iQ", ggml.type_by_name(t.type).index, offset)
            offset += len(t.data) + -len(t.data) % self.alignment
        out += self.padding_byte * (-len(out) % self.alignment)
        for i, t in enumerate(self.tensors):
            out += t.data
            if self.final_padding or i + 1 < len(self.tensors):
                out += self.padding_byte * (-len(t.data) % self.alignment)
        return bytes(out + self.trailing)


def _text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: int, value: Any) -> bytes:
    if kind == STR:
        return _text(value)
    if kind == ARR:
        element, values = value
        return struct.pack("<iQ", element, len(values)) + b"".join(_value(element, v) for v in values)
    return struct.pack(_SCALARS[kind], value)


def pack(values: np.ndarray[Any, Any], kind: str) -> bytes:
    """Rows of f32 as ggml stores them in `kind`."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    t = ggml.type_by_name(kind)
    if kind == "F32":
        return values.tobytes()
    if kind == "F16":
        return values.astype(np.float16).tobytes()
    out = np.empty(values.size // t.block * t.block_bytes, np.uint8)
    weights = np.ones(values.shape[-1], np.float32) if t.requires_imatrix else None
    ggml.quantize(t, values.reshape(-1), out, values.shape[-1], weights)
    return out.tobytes()


def unpack(data: bytes, kind: str) -> np.ndarray[Any, Any]:
    """The f32 values of stored rows."""
    t = ggml.type_by_name(kind)
    out = np.empty(len(data) // t.block_bytes * t.block, np.float32)
    ggml.dequantize(t, np.frombuffer(data, np.uint8), out)
    return out


@dataclass
class Moe:
    """A random model; `build` gives the file."""

    arch: str = "qwen3moe"
    n_layer: int = 2
    n_embd: int = 64
    n_ff: int = 32
    n_expert: int = 4
    n_used: int = 2
    type: str = "F32"  # of experts
    type_of: Callable[[int, str], str] | None = None  # (layer, role) -> type
    legacy: bool = False
    legacy_type_of: Callable[[int], str] | None = None  # expert -> type
    fused: bool = False  # gate_up
    gated: bool = True
    biases: bool = False
    shared: bool = False
    odd_names: bool = False  # chunked experts, arctic's norm, NVFP4-style scales
    dense_first: bool = False
    nextn: bool = False
    seed: int = 1
    kv: Sequence[Kv] = field(default_factory=list)

    def roles(self) -> list[tuple[str, int, int]]:
        if self.fused:
            return [("gate_up", self.n_embd, 2 * self.n_ff), ("down", self.n_ff, self.n_embd)]
        gate = [("gate", self.n_embd, self.n_ff)] if self.gated else []
        return [*gate, ("down", self.n_ff, self.n_embd), ("up", self.n_embd, self.n_ff)]

    def expert_values(self, layer: int, role: str, ne0: int, ne1: int) -> np.ndarray[Any, Any]:
        rng = np.random.default_rng([self.seed, layer, len(role), ord(role[0])])
        return rng.standard_normal((self.n_expert, ne1, ne0), dtype=np.float32) * np.float32(0.05)

    def build(self) -> Gguf:
        rng = np.random.default_rng(self.seed)

        def plain(name: str, *ne: int, kind: str = "F32") -> Tensor:
            return Tensor(name, kind, ne, pack(rng.standard_normal(ne[::-1], dtype=np.float32), kind))

        vocab = 8
        tensors = [plain("token_embd.weight", self.n_embd, vocab, kind="F16"), plain("output_norm.weight", self.n_embd)]
        for i in range(self.n_layer):
            tensors.append(plain(f"blk.{i}.attn_norm.weight", self.n_embd))
            if self.dense_first and i == 0:
                tensors.append(plain("blk.0.ffn_up.weight", self.n_embd, self.n_ff))
                continue
            tensors.append(plain(f"blk.{i}.ffn_gate_inp.weight", self.n_embd, self.n_expert))
            for role, ne0, ne1 in self.roles():
                values = self.expert_values(i, role, ne0, ne1)
                kind = self.type_of(i, role) if self.type_of else self.type
                if self.legacy:
                    for e in range(self.n_expert):
                        k = self.legacy_type_of(e) if self.legacy_type_of else kind
                        tensors.append(Tensor(f"blk.{i}.ffn_{role}.{e}.weight", k, (ne0, ne1), pack(values[e], k)))
                else:
                    name = f"blk.{i}.ffn_{role}_exps.weight"
                    tensors.append(Tensor(name, kind, (ne0, ne1, self.n_expert), pack(values, kind)))
                if self.biases:
                    tensors.append(plain(f"blk.{i}.ffn_{role}_exps.bias", ne1, self.n_expert))
            if self.shared:
                tensors.append(plain(f"blk.{i}.ffn_up_shexp.weight", self.n_embd, self.n_ff))
                tensors.append(plain(f"blk.{i}.ffn_gate_inp_shexp.weight", self.n_embd))
            if self.odd_names:
                tensors.append(plain(f"blk.{i}.ffn_up_chexps.weight", self.n_embd, self.n_ff, 2))
                tensors.append(plain(f"blk.{i}.ffn_norm_exps.weight", self.n_embd))
                tensors.append(plain(f"blk.{i}.ffn_up_exps.scale", self.n_expert))
            if self.nextn and i == self.n_layer - 1:
                tensors.append(plain(f"blk.{i}.nextn.eh_proj.weight", 2 * self.n_embd, self.n_embd))
        kv: list[Kv] = [
            ("general.architecture", STR, self.arch),
            ("general.name", STR, "random"),
            (f"{self.arch}.block_count", U32, self.n_layer),
            (f"{self.arch}.expert_count", U32, self.n_expert),
            (f"{self.arch}.expert_used_count", U32, self.n_used),
            ("general.file_type", U32, 0),
            ("tokenizer.ggml.tokens", ARR, (STR, [f"t{i}" for i in range(vocab - 1)] + ["nul\0inside"])),
            ("tokenizer.ggml.merges", ARR, (STR, [])),
        ]
        return Gguf(kv + list(self.kv), [replace(t, ne=_trimmed(t.ne)) for t in tensors])


def _trimmed(ne: tuple[int, ...]) -> tuple[int, ...]:
    """Without trailing dimensions of 1, as converters write shapes."""
    while len(ne) > 1 and ne[-1] == 1:
        ne = ne[:-1]
    return ne


def split(model: Gguf, folder: Path, stem: str, count: int) -> list[Path]:
    """Write a model as shards, as llama-gguf-split does: only the first has the metadata."""
    paths = []
    per = -(-len(model.tensors) // count)
    for i in range(count):
        kv: list[Kv] = [
            ("split.no", U16, i),
            ("split.count", U16, count),
            ("split.tensors.count", I32, len(model.tensors)),
        ]
        part = replace(model, kv=(model.kv if i == 0 else []) + kv, tensors=model.tensors[i * per : (i + 1) * per])
        paths.append(part.write(folder / f"{stem}-{i + 1:05}-of-{count:05}.gguf"))
    return paths


def read_back(path: Path) -> dict[str, Tensor]:
    """Tensors of a written file, by the package's header check and plain reads."""
    from gguf_tools.header import read_header

    h = read_header(path)
    data = path.read_bytes()
    return {t.name: Tensor(t.name, t.type.name, t.ne, data[t.offset : t.offset + t.size]) for t in h.tensors}


def imatrix_gguf(sums: dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]) -> Gguf:
    """An importance matrix: name -> (in_sum2 [n_expert, ne0], counts [n_expert])."""
    tensors = []
    for name, (values, counts) in sums.items():
        tensors.append(Tensor(name + ".in_sum2", "F32", values.shape[::-1], pack(values, "F32")))
        tensors.append(Tensor(name + ".counts", "F32", (1, counts.size), pack(counts, "F32")))
    kv: list[Kv] = [
        ("general.type", STR, "imatrix"),
        ("imatrix.datasets", ARR, (STR, ["test"])),
        ("imatrix.chunk_count", U32, 1),
        ("imatrix.chunk_size", U32, 512),
    ]
    return Gguf(kv, tensors)


def imatrix_legacy(values: dict[str, tuple[np.ndarray[Any, Any], int]]) -> bytes:
    """The older binary form: name -> (values, calls)."""
    out = struct.pack("<i", len(values))
    for name, (v, calls) in values.items():
        out += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, v.size)
        out += v.astype("<f4").tobytes()
    return out


def run_cli(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own: what a user sees, an abort included."""
    return subprocess.run(
        [sys.executable, "-m", "gguf_tools", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def built_program(name: str) -> Path:
    """A program of the build that the ggml library comes from."""
    program = ggml.find_library().parent / name
    assert program.is_file(), f"{program} is missing: make build"
    return program
