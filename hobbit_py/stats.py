"""What the expert cache reports, as frozen dataclasses: counters per layer and in total, and what is in effect.

The field names are those of the engine's JSON (`hobbit_stats_json`, `hobbit_placement_json`), so a file written by
`--hobbit-stats`, an answer of a server's `GET /hobbit/stats` and `Hobbit.cache_stats()` are the same thing. This module
needs neither the library nor the binding.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

VERSION = 1  # of the JSON


@functools.cache
def _field_names(cls: Any) -> frozenset[str]:
    return frozenset(f.name for f in dataclasses.fields(cls))


def _known(cls: type, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entries of `data` that are fields of `cls`."""
    names = _field_names(cls)
    return data if data.keys() <= names else {name: value for name, value in data.items() if name in names}


def ratio(part: float, whole: float) -> float:
    """part / whole, and 0 where nothing was counted."""
    return part / whole if whole else 0.0


@dataclass(frozen=True)
class Counters:
    """Events of one layer, or of all. A lookup is one expert of one layer in one step, whatever the precision."""

    lookups: int = 0
    hits: int = 0
    misses_high: int = 0
    misses_low: int = 0
    skips: int = 0  # experts that no token of the step wanted
    selected_high: int = 0  # (token, expert) pairs by the precision that they got
    selected_low: int = 0
    selected_skip: int = 0
    routed: int = 0  # tokens; their gate weight is 1e6 each
    mass_low: int = 0  # gate weight that was computed in low precision
    mass_skip: int = 0
    evictions: int = 0
    read_bytes_high: int = 0
    read_bytes_low: int = 0
    streamed: int = 0  # misses that passed through the ring without taking a slot
    predicted: int = 0  # experts that the layer before named for this one
    predicted_right: int = 0  # of them, those that the router then chose
    prefetch_issued: int = 0  # experts read ahead
    prefetch_used: int = 0  # of them, those that the router then chose; they count as hits
    prefetch_wasted: int = 0
    prefetch_bytes: int = 0  # read ahead, used or not
    device_hits: int = 0  # of the hits, those in the memory of the device that computes the layer
    device_evictions: int = 0
    upload_bytes: int = 0  # copied to devices, ahead or not
    cpu_computed: int = 0  # experts that it missed and the CPU computed instead
    ahead_issued: int = 0  # experts copied to devices ahead
    ahead_used: int = 0  # of them, those that the router then chose
    stall_us: int = 0  # time in which the computation waited for bytes

    @property
    def misses(self) -> int:
        return self.misses_high + self.misses_low

    @property
    def read_bytes(self) -> int:
        """All that was read from files, on demand and ahead."""
        return self.read_bytes_high + self.read_bytes_low + self.prefetch_bytes

    @property
    def hit_rate(self) -> float:
        """Hits per lookup, 0 to 1."""
        return ratio(self.hits, self.lookups)

    @property
    def selected(self) -> int:
        return self.selected_high + self.selected_low + self.selected_skip

    @property
    def mix(self) -> tuple[float, float, float]:
        """Shares of the (token, expert) pairs in high precision, in low precision, and skipped."""
        high, low, skip = self.selected_high, self.selected_low, self.selected_skip
        return ratio(high, self.selected), ratio(low, self.selected), ratio(skip, self.selected)

    @property
    def mass(self) -> tuple[float, float]:
        """Shares of the gate weight that was computed in low precision, and skipped."""
        return ratio(self.mass_low, 1e6 * self.routed), ratio(self.mass_skip, 1e6 * self.routed)


COUNTERS = tuple(f.name for f in dataclasses.fields(Counters))


@dataclass(frozen=True)
class LayerStats(Counters):
    """Counters of one layer with experts."""

    block: int = -1  # number of the block in the model, as in tensor names


_C = TypeVar("_C", bound=Counters)


class RawLayout:
    """How the engine writes a reading of `hobbit_stats_read` into one piece of memory.

    A head, rows of counters (one per layer and their sum), a digit per layer and expert.
    """

    def __init__(
        self,
        head: Mapping[str, tuple[struct.Struct, int]],
        head_size: int,
        counters: Sequence[str],
        blocks: Sequence[int],
        widths: Sequence[int],
        fixed: Mapping[str, Any],
    ) -> None:
        self.head = head  # type and place of the fields in it
        self.counters = tuple(counters)
        self.row = struct.Struct(f"@{len(counters)}Q")
        self.blocks = tuple(blocks)
        self.widths = tuple(widths)  # experts of each layer
        self.fixed = dict(fixed)  # fields that no reading changes
        self.counters_at = head_size
        self.total_at = head_size + len(self.blocks) * self.row.size
        self.resident_at = self.total_at + self.row.size
        self.size = self.resident_at + len(self.blocks) * max(self.widths)

    def counters_of(self, cls: type[_C], data: bytes, at: int) -> _C:
        """A row of counters, without the price of the frozen class's `__init__`."""
        made = cls.__new__(cls)
        made.__dict__.update(zip(self.counters, self.row.unpack_from(data, at), strict=True))
        return made

    def field(self, data: bytes, name: str) -> Any:
        """A field of `CacheStats`."""
        if name == "total":
            return self.counters_of(Counters, data, self.total_at)
        if name in self.head:
            kind, at = self.head[name]
            value = kind.unpack_from(data, at)[0]
            return value[: value.index(0)].decode("utf-8", errors="replace") if isinstance(value, bytes) else value
        if name == "layers":
            layers = []
            for i, block in enumerate(self.blocks):
                layers.append(self.counters_of(LayerStats, data, self.counters_at + i * self.row.size))
                layers[i].__dict__["block"] = block
            return tuple(layers)
        if name == "resident":
            text, width = data[self.resident_at :].decode(), max(self.widths)
            return tuple(text[i * width : i * width + n] for i, n in enumerate(self.widths))
        return self.fixed[name]


class _Taken:
    """A field of `CacheStats` that is taken out of a raw reading when somebody looks; then it lies in the object."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, stats: CacheStats | None, owner: type) -> Any:
        if stats is None:
            raise AttributeError(f"'CacheStats' has no value for '{self.name}'")
        layout, data = stats.__dict__["_raw"]
        value = stats.__dict__[self.name] = layout.field(data, self.name)
        return value


@dataclass(frozen=True)
class CacheStats:
    """The expert cache since the model was loaded, or since `reset_stats()`.

    `total` is the sum of `layers`. Fields up to `resident_low` say how things stand, the others count.
    """

    version: int = VERSION
    precision: str = ""
    policy: str = ""
    prefetch: str = ""  # depth in effect, and why
    warm_start: str = ""  # what became of the experts of the last run
    cache_bytes: int = 0
    slots_high: int = 0
    slots_low: int = 0
    resident_high: int = 0
    resident_low: int = 0
    prompt_tokens: int = 0
    prompt_us: int = 0
    decode_tokens: int = 0
    decode_us: int = 0
    prompt_stall_us: int = 0  # of prompt_us, the computation waited for bytes
    decode_stall_us: int = 0
    prompt_disk_us: int = 0  # and a read was under way
    decode_disk_us: int = 0
    expected_wasted_bytes: int = 0  # read for large batches in vain
    steps: int = 0
    failed_steps: int = 0
    total: Counters = field(default_factory=Counters)
    layers: tuple[LayerStats, ...] = ()
    resident: tuple[str, ...] | None = None  # per layer, a digit per expert: 0 absent, 1 low, 2 high

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _field_names(CacheStats)}

    @classmethod
    def from_raw(cls, layout: RawLayout, data: bytes) -> CacheStats:
        """From what the engine wrote; fields are taken apart when somebody looks at them."""
        made = cls.__new__(cls)
        made.__dict__["_raw"] = layout, data
        return made

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CacheStats:
        """From the engine's JSON object.

        Raises:
            ValueError: it is something else, or of another version.
        """
        if not isinstance(data, Mapping) or not {"version", "total", "layers"} <= data.keys():
            raise ValueError(
                "no statistics of an expert cache: a JSON object with version, total and layers is expected"
            )
        if data["version"] != VERSION:
            raise ValueError(f"statistics of version {data['version']}; this package reads version {VERSION}")
        plain = dict(_known(cls, data))
        plain["total"] = Counters(**_known(Counters, data["total"]))
        plain["layers"] = tuple(LayerStats(**_known(LayerStats, layer)) for layer in data["layers"])
        resident = data.get("resident")
        plain["resident"] = None if resident is None else tuple(resident)
        return cls(**plain)

    @classmethod
    def from_json(cls, text: str | bytes) -> CacheStats:
        return cls.from_dict(json.loads(text))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CacheStats:
        """From a file that `--hobbit-stats`, `hobbit run --stats` or `save()` wrote.

        Raises:
            ValueError: the file holds something else.
            OSError: it cannot be read.
        """
        try:
            return cls.from_json(Path(path).read_bytes())
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Plain data in the engine's names; `CacheStats.from_dict` takes it back."""
        data = dataclasses.asdict(self)
        data["layers"] = [{"block": layer.pop("block"), **layer} for layer in data["layers"]]
        resident = data.pop("resident")
        return data if resident is None else {**data, "resident": list(resident)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the JSON that `hobbit stats` and `hobbit plot` read."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    def rows(self) -> list[dict[str, Any]]:
        """One flat dict per layer with `hit_rate` added: `pandas.DataFrame(stats.rows())`."""
        return [{"block": s.block, **{n: getattr(s, n) for n in COUNTERS}, "hit_rate": s.hit_rate} for s in self.layers]

    @property
    def prompt_tokens_per_second(self) -> float:
        return ratio(1e6 * self.prompt_tokens, self.prompt_us)

    @property
    def decode_tokens_per_second(self) -> float:
        return ratio(1e6 * self.decode_tokens, self.decode_us)

    def __sub__(self, earlier: CacheStats) -> CacheStats:
        """What happened between two readings; how things stand is as in the later one.

        Raises:
            ValueError: the statistics were reset in between, or belong to different models.
        """
        if [s.block for s in self.layers] != [s.block for s in earlier.layers]:
            raise ValueError("statistics of different models")
        if self.steps < earlier.steps:
            raise ValueError("the statistics were reset between the two readings")

        def less(now: Any, then: Any, names: tuple[str, ...]) -> dict[str, int]:
            return {name: getattr(now, name) - getattr(then, name) for name in names}

        layers = [
            LayerStats(block=now.block, **less(now, then, COUNTERS))
            for now, then in zip(self.layers, earlier.layers, strict=True)
        ]
        return dataclasses.replace(
            self,
            total=Counters(**less(self.total, earlier.total, COUNTERS)),
            layers=tuple(layers),
            **cast(Any, less(self, earlier, _COUNTED)),
        )


for _name in _field_names(CacheStats):
    setattr(CacheStats, _name, _Taken(_name))

_COUNTED = (
    *("prompt_tokens", "prompt_us", "decode_tokens", "decode_us", "steps", "failed_steps"),
    *("prompt_stall_us", "decode_stall_us", "prompt_disk_us", "decode_disk_us", "expected_wasted_bytes"),
)


@dataclass(frozen=True)
class Pool:
    """The slots of one precision."""

    precision: str  # "high" or "low"
    file: str
    type: str  # ggml type, as "q4_0"
    slots: int
    slot_bytes: int


@dataclass(frozen=True)
class DeviceSlots:
    """The slots on one accelerator. A resize leaves them as they are."""

    name: str
    bytes: int
    sizing: str  # where that number comes from
    layers: int
    slots_high: int
    slots_low: int
    queue: bool  # copies run beside computing
    stage: bool  # large batches are computed there too


@dataclass(frozen=True)
class Placement:
    """What is in effect, which may be less than what was asked for: files, types, slots, rule, policy."""

    arch: str = ""
    n_layer: int = 0  # layers with experts
    n_expert: int = 0
    n_expert_used: int = 0
    precision: str = ""
    t1: float = 0.0
    t2: float = 0.0
    renormalise: bool = False
    deterministic: bool = False
    policy: str = ""
    cache_bytes: int = 0  # slots and ring
    sizing: str = ""  # where that number comes from
    ring_places: int = 0
    ring_place_bytes: int = 0
    io: str = ""  # how experts are read, and why
    io_threads: int = 0
    prefetch: str = ""  # depth in effect, and why
    miss: str = ""  # what is done about an expert that a device misses
    pools: tuple[Pool, ...] = ()
    devices: tuple[DeviceSlots, ...] = ()
    flash_attention: bool = False
    unlike_llama_cli: tuple[str, ...] = ()  # defaults of llama-cpp-python that are in effect and differ

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], **more: Any) -> Placement:
        plain: dict[str, Any] = {**_known(cls, data), **more}
        plain["pools"] = tuple(Pool(**_known(Pool, pool)) for pool in data["pools"])
        plain["devices"] = tuple(DeviceSlots(**_known(DeviceSlots, device)) for device in data.get("devices", ()))
        return cls(**plain)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        mib = 1024 * 1024
        lines = [
            f"{self.arch}: {self.n_layer} layers with {self.n_expert} experts, {self.n_expert_used} used per token",
            f"cache {self.cache_bytes / mib:.1f} MiB ({self.sizing}), policy {self.policy}",
        ]
        lines += [
            f"{p.precision}: {p.slots} of {self.n_layer * self.n_expert} experts fit, "
            f"{p.slot_bytes / mib:.2f} MiB each, {p.type}, {p.file}"
            for p in self.pools
        ]
        lines += [
            f"{d.name}: {d.slots_high} high and {d.slots_low} low slots for {d.layers} layers, {d.bytes / mib:.1f} MiB "
            f"({d.sizing}); misses: {self.miss}"
            for d in self.devices
        ]
        rule = f", T1 {self.t1:g}, T2 {self.t2:g}" if self.precision in ("hobbit", "article") else ""
        exact = " (the same results for any cache)" if self.deterministic else ""
        lines.append(f"precision {self.precision}{rule}{exact}")
        lines.append(f"reads {self.io}, {self.io_threads} threads; prefetch {self.prefetch}")
        return "\n".join([*lines, *self.unlike_llama_cli])
