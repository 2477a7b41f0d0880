"""Traces: what the router chose and what the cache did about it, as numpy arrays (format: docs/trace.md).

`Trace.load` reads a file of `--hobbit-trace`; `TraceWriter` writes one from choices that come from elsewhere, so that
the simulator can replay them. `python -m hobbit_py.trace FILE` prints a summary, `--json-lines` the selections one line
each. Needs numpy and nothing else of the package.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

VERSION = 1
SKIP, LOW, HIGH = 0, 1, 2  # asked and given
ABSENT, LOADING, READY = 0, 1, 2

STEP, ROUTE, PREDICT, DEMAND, STREAM, PREFETCH, WARM, EVICT, CANCEL = range(1, 10)
FAIL, DONE, END, SEQUENCE, RESIZE, STATS_RESET, STATS, RESIDENT, RECORDS, DROP = range(10, 20)
NAMES = dict(
    enumerate(
        "step route predict demand stream prefetch warm evict cancel fail done end sequence resize stats_reset stats "
        "resident records drop".split(),
        start=1,
    )
)

_HEAD = struct.Struct("<QIIHHHBB")
_HEAD_FIELDS = [
    ("t_us", "u8"),
    ("size", "u4"),
    ("bytes", "u4"),
    ("context", "u2"),
    ("layer", "u2"),
    ("expert", "u2"),
    ("type", "u1"),
    ("precision", "u1"),
]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Layer:
    """A layer with experts: N in blk.N, its experts, and the bytes of one in each precision (0: there is none)."""

    block: int
    n_expert: int
    low_bytes: int
    high_bytes: int


@dataclass(frozen=True)
class Route:
    """One layer of one ubatch. Arrays have shape [n_rows, n_used]; the experts of a row are in the router's order."""

    step: int
    context: int
    layer: int
    t_us: int
    sequences: Array  # [n_rows]
    ids: Array
    weights: Array
    asked: Array  # SKIP, LOW, HIGH
    given: Array
    here_low: Array  # ABSENT, LOADING, READY
    here_high: Array
    to: int = -1  # the layer predicted, if this is a prediction
    acted_on: bool = True


@dataclass(frozen=True)
class Steps:
    """What each ubatch did, counted as statistics count it. Arrays have an entry per ubatch."""

    tokens: Array
    prompt: Array  # bool: more than one token of a sequence
    lookups: Array
    hits: Array
    selected: Array  # [step, 3]: (token, expert) pairs skipped, low, high
    read_bytes: Array  # [step, 3]: on demand low, on demand high, ahead
    chosen: Array  # [layer, expert]: tokens that the router sent there, in all steps


class Trace:
    """A trace in memory.

    Attributes:
        settings: the text lines before the records, by name; one value, or a list where a line has several.
        layers: see `Layer`.
        heads: structured array of all records: t_us, size, bytes, context, layer, expert, type, precision, offset (of
            the payload in `data`).
    """

    def __init__(self, data: bytes, name: str = "trace") -> None:
        self.data = data
        self.name = name
        self.settings: dict[str, Any] = {}
        self.layers: list[Layer] = []
        at = self._read_settings()
        rows: list[tuple[int, ...]] = []
        while at + _HEAD.size <= len(data):
            head = _HEAD.unpack_from(data, at)
            at += _HEAD.size
            if at + head[1] > len(data):
                break  # the run was killed in the middle of a write
            rows.append((*head, at))
            at += head[1]
        self.heads: Array = np.array(rows, dtype=[*_HEAD_FIELDS, ("offset", "u8")])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Reads a trace.

        Raises:
            ValueError: not a trace, or of another version.
            OSError: it cannot be read.
        """
        return cls(Path(path).read_bytes(), os.fspath(path))

    def _read_settings(self) -> int:
        end = self.data.find(b"\n\n")
        first, _, rest = self.data[: max(end, 0)].decode("utf-8", errors="replace").partition("\n")
        if end < 0 or not first.startswith("hobbit-trace "):
            raise ValueError(f"{self.name}: not a trace of --hobbit-trace")
        if first != f"hobbit-trace {VERSION}":
            raise ValueError(f"{self.name}: {first}; this reader knows version {VERSION}")
        for line in rest.split("\n"):
            name, *values = line.split(" ")
            numbers = [_number(v) for v in values]
            if name == "layer":
                _, block, n_expert, low, high = map(int, values)
                self.layers.append(Layer(block, n_expert, low, high))
            else:
                self.settings[name] = numbers[0] if len(numbers) == 1 else numbers
        return end + 2

    def count(self) -> dict[str, int]:
        """How many records there are of each type, by name."""
        kinds, counts = np.unique(self.heads["type"], return_counts=True)
        return {NAMES.get(int(k), str(k)): int(n) for k, n in zip(kinds, counts, strict=True)}

    def stats(self) -> list[tuple[int, dict[str, Any]]]:
        """(context, statistics) of each STATS record, in order."""
        found = []
        for head in self.heads[self.heads["type"] == STATS]:
            at, size = int(head["offset"]), int(head["size"])
            found.append((int(head["context"]), json.loads(self.data[at : at + size])))
        return found

    def routes(self) -> Iterator[Route]:
        """What the layers chose, in order."""
        return (r for r in self._selections() if r.to < 0)

    def predictions(self) -> Iterator[Route]:
        """What was predicted, in order: `layer` said it of layer `to`."""
        return (r for r in self._selections() if r.to >= 0)

    def _selections(self) -> Iterator[Route]:
        step = -1
        tokens: dict[int, Array] = {}
        outputs: dict[int, Array] = {}
        for head in self.heads[np.isin(self.heads["type"], (STEP, ROUTE, PREDICT))]:
            at, context = int(head["offset"]), int(head["context"])
            if head["type"] == STEP:
                step += 1
                n_tokens, n_outputs = struct.unpack_from("<ii", self.data, at)
                sequences = np.frombuffer(self.data, "<i4", n_tokens + n_outputs, at + 8)
                tokens[context], outputs[context] = sequences[:n_tokens], sequences[n_tokens:]
                continue
            n_rows, n_used = struct.unpack_from("<II", self.data, at)
            n = n_rows * n_used
            shape = (n_rows, n_used)
            weights = np.frombuffer(self.data, "<f4", n, at + 8).reshape(shape)
            ids = np.frombuffer(self.data, "<u2", n, at + 8 + 4 * n).reshape(shape)
            state = np.frombuffer(self.data, "u1", n, at + 8 + 6 * n).reshape(shape)
            known = tokens.get(context, np.zeros(n_rows, "<i4"))
            if len(known) != n_rows:
                known = outputs[context]
            yield Route(
                step,
                context,
                int(head["layer"]),
                int(head["t_us"]),
                known,
                ids,
                weights,
                state & 3,
                state >> 2 & 3,
                state >> 4 & 3,
                state >> 6,
                to=int(head["expert"]) if head["type"] == PREDICT else -1,
                acted_on=bool(head["type"] == ROUTE or head["precision"]),
            )

    def steps(self) -> Steps:
        """What each ubatch did. A read ahead counts where it was issued, with the bytes that it came to."""
        kinds = self.heads["type"]
        step_of = np.cumsum(kinds == STEP) - 1
        n = int((kinds == STEP).sum())
        tokens, prompt = np.zeros(n, int), np.zeros(n, bool)
        for step, at in enumerate(self.heads["offset"][kinds == STEP].tolist()):
            (tokens[step],) = struct.unpack_from("<i", self.data, at)
            sequences = np.frombuffer(self.data, "<i4", tokens[step], at + 8)
            prompt[step] = len(np.unique(sequences)) < tokens[step]

        lookups, skips, selected = np.zeros(n, int), np.zeros(n, int), np.zeros((n, 3), int)
        chosen = np.zeros((len(self.layers), int(self.settings["n_expert"])), int)
        for route in self.routes():
            ids, given = route.ids.ravel(), route.given.ravel()
            best = np.full(chosen.shape[1], -1)
            np.maximum.at(best, ids, given)
            lookups[route.step] += (best >= 0).sum()
            skips[route.step] += (best == SKIP).sum()
            selected[route.step] += np.bincount(given, minlength=3)
            chosen[route.layer] += np.bincount(ids, minlength=chosen.shape[1])

        in_steps = step_of >= 0
        on_demand = in_steps & np.isin(kinds, (DEMAND, STREAM))
        misses = np.bincount(step_of[on_demand], minlength=n)
        read = np.zeros((n, 3))
        np.add.at(read, (step_of[on_demand], self.heads["precision"][on_demand]), self.heads["bytes"][on_demand])
        issued: dict[tuple[int, int, int], int] = {}  # bytes
        cancelled: dict[tuple[int, int, int], int] = {}  # of them, those that were read
        for i in np.flatnonzero(in_steps & np.isin(kinds, (PREFETCH, CANCEL, END))):
            head = self.heads[i]
            key, n_bytes = (int(head["layer"]), int(head["expert"]), int(head["precision"])), int(head["bytes"])
            if head["type"] == PREFETCH:
                issued[key] = n_bytes
            elif head["type"] == CANCEL:  # an expert that was predicted twice is cancelled twice
                cancelled[key] = max(n_bytes, cancelled.get(key, 0))
            else:
                read[step_of[i], 2] += sum(cancelled.get(key, whole) for key, whole in issued.items())
                issued.clear()
                cancelled.clear()
        return Steps(tokens, prompt, lookups, lookups - skips - misses, selected, read, chosen)

    def json_lines(self) -> Iterator[str]:
        """Selections as `gguf-tools plan --trace` takes them: one line per token and layer."""
        for route in self.routes():
            for ids, weights in zip(route.ids, route.weights, strict=True):
                yield json.dumps(
                    {"layer": route.layer, "ids": ids.tolist(), "weights": [round(float(w), 6) for w in weights]}
                )


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


class TraceWriter:
    """Writes a trace of choices that did not come from the engine, for the simulator.

    Args:
        settings: as in docs/trace.md, without layers and version; what is missing gets the engine's defaults.
        layers: one per layer with experts.
    """

    def __init__(self, settings: Mapping[str, Any], layers: Sequence[Layer]) -> None:
        defaults: dict[str, Any] = {
            "arch": "generated",
            "n_layer": len(layers),
            "n_expert": max(layer.n_expert for layer in layers),
            "n_expert_used": 1,
            "slots_low": [0, 0],
            "slots_high": [0, 0],
            "rule": "hobbit",
            "t1": 0.6,
            "t2": 1.0,
            "renormalise": 0,
            "deterministic": 0,
            "policy": "hobbit",
            "weights": [0.25, 0.25, 0.25, 0.25],
            "low_cost": 0.25,
            "seed": 1,
            "low_share": 0.2,
            "prefetch": 0,
            "adaptive": 0,
            "rows_evict_max": 32,
            "rows_predict_max": 8,
        }
        lines = [f"hobbit-trace {VERSION}"]
        for name, value in {**defaults, **settings}.items():
            values = value if isinstance(value, (list, tuple)) else [value]
            lines.append(" ".join([name, *map(str, values)]))
            if name == "n_expert_used":
                for i, layer in enumerate(layers):
                    lines.append(f"layer {i} {layer.block} {layer.n_expert} {layer.low_bytes} {layer.high_bytes}")
        self._parts = ["\n".join(lines).encode() + b"\n\n"]

    def _record(self, kind: int, payload: bytes = b"", *, layer: int = 0, expert: int = 0, precision: int = 0) -> None:
        self._parts.append(_HEAD.pack(0, len(payload), 0, 0, layer, expert, kind, precision) + payload)

    def sequence(self, sequence: int = 0) -> None:
        """A sequence starts anew."""
        self._record(SEQUENCE, struct.pack("<i", sequence))

    def step(self, routes: Iterable[tuple[Array, Array]], sequence: int = 0) -> None:
        """One ubatch of one sequence: for each layer ids and gate weights, both [n_rows, n_used]."""
        routes = list(routes)
        n = len(routes[0][0])
        self._record(STEP, struct.pack("<ii", n, n) + np.full(2 * n, sequence, "<i4").tobytes())
        for layer, (ids, weights) in enumerate(routes):
            payload = struct.pack("<II", *ids.shape) + weights.astype("<f4").tobytes() + ids.astype("<u2").tobytes()
            self._record(ROUTE, payload + bytes(ids.size), layer=layer)
        self._record(END, precision=1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file."""
        Path(path).write_bytes(b"".join(self._parts))


def main() -> None:
    """A summary of a trace, or its selections as JSON lines."""
    arguments = sys.argv[1:]
    as_lines = "--json-lines" in arguments
    paths = [a for a in arguments if not a.startswith("-")]
    if len(paths) != 1:
        raise SystemExit("python -m hobbit_py.trace FILE [--json-lines]")
    try:
        trace = Trace.load(paths[0])
    except (ValueError, OSError) as error:
        raise SystemExit(str(error)) from None
    if as_lines:
        for line in trace.json_lines():
            print(line)
        return
    for name, value in trace.settings.items():
        print(f"{name:18} {value}")
    for name, n in trace.count().items():
        print(f"{n:10} {name}")


if __name__ == "__main__":
    main()
