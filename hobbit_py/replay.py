"""Replays traces on the engine's own cache: what would another policy, size or threshold have cost?

`Replay(path).run()` takes the recorded decisions again and counts what the engine counted; with settings it is a
simulation (docs/policy.md). Names of settings as in docs/trace.md.
"""

from __future__ import annotations

import ctypes
import json
import os
from typing import Any

from hobbit_py import _lib

POLICIES = (
    "random",
    "lru",
    "lfu",
    "lfu-model",
    "lhu",
    "fld",
    "hobbit",
    "lcu",
    "lfru",
    "gate-mass",
    "lru-layer",
    "activations",
    "static",
)


class Replay:
    """A trace, open for any number of replays.

    Raises:
        ValueError: the file cannot be read, or is not a trace of this version.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._error = ctypes.create_string_buffer(1024)
        self._replay = _lib.lib.hobbit_replay_open(os.fsencode(path), self._error, len(self._error))
        if not self._replay:
            raise ValueError(os.fsdecode(self._error.value))

    def close(self) -> None:
        """Frees the trace; closing twice does nothing."""
        if self._replay:
            _lib.lib.hobbit_replay_free(self._replay)
            self._replay = None

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, **settings: Any) -> dict[str, Any]:
        """One replay: totals, counters by context and layer, and what each sequence came to.

        Args:
            settings: policy, weights, rule, t1, t2, deterministic, slots_high, slots_low, cache_bytes, low_share,
                prefetch, adaptive, seed; belady as a policy; bandwidth (bytes per microsecond), latency_us,
                compute_us (of a layer), interruptible, block_bytes. None given: the trace's, exactly.

        Returns:
            The engine's JSON. `recorded` says that no setting was given, `counterfactual` that precisions may differ
            from those of the run, so that its router might have chosen otherwise (see `caveat`).

        Raises:
            ValueError: a setting will not do.
        """
        text = ";".join(f"{name}={_text(value)}" for name, value in settings.items())
        size = 1 << 16
        while True:
            buffer = ctypes.create_string_buffer(size)
            need = _lib.lib.hobbit_replay_run(self._replay, text.encode(), buffer, size, self._error, len(self._error))
            if need == 0:
                raise ValueError(os.fsdecode(self._error.value))
            if need < size:
                result: dict[str, Any] = json.loads(buffer.value)
                return result
            size = need + 1


def caveat(result: dict[str, Any]) -> str:
    """What a report of this replay has to say; "" where the run would have made the same choices."""
    if not result["counterfactual"]:
        return ""
    return (
        "counterfactual: the router's choices are those of the recorded run; with these settings experts may get other "
        "precisions, and the router may choose otherwise (not if the run and the replay are deterministic, or exact)"
    )


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
