"""The class `Hobbit`: a `llama_cpp.Llama` whose experts are cached.

Everything that takes a `Llama` takes a `Hobbit`. The engine's options are parsed and checked in C; here they are
keyword arguments, which become a configuration handle that travels to the model as an integer KV override.
"""

from __future__ import annotations

import ctypes
import dataclasses
import difflib
import inspect
import json
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

from hobbit_py import _lib
from hobbit_py.receipt import Receipt, curve_of
from hobbit_py.stats import CacheStats, Placement, RawLayout

from llama_cpp import Llama as Llama  # isort: skip - after _lib, which decides what it loads

_LLAMA_OPTIONS = frozenset(inspect.signature(Llama.__init__).parameters) - {"self", "kwargs"}


class ExpertReadError(RuntimeError):
    """Experts could not be read, and the step's results were thrown away. The message names file, tensor and expert.

    The model still works: the next call reads again.
    """


class Hobbit(Llama):
    """A model whose experts stay in its files and pass through a cache.

    Args:
        model_path: GGUF file with the high-precision experts; any shard.
        low: GGUF file of the same model whose experts serve as the low-precision copies.
        cache: memory for experts: "512MiB", "4GiB", a number of MiB, or "auto".
        precision: "hobbit", "paper" (the same at 0.6 and 0.9), "high" (exact), "low" or "article"; default "hobbit"
            with `low`, else "high".
        t1: gate weight ranked before an expert up to which it is used in high precision, 0 to 1.
        t2: the same for low precision; beyond it the expert is skipped; default 1: none is.
        renormalise: scale the other gate weights up after a skip.
        deterministic: precision follows from the gate weights alone, whatever the cache holds.
        policy: "hobbit", "lru" or "lfu": which expert leaves first.
        weights: recency, frequency, high-precision frequency and layer distance in the score of policy "hobbit".
        low_share: share of the cache for low-precision experts, 0.01 to 0.99.
        prefetch: layers to read ahead, 0 to 8, or "auto": as long as it pays.
        io: "direct", "buffered" or "auto": past the page cache or through it.
        io_threads: threads that read experts.
        check: look for invalid numbers in every expert that is read.
        stats: file for the statistics as JSON, written when the model is closed.
        progress: called with the loaded share of the other weights, 0 to 1; an exception or `False` stops the load.
        **llama: everything that `Llama` takes, and any option of the engine that has no name here.

    Raises:
        TypeError: a keyword that neither `Llama` nor the engine knows.
        ValueError: a value that will not do, or a model that cannot be loaded; the message is the engine's.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        low: str | os.PathLike[str] | None = None,
        cache: str | int = "auto",
        precision: str | None = None,
        t1: float | None = None,
        t2: float | None = None,
        renormalise: bool | None = None,
        deterministic: bool | None = None,
        policy: str | None = None,
        weights: Sequence[float] | None = None,
        low_share: float | None = None,
        prefetch: int | str | None = None,
        io: str | None = None,
        io_threads: int | None = None,
        check: bool | None = None,
        stats: str | os.PathLike[str] | None = None,
        progress: Callable[[float], object] | None = None,
        **llama: Any,
    ) -> None:
        options: dict[str, Any] = {
            "low": low,
            "cache": cache,
            "precision": precision,
            "t1": t1,
            "t2": t2,
            "renormalise": renormalise,
            "deterministic": deterministic,
            "policy": policy,
            "weights": weights,
            "low_share": low_share,
            "prefetch": prefetch,
            "io": io,
            "io_threads": io_threads,
            "check": check,
            "stats": stats,
        }
        for name in [name for name in llama if name not in _LLAMA_OPTIONS]:
            if name not in _lib.OPTIONS:
                raise TypeError(_unknown(name, options))
            options[name] = llama.pop(name)
        self._engine_options = {name: value for name, value in options.items() if value is not None}
        self._user_overrides = llama.pop("kv_overrides", None)
        self._progress = None if progress is None else _Progress(progress)
        self._stats_reader: _StatsReader | None = None
        self._policy: _Policy | None = None
        self._engine_lock = threading.Lock()  # the C API wants one caller at a time per context, and close() must wait
        self._compute_lock = threading.RLock()  # held for each batch and sample; taken before the other

        overrides = {**(self._user_overrides or {}), _lib.CONFIG_KEY: _lib.config_new(self._engine_options)}
        with _lib.error_lines() as lines:
            try:
                super().__init__(os.fspath(model_path), kv_overrides=overrides, **llama)
            except ValueError:
                if self._progress is not None:
                    self._progress.raise_error()
                why = _lib.reason(lines, "error loading model: ")
                if why is None:
                    raise
                raise ValueError(f"{os.fspath(model_path)}: {why}") from None
        self._callback_errors: list[BaseException] = []

    #
    # loading
    #

    @property
    def model_params(self) -> Any:
        """llama_model_params of the load; `Llama.__init__` sets it, and our progress callback joins it there."""
        return self._model_params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        self._model_params = params
        if self._progress is not None:
            params.progress_callback = _lib.binding.llama_progress_callback(self._progress)

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None,
        additional_files: list[Any] | None = None,
        *args: Any,
        low: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """As `Llama.from_pretrained`; `low` may name a file of the repository, in the same folder, or a local one.

        Further shards of either file belong in `additional_files`.
        """
        if low is None or os.path.exists(low):
            return super().from_pretrained(repo_id, filename, additional_files, *args, low=low, **kwargs)

        def load(model_path: str, **options: Any) -> Hobbit:
            return cls(model_path, low=os.path.join(os.path.dirname(model_path), os.path.basename(low)), **options)

        # upstream downloads, finds the path and calls its first argument with it
        download = Llama.from_pretrained.__func__  # type: ignore[attr-defined]
        return download(load, repo_id, filename, [*(additional_files or []), low], *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Options, not contents: the copy loads its files again. A progress callback stays behind."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, "kv_overrides": self._user_overrides, **self._engine_options}

    def close(self) -> None:
        """Frees context, model and cache; a second call does nothing.

        Waits for the batch that another thread computes; what that thread generates then ends with a `ValueError`.
        """
        if hasattr(self, "_stack"):  # false if __init__ refused an option
            with self._compute_lock, self._engine_lock:
                self._stats_reader = None
                super().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    #
    # computing: as Llama, with the reason when a step fails
    #

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """One thread at a time, with a model that stays open to the end."""
        with self._compute_lock:
            if self._ctx.ctx is None:
                raise ValueError("the model is closed")
            yield

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluates tokens; a failed read raises `ExpertReadError` and leaves the model as it was before the batch."""
        with self._computing(), _reading():
            super().eval(tokens)
        if self._policy is not None:
            self._policy.raise_error()

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        """As `Llama.generate`. The engine learns that a sequence begins: a cached prefix hides its position 0.

        Raises:
            RuntimeError: something else was computed with the model since the last token, by another thread perhaps.
        """
        if kwargs.get("reset", True):
            with self._engine() as ctx:
                _lib.lib.hobbit_sequence_begin(ctx, 0)
        return self._generate(super().generate(tokens, *args, **kwargs))

    def _generate(self, tokens: Any) -> Iterator[int]:
        sent, n_tokens = None, None
        with closing(tokens):
            while True:
                with self._computing():
                    if n_tokens not in (None, self.n_tokens):
                        raise RuntimeError("something else was computed with the model in the middle of a generation")
                    try:
                        token = tokens.send(sent)
                    except StopIteration:
                        return
                    n_tokens = self.n_tokens
                sent = yield token

    def embed(self, *args: Any, **kwargs: Any) -> Any:
        """As `Llama.embed`; a failed read raises `ExpertReadError`."""
        with self._computing(), _reading():
            result = super().embed(*args, **kwargs)
        if self._policy is not None:
            self._policy.raise_error()
        return result

    def _init_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """As `Llama`'s, but an exception in a logits processor is kept for `sample`: it cannot pass through C."""
        processors = kwargs.get("logits_processor")
        if processors is not None:
            kwargs["logits_processor"] = [_guarded(p, self._callback_errors) for p in processors]
        return super()._init_sampler(*args, **kwargs)

    def sample(self, *args: Any, **kwargs: Any) -> int:
        """As `Llama.sample`; what a logits processor raised is raised here."""
        with self._computing():
            token: int = super().sample(*args, **kwargs)
        if self._callback_errors:
            error = self._callback_errors[0]
            self._callback_errors.clear()
            raise error
        return token

    #
    # the cache
    #

    @contextmanager
    def _engine(self) -> Iterator[int]:
        """The C context, for one call."""
        with self._engine_lock:
            yield self._engine_context()

    def _engine_context(self) -> int:
        llama = getattr(getattr(self, "_ctx", None), "ctx", None)
        if llama is None:
            raise ValueError("the model is closed")
        ctx: int | None = _lib.lib.hobbit_from_llama(llama)
        if ctx is None:
            raise ValueError("the model has no experts in memory: it was loaded with vocab_only=True")
        return ctx

    @property
    def placement(self) -> Placement:
        """What is in effect: files, types, slots, rule, policy; and defaults that differ from llama-cli."""
        with self._engine() as ctx:
            data = json.loads(_lib.read_text(_lib.lib.hobbit_placement_json, ctx))
        flash = self.context_params.flash_attn_type != _lib.binding.LLAMA_FLASH_ATTN_TYPE_DISABLED
        unlike = [] if flash else ["flash attention is off; llama-cli leaves it to the device (flash_attn=True: on)"]
        if self._n_ctx == 512:
            unlike.append("the context holds 512 tokens; llama-cli takes the model's (n_ctx=0)")
        if self.n_batch == 512:
            unlike.append("a batch holds 512 tokens; llama-cli takes 2048 (n_batch=2048)")
        return Placement.from_dict(data, flash_attention=flash, unlike_llama_cli=tuple(unlike))

    def cache_stats(self) -> CacheStats:
        """Counters since the load or `reset_stats()`. Any thread may ask, during a generation too."""
        with self._engine_lock:
            if self._stats_reader is None:
                self._stats_reader = _StatsReader(self._engine_context())
            return self._stats_reader.read()

    def reset_stats(self) -> None:
        """Sets all counters to 0; what is resident stays."""
        with self._engine() as ctx:
            _lib.lib.hobbit_stats_reset(ctx)

    @contextmanager
    def stats_delta(self) -> Iterator[StatsDelta]:
        """`with model.stats_delta() as delta: ...`, then `delta.stats` holds what happened inside."""
        delta = StatsDelta(self.cache_stats)
        try:
            yield delta
        finally:
            delta.finish()

    @contextmanager
    def receipt(self) -> Iterator[Receipt]:
        """`with model.receipt() as r: ...`: gate weight in low precision and skipped, and what that costs, estimated.

        The estimate needs `profile=FILE` with what `hobbit quality --profile FILE` measured on these files.
        """
        curve = curve_of(self._engine_options.get("profile"), self.placement)
        with self.stats_delta() as delta:
            yield Receipt(lambda: delta.stats, curve)

    def resident(self) -> npt.NDArray[np.int8]:
        """[layer with experts, expert]: 0 absent, 1 low, 2 high precision. Waits for the end of a running step."""
        with self._engine() as ctx:
            placement = json.loads(_lib.read_text(_lib.lib.hobbit_placement_json, ctx))
            out = np.zeros((placement["n_layer"], placement["n_expert"]), dtype=np.int8)
            pointer = out.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
            n: int = _lib.lib.hobbit_resident(ctx, pointer, out.size)
        assert n == out.size, f"{n} experts in the library, {out.size} in the placement"
        return out

    def save_stats(self, path: str | os.PathLike[str]) -> None:
        """Writes statistics and residency as JSON for `hobbit stats` and `hobbit plot`."""
        resident = tuple("".join(map(str, row)) for row in self.resident().tolist())
        dataclasses.replace(self.cache_stats(), resident=resident).save(path)

    def resize(self, cache: str | int) -> None:
        """Gives the cache another size, as the argument `cache`; what was used last stays as far as it fits.

        Waits for the end of a running step. In deterministic and exact mode the tokens that follow are the same.

        Raises:
            ValueError: too small for one token, or no memory; the message names the number that works.
        """
        error = ctypes.create_string_buffer(1024)
        with self._engine() as ctx:
            if not _lib.lib.hobbit_resize(ctx, _lib.option_text(cache).encode(), error, len(error)):
                raise ValueError(os.fsdecode(error.value))
        self._engine_options["cache"] = cache

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """`with model.trace("run.trace"): ...` writes what the router chooses inside, and what the cache does about it.

        `hobbit_py.trace.Trace.load` reads the file, `hobbit_py.replay` takes its decisions again with other settings.

        Raises:
            ValueError: the file cannot be written, or a trace of this model is being written already.
        """
        error = ctypes.create_string_buffer(1024)
        with self._engine() as ctx:
            if not _lib.lib.hobbit_trace_start(ctx, os.fsencode(path), error, len(error)):
                raise ValueError(os.fsdecode(error.value))
        try:
            yield
        finally:
            if self._ctx.ctx is not None:  # closing the model closes the file
                with self._engine() as ctx:
                    if not _lib.lib.hobbit_trace_stop(ctx, error, len(error)):
                        raise ValueError(os.fsdecode(error.value))

    def set_policy(self, choose: Callable[[Candidates], int] | None) -> None:
        """Which expert leaves the cache is decided by a Python function, for experiments; `None`: by `policy` again.

        The function gets what may be evicted and returns an index into it. It runs for every eviction, while the model
        computes, and must not call the model. What it raises is raised by the call that computes, after the batch.

            model.set_policy(lambda candidates: int(candidates.stamps.argmin()))  # least recently used
        """
        policy = None if choose is None else _Policy(choose)
        with self._engine() as ctx:
            _lib.lib.hobbit_set_policy(
                ctx, None if policy is None else ctypes.cast(policy.callback, ctypes.c_void_p), None
            )
            self._policy = policy  # C holds no reference
            self._stats_reader = None


def _guarded(processor: Callable[..., Any], errors: list[BaseException]) -> Callable[..., Any]:
    """A logits processor that keeps its exception and leaves the logits alone."""

    def call(input_ids: Any, logits: Any) -> Any:
        try:
            return processor(input_ids, logits)
        except BaseException as error:  # KeyboardInterrupt included
            errors.append(error)
            return logits

    return call


class _Progress:
    """The user's callback as llama.cpp wants it. Knows nothing of the model, which must not become part of a cycle."""

    def __init__(self, callback: Callable[[float], object]) -> None:
        self._callback = callback
        self._error: BaseException | None = None

    def __call__(self, share: float, user_data: object) -> bool:
        try:
            if self._callback(share) is False:
                self._error = ValueError(f"the load was stopped by the progress callback at {100 * share:.0f} %")
        except BaseException as error:  # KeyboardInterrupt included; the load ends, then it is raised
            self._error = error
        return self._error is None

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error


@dataclasses.dataclass(frozen=True)
class Candidates:
    """What may be evicted to make room for one expert. Arrays have an entry per candidate and live as long as the call.

    With several sequences in one step, `tokens`, `last`, `used` and `high` are the highest of them.
    """

    layer: int  # that needs the room, an index into `cache_stats().layers`
    precision: str  # of all candidates, and of what comes: "low" or "high"
    tokens: int  # in the sequence so far (T of the paper)
    layers: npt.NDArray[np.int32]
    experts: npt.NDArray[np.int32]
    stamps: npt.NDArray[np.uint64]  # greater: touched later, by any sequence
    last: npt.NDArray[np.uint32]  # token at which it was last used, 1 is the first, 0: never (R)
    used: npt.NDArray[np.uint32]  # uses (F)
    high: npt.NDArray[np.uint32]  # uses in high precision (H)


class _Policy:
    """A Python function as the C callback wants it; its exception is kept, and the configured policy decides."""

    def __init__(self, choose: Callable[[Candidates], int]) -> None:
        self._choose = choose
        self._error: BaseException | None = None
        self.callback = _lib.CHOOSE(self._call)

    def _call(self, user: int | None, pointer: Any) -> int:
        if self._error is not None:
            return -1
        raw = pointer.contents
        try:
            index = int(self._choose(_candidates(raw)))
            if not 0 <= index < raw.n:
                raise IndexError(f"the policy chose candidate {index} of {raw.n}")
        except BaseException as error:  # KeyboardInterrupt included: it cannot pass through C
            self._error = error
            return -1
        return index

    def raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def _candidates(raw: Any) -> Candidates:
    def array(address: int, kind: Any) -> Any:
        return np.frombuffer((ctypes.c_char * (raw.n * np.dtype(kind).itemsize)).from_address(address), dtype=kind)

    return Candidates(
        layer=raw.layer,
        precision="high" if raw.precision == 2 else "low",
        tokens=raw.n_tokens,
        layers=array(raw.layers, np.int32),
        experts=array(raw.experts, np.int32),
        stamps=array(raw.stamps, np.uint64),
        last=array(raw.last, np.uint32),
        used=array(raw.used, np.uint32),
        high=array(raw.high, np.uint32),
    )


class _StatsReader:
    """Statistics as numbers instead of JSON, for who reads a hundred times a second: one call, one copy.

    What does not change between two readings is taken from the JSON once.
    """

    def __init__(self, ctx: int) -> None:
        first = CacheStats.from_json(_lib.read_text(_lib.lib.hobbit_stats_json, ctx))
        assert first.resident is not None
        self._layout = RawLayout(
            _HEAD,
            ctypes.sizeof(_lib.StatsHead),
            _lib.COUNTER_NAMES,
            [layer.block for layer in first.layers],
            [len(digits) for digits in first.resident],
            {name: getattr(first, name) for name in ("version", "precision", "policy")},
        )
        self._buffer = ctypes.create_string_buffer(self._layout.size)
        begin = ctypes.addressof(self._buffer)
        places = (ctx, begin, begin + self._layout.counters_at, begin + self._layout.resident_at)
        self._arguments = tuple(map(ctypes.c_void_p, places))  # ready made, or ctypes makes them for each call

    def read(self) -> CacheStats:
        _lib.lib.hobbit_stats_read(*self._arguments)
        return CacheStats.from_raw(self._layout, self._buffer.raw)


def _head_fields() -> dict[str, tuple[struct.Struct, int]]:
    """Type and place of the fields of `hobbit_stats_head` that `CacheStats` has too."""
    wanted = {f.name for f in dataclasses.fields(CacheStats)}
    codes: dict[Any, str] = {ctypes.c_uint64: "Q", ctypes.c_int32: "i"}
    found: dict[str, tuple[struct.Struct, int]] = {}
    fields: Any = _lib.StatsHead._fields_
    for name, kind in fields:
        place = getattr(_lib.StatsHead, name)
        if name in wanted:
            found[name] = struct.Struct("@" + codes.get(kind, f"{place.size}s")), place.offset
    return found


_HEAD = _head_fields()


class StatsDelta:
    """The statistics of a `with` block: growing inside it, fixed after it."""

    def __init__(self, read: Callable[[], CacheStats]) -> None:
        self._read: Callable[[], CacheStats] | None = read
        self._start = read()
        self._end: CacheStats | None = None

    @property
    def stats(self) -> CacheStats:
        now = self._end if self._read is None else self._read()
        assert now is not None
        return now - self._start

    def finish(self) -> None:
        if self._read is not None:
            self._end = self._read()
            self._read = None


@contextmanager
def _reading() -> Iterator[None]:
    """Turns the number that a failed decode returns into the engine's reason."""
    with _lib.error_lines() as lines:
        try:
            yield
        except RuntimeError as error:
            why = _lib.reason(lines, "experts could not be read:")
            if why is None:
                raise
            raise ExpertReadError(why or "experts could not be read") from error


def _unknown(name: str, options: dict[str, Any]) -> str:
    names = [*_LLAMA_OPTIONS, *options, *_lib.OPTIONS, "progress"]
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    return (
        f"unknown option '{name}'{hint} llama_cpp.Llama has no such parameter, and the engine's options are "
        f"{', '.join(sorted(_lib.OPTIONS))}"
    )
