"""What a lossy setting costs: perplexity, KL divergence, flipped first choices against exact mode, for bytes moved.

`Measurement` runs settings over a text, each with llama-perplexity's KL machinery in deterministic mode, one token per
ubatch, so that every token gets what its own gate weights ask for (`prefill=True` adds one ubatch per window, where
an expert has the highest precision that any token asks for). The reference is exact mode on the same model in the same
shape. Only the second half of each window is scored, as llama-perplexity does.

Bytes per token come from the engine: with a cache of 0 every selection is a miss, so they follow from the selections;
for other sizes the text is decoded token by token through that cache, without prefetching, and misses are counted.
A cache size in percent is a share of the model's experts, the same memory for every setting.

The rival of a mixed setting is a uniformly lower quant of the experts, the dense part untouched: `uniform:TYPE`.
Finished measurements are kept in the work folder, so that the same call goes on where it ended.
"""

from __future__ import annotations

import codecs
import dataclasses
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from gguf_tools import ggml
from gguf_tools.merge import plan_merge, run_merge
from gguf_tools.model import open_model
from gguf_tools.pair import PairOptions, plan_pair, run_pair
from hobbit_py import _lib
from hobbit_py import plot as plot_
from hobbit_py.hobbit import Hobbit, Llama
from hobbit_py.live import MIB, format_bytes
from hobbit_py.receipt import Point, write_points
from hobbit_py.stats import CacheStats, ratio

VERSION = 1  # of the JSON
UNIFORM = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K")
PAPER = (0.6, 0.9)
NO_SKIP = (0.6, 1.0)
QUANTILES = (0.67, 0.97)  # shares of the selections up to which the paper's Mixtral is high, and not skipped
MIN_SCORED = 100  # llama-perplexity gives no statistics on fewer tokens
MAX_BASE_BYTES = 4 << 30


#
# settings
#


@dataclass(frozen=True)
class Setting:
    """One way to run the model. `high` and `low` are ggml types in capitals, or ""; `low` may be "file"."""

    name: str
    high: str = ""  # "": the model's own experts
    low: str = ""
    rule: str = "high"
    t1: float = PAPER[0]
    t2: float = PAPER[1]
    renormalise: bool = False
    quantile: bool = False  # t1 and t2 are to be found on the text
    low_share: float = 0.0  # of the cache's bytes for low copies; 0: the engine's default

    @property
    def uniform(self) -> bool:
        """All experts in one precision."""
        return self.rule in ("high", "low")

    def options(self) -> dict[str, Any]:
        """The engine's options but files and cache, by keyword."""
        mixed = {"t1": self.t1, "t2": self.t2, "renormalise": self.renormalise or None}
        mixed["low_share"] = self.low_share or None
        options = {"precision": self.rule, "deterministic": True, **({} if self.uniform else mixed)}
        return {name: value for name, value in options.items() if value is not None}

    def what(self) -> dict[str, Any]:
        """All but its name."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "name"}


_THRESHOLDS = {"paper": PAPER, "noskip": NO_SKIP, "quantile": PAPER}
_SETTING = re.compile(
    r"(?:(?P<exact>exact)|uniform:(?P<uniform>\w+)|(?:(?P<skip>skip)|(?P<article>article:)?(?P<high>\w+)\+(?P<low>\w+))"
    r"(?:@(?P<name>paper|noskip|quantile)|@(?P<t1>[\d.]+)(?:/(?P<t2>[\d.]+))?)?(?P<renormalise>/renormalise)?"
    r"(?:/low-share=(?P<low_share>0\.\d+))?)"
)


def parse_setting(text: str) -> Setting:
    """exact, uniform:TYPE, HIGH+LOW[@THRESHOLDS], article:HIGH+LOW[@T1/T2] or skip[@T].

    THRESHOLDS: T1/T2, paper (0.6/0.9), noskip (0.6/1) or quantile; then `/renormalise`, `/low-share=0.5`. HIGH is a
    type or `model`, LOW a type or `file`, which stands for the file of `--low`.

    Raises:
        ValueError: something else.
    """
    found = _SETTING.fullmatch(text)
    if not found:
        raise ValueError(
            f"setting '{text}': exact, uniform:Q4_K, model+Q4_0@0.6/0.9, Q8_0+Q2_K@noskip (or paper, quantile, "
            "T1/T2/renormalise), article:model+Q4_0@0.6/0.9 or skip@0.6 is expected"
        )
    part = found.groupdict()

    def type_name(name: str, alias: str) -> str:
        if name.lower() in ("model", "file"):
            if name.lower() != alias:
                raise ValueError(f"setting '{text}': '{name}' does not stand here")
            return "" if alias == "model" else alias
        ggml.type_by_name(name.lower())  # refuses an unknown one
        return name.upper()

    if part["exact"]:
        return Setting(text)
    if part["uniform"]:
        return Setting(text, low=type_name(part["uniform"], "file"), rule="low")
    t1, t2 = _THRESHOLDS[part["name"]] if part["name"] else PAPER
    if part["t1"]:
        t1 = float(part["t1"])
        t2 = float(part["t2"]) if part["t2"] else t1 if part["skip"] else PAPER[1]
    elif part["skip"]:
        t2 = t1
    if not 0 <= t1 <= t2 <= 1:
        raise ValueError(f"setting '{text}': 0 <= T1 <= T2 <= 1 is needed")
    renormalise = bool(part["renormalise"])
    if part["skip"]:
        return Setting(text, rule="hobbit", t1=t1, t2=t2, renormalise=renormalise)
    return Setting(
        text,
        high=type_name(part["high"], "model"),
        low=type_name(part["low"], "file"),
        rule="article" if part["article"] else "hobbit",
        t1=t1,
        t2=t2,
        renormalise=renormalise,
        quantile=part["name"] == "quantile",
        low_share=float(part["low_share"] or 0),
    )


CALIBRATION = ("0/1", "0.3/1", "0.8/1", "0.6/0.95", "0.8/0.95", "0.3/0.8")  # beside those of default_settings


def default_settings(has_low: bool, calibrate: bool = False) -> list[str]:
    """Exact mode, pairs at several thresholds, and the uniform quants that they have to beat."""
    lows = ["file"] if has_low else ["Q4_K", "Q2_K"]
    mixed = [f"model+{low}@{thresholds}" for low in lows for thresholds in ("paper", "quantile", "noskip")]
    if calibrate:
        mixed += [f"model+file@{thresholds}" for thresholds in CALIBRATION]
    return ["exact", *mixed, *(["uniform:file"] if has_low else []), *(f"uniform:{t}" for t in UNIFORM)]


#
# results
#


@dataclass(frozen=True)
class Divergence:
    """From exact mode in the same batches. KL in nats per token; `flips` is the share of other first choices."""

    ppl: float
    ppl_se: float
    ppl_percent: float  # change of perplexity against exact mode
    ppl_percent_se: float
    kl: float
    kl_se: float
    kl_p99: float
    kl_max: float
    flips: float
    flips_se: float
    shares: tuple[float, float, float]  # of the selections: high, low, skipped; layers weigh the same
    mass: tuple[float, float] = (0.0, 0.0)  # shares of the gate weight in low precision, and skipped


@dataclass(frozen=True)
class Traffic:
    """What decoding moves through a cache. Sizes in bytes."""

    cache_bytes: int
    bytes_per_token: float
    hit_rate: float
    tokens_per_second: float


@dataclass(frozen=True)
class Measured:
    setting: Setting
    decode: Divergence
    prefill: Divergence | None = None
    bytes_per_token: float = 0.0  # if every selection missed
    traffic: dict[str, Traffic | None] = field(default_factory=dict)  # None: the cache is too small for this setting

    def bytes_at(self, cache: str) -> float | None:
        """Expert bytes per token through that cache; "0" is none."""
        if cache == "0":
            return self.bytes_per_token
        traffic = self.traffic.get(cache)
        return None if traffic is None else traffic.bytes_per_token

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Measured:
        def divergence(d: dict[str, Any]) -> Divergence:
            return Divergence(**{**d, "shares": tuple(d["shares"]), "mass": tuple(d["mass"])})

        return cls(
            Setting(**data["setting"]),
            divergence(data["decode"]),
            None if data["prefill"] is None else divergence(data["prefill"]),
            data["bytes_per_token"],
            {cache: None if t is None else Traffic(**t) for cache, t in data["traffic"].items()},
        )


@dataclass(frozen=True)
class Report:
    """All settings of one model and text, in the order asked for."""

    model: str
    text: str
    tokens: int  # decoded per setting
    scored: int
    context: int
    threads: int
    expert_bytes: int  # of the model's own experts
    caches: tuple[str, ...]
    results: tuple[Measured, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"quality": VERSION, **dataclasses.asdict(self)}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """From the JSON of `hobbit quality`.

        Raises:
            ValueError: the file holds something else.
        """
        try:
            data = json.loads(Path(path).read_bytes())
            if data["quality"] != VERSION:
                raise ValueError(f"version {data['quality']}")
            plain = {name: value for name, value in data.items() if name != "quality"}
            plain["caches"] = tuple(plain["caches"])
            plain["results"] = tuple(Measured.from_dict(r) for r in plain["results"])
            return cls(**plain)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{os.fspath(path)}: no quality report of version {VERSION}: {error}") from None


def pareto(results: Sequence[Measured], cache: str) -> list[Measured]:
    """The results that no other beats in both bytes per token and KL, by bytes."""
    at = [(b, r.decode.kl, r) for r in results if (b := r.bytes_at(cache)) is not None]
    front: list[Measured] = []
    best = float("inf")
    for _, kl, r in sorted(at, key=lambda x: x[:2]):
        if kl < best:
            front.append(r)
            best = kl
    return front


def uniform_line(results: Sequence[Measured], cache: str, bytes_per_token: float) -> tuple[float | None, float | None]:
    """What uniform quants reach with no more bytes per token: the least KL of one of them, and of a mixture of two.

    The second is the lower hull of the uniform points: a model with some layers in one type and some in the other.
    None where every uniform quant moves more.
    """
    points = sorted((b, r.decode.kl) for r in results if r.setting.uniform and (b := r.bytes_at(cache)) is not None)
    fits = [kl for b, kl in points if b <= bytes_per_token]
    if not fits:
        return None, None
    hull: list[tuple[float, float]] = []
    for b, kl in points:
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (b - hull[-2][0]) >= (kl - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((b, kl))
    for (b0, kl0), (b1, kl1) in itertools.pairwise(hull):
        if b0 <= bytes_per_token <= b1 and b1 > b0:
            between = kl0 + (kl1 - kl0) * (bytes_per_token - b0) / (b1 - b0)
            return min(fits), min(min(fits), between)
    return min(fits), min(fits)


def verdict(report: Report, cache: str) -> str:
    """Which mixed settings have less KL than every uniform quant that moves no more bytes, in one sentence."""
    won: list[tuple[float, str]] = []
    mixed = [r for r in report.results if not r.setting.uniform]
    for r in mixed:
        size = r.bytes_at(cache)
        if size is None:
            continue
        best, between = uniform_line(report.results, cache, size)
        if best is not None and between is not None and r.decode.kl + r.decode.kl_se < best:
            also = " (and their mixture)" if r.decode.kl + r.decode.kl_se < between else ""
            won.append((best / r.decode.kl, f"{r.setting.name} {best / r.decode.kl:.1f} times less{also}"))
    at = "every selection missed" if cache == "0" else f"a cache of {cache}"
    if not won:
        return (
            f"{at}: no mixed setting of {len(mixed)} has less KL than every uniform quant of no more bytes per token."
        )
    best_first = [text for _, text in sorted(won, reverse=True)]
    return (
        f"{at}: {len(won)} of {len(mixed)} mixed settings have less KL than every uniform quant of no more bytes per "
        f"token: {'; '.join(best_first)}."
    )


#
# files: the model's experts in other types
#


class Variants:
    """Files of the model with its experts in other types, made on demand in a folder and kept there."""

    def __init__(self, model: Path, folder: Path, low: Path | None = None) -> None:
        self.model = model
        self.folder = folder
        self.low = low
        source = open_model(model)
        if not source.experts:
            raise ValueError(
                f"{model}: no routed experts in it; of a pair, take `gguf-tools merge BASE -o MODEL.gguf` first"
            )
        types = {e.type.name.upper() for e in source.experts if e.type is not None}
        self.type = next(iter(types)) if len(types) == 1 else "mixed"
        self.n_used = source.arch_int("expert_used_count") or 0
        self.expert_bytes = sum(e.source_bytes for e in source.experts)

    def high(self, name: str) -> Path:
        """An ordinary GGUF whose experts have that type; the model itself for "" and its own type."""
        if name in ("", self.type):
            return self.model
        path = self.folder / f"{self.model.stem}.with-{name}.gguf"
        if not self._is_fresh(path):
            pair = self.folder / "pair.tmp"
            shutil.rmtree(pair, ignore_errors=True)
            plan = plan_pair(PairOptions(self.model, pair, high="keep", low=(name.lower(),), name="x"))
            run_pair(plan)
            plan.close()
            merge = plan_merge(pair / "x.base.gguf", path, experts=name.lower(), force=True)
            run_merge(merge)
            merge.close()
            shutil.rmtree(pair)
        return path

    def low_file(self, name: str) -> Path:
        """A file of expert copies of that type, quantised from the model's own; "file": the one that was given."""
        if name == "file":
            if self.low is None:
                raise ValueError("a setting names `file`, and there is no --low FILE")
            return self.low
        path = self.folder / f"{self.model.stem}.experts-{name}.gguf"
        if not self._is_fresh(path):
            options = PairOptions(
                self.model, self.folder, low=(name.lower(),), low_only=True, force=True, name=self.model.stem
            )
            plan = plan_pair(options)
            run_pair(plan)
            plan.close()
            if not path.is_file():
                made = ", ".join(sorted(p.name for p in self.folder.glob("*.experts-*.gguf")))
                raise ValueError(f"experts of {self.model} cannot be stored as {name}; there are {made}")
        return path

    def options(self, setting: Setting) -> tuple[Path, dict[str, Any]]:
        """The model file and the engine's options, by keyword, that a setting means."""
        options = setting.options()
        if setting.low and setting.rule != "high":
            options["low"] = self.low_file(setting.low)
        return self.high(setting.high), options

    def _is_fresh(self, path: Path) -> bool:
        return path.is_file() and path.stat().st_mtime_ns >= self.model.stat().st_mtime_ns


def expert_sizes(path: Path) -> dict[int, int]:
    """Block -> bytes of one expert in that file."""
    sizes: dict[int, int] = {}
    for e in open_model(path).experts:
        sizes[e.layer] = sizes.get(e.layer, 0) + e.source_bytes // e.n_expert
    return sizes


#
# measuring
#

Watch = Callable[[float, str], None]  # tokens done since the last call, and what is being done


@dataclass(frozen=True)
class Shape:
    """The text as windows of `context` tokens, `ubatch` tokens computed at a time."""

    context: int
    chunks: int
    ubatch: int
    threads: int

    @property
    def name(self) -> str:
        return f"c{self.context}-n{self.chunks}-ub{self.ubatch}-t{self.threads}"


class Measurement:
    """One model on one text. `results` yields each setting as it is done.

    Args:
        model, low: GGUF files; `low` is what settings call `file`.
        text: UTF-8 text.
        work: folder for quantised files, the reference's log probabilities and finished results.
        chunks: windows of `context` tokens, at most; the text may hold fewer.
        caches: sizes for counting misses: "15%" of the model's experts, or "512MiB".
        traffic_tokens: decoded for each of them, a quarter of it before counting begins.
        max_base_bytes: bound on the file of log probabilities, 2 * (n_vocab + 4) bytes per scored token.

    Raises:
        ValueError: the text is too short, or the file of log probabilities too large; the message has what works.
    """

    def __init__(
        self,
        model: Path,
        text: Path,
        work: Path,
        *,
        low: Path | None = None,
        context: int = 256,
        chunks: int = 32,
        caches: Sequence[str] = ("15%", "40%"),
        traffic_tokens: int = 1024,
        prefill: bool = False,
        threads: int = 0,
        max_base_bytes: int = MAX_BASE_BYTES,
        fresh: bool = False,
    ) -> None:
        self.variants = Variants(model, work, low)
        self.text = text
        self.work = work
        self.caches = tuple(caches)
        self.traffic_tokens = traffic_tokens
        self.prefill = prefill
        self.threads = threads or os.cpu_count() or 1
        vocabulary = Llama(os.fspath(model), vocab_only=True, verbose=False)
        self.tokens = vocabulary.tokenize(text.read_bytes(), special=False)
        n_vocab = vocabulary.n_vocab()
        vocabulary.close()
        per_chunk = context - 1 - context // 2
        chunks = min(chunks, len(self.tokens) // context)
        if chunks < 2 or chunks * per_chunk < MIN_SCORED:
            least = max(2, -(-MIN_SCORED // max(1, per_chunk)))
            raise ValueError(
                f"{text}: {len(self.tokens)} tokens are {chunks} windows of {context}, whose second half is scored; "
                f"{least * context} tokens are needed, and --chunks {least} at least"
            )
        self.shape = Shape(context, chunks, 1, self.threads)
        self.scored = chunks * per_chunk
        per_token = 2 * (n_vocab + 4)
        self.base_bytes = self.scored * per_token
        if self.base_bytes > max_base_bytes:
            raise ValueError(
                f"log probabilities of {self.scored} tokens take {format_bytes(self.base_bytes)}, {per_token} bytes "
                f"each, more than the {format_bytes(max_base_bytes)} allowed; --chunks "
                f"{max_base_bytes // (per_token * per_chunk)} fits, or raise --max-base"
            )
        self.work.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.work / "lock", "w")  # held until this object goes
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{work}: another `hobbit quality` works there; --work names another folder") from None
        stat = model.stat()
        self._low_identity = None if low is None else [low.stat().st_size, low.stat().st_mtime_ns]
        self._text_hash = hashlib.sha256(text.read_bytes()).hexdigest()
        self._model_identity = [VERSION, _lib.BINDING_VERSION, stat.st_size, stat.st_mtime_ns]
        library = next(_lib.library_dir / n for n in _lib.LIBRARY_NAMES if (_lib.library_dir / n).is_file())
        self._library = hashlib.sha256(library.read_bytes()).hexdigest()[:16]
        self._kept = self.work / "measured.json"
        if fresh:
            self._kept.unlink(missing_ok=True)
            for base in self.work.glob("exact-*.logits"):
                base.unlink()
        self._done: dict[str, Any] = json.loads(self._kept.read_bytes()) if self._kept.is_file() else {}

    def report(self, results: Sequence[Measured]) -> Report:
        s = self.shape
        return Report(
            str(self.variants.model),
            str(self.text),
            s.context * s.chunks,
            self.scored,
            s.context,
            self.threads,
            self.variants.expert_bytes,
            ("0", *self.caches),
            tuple(results),
        )

    def results(self, settings: Sequence[Setting], watch: Watch | None = None) -> Iterator[Measured]:
        watch = watch or (lambda tokens, what: None)
        for setting in settings:
            yield self._measured(self.fitted(setting, watch), watch)

    def cost(self, settings: Sequence[Setting]) -> float:
        """Tokens to decode for these settings, those that are kept left out."""
        total = 0.0
        for setting in settings:
            shapes = self._shapes()
            total += sum(s.context * s.chunks * _weight(s) for s in shapes if not self._has(setting, s.name))
            total += sum(self.traffic_tokens for cache in self.caches if not self._has(setting, f"cache {cache}"))
        for s in self._shapes():
            total += 0 if self._base(s).is_file() else s.context * s.chunks * _weight(s)
        return total

    def _shapes(self) -> list[Shape]:
        return [
            self.shape,
            *([dataclasses.replace(self.shape, ubatch=self.shape.context)] if self.prefill else []),
        ]

    def _base(self, shape: Shape) -> Path:
        return self.work / f"exact-{shape.name}-{_key(self._identity(Setting('exact')))}.logits"

    def _has(self, setting: Setting, part: str) -> bool:
        return self._slot(setting, part) in self._done

    def _slot(self, setting: Setting, part: str) -> str:
        if part.startswith("cache"):
            # what a cache misses is a matter of the library's policy, what an expert computes is not
            part += f" {self.traffic_tokens} {self.shape.context} {self.threads} {self._library}"
        else:
            setting = dataclasses.replace(setting, low_share=0.0)
        return _key([self._identity(setting), setting.what(), part])

    def _identity(self, setting: Setting) -> list[Any]:
        """What a kept result belongs to: these files and this text."""
        low = self._low_identity if setting.low == "file" else None
        return [*self._model_identity, low, self._text_hash]

    def _keep(self, slot: str, value: Any) -> Any:
        self._done[slot] = value
        partial = self._kept.with_suffix(".tmp")
        partial.write_text(json.dumps(self._done, indent=1), encoding="utf-8")
        partial.replace(self._kept)
        return value

    def _measured(self, setting: Setting, watch: Watch) -> Measured:
        divergences = []
        for shape in self._shapes():
            slot = self._slot(setting, shape.name)
            found = self._done.get(slot)
            if found is None:
                found = self._keep(slot, self._divergence(setting, shape, watch))
            divergences.append(found)
        traffic: dict[str, Any] = {}
        for cache in self.caches:
            slot = self._slot(setting, f"cache {cache}")
            if slot in self._done:
                traffic[cache] = self._done[slot]
            else:
                watch(0, f"{setting.name}, cache {cache}")
                traffic[cache] = self._keep(slot, self._traffic(setting, cache, watch))
        decode = dict(divergences[0])
        missed = decode.pop("bytes_per_token")
        prefill = dict(divergences[1]) if len(divergences) > 1 else None
        if prefill is not None:
            prefill.pop("bytes_per_token")
        return Measured.from_dict(
            {
                "setting": dataclasses.asdict(setting),
                "decode": decode,
                "prefill": prefill,
                "bytes_per_token": missed,
                "traffic": traffic,
            }
        )

    #
    # divergence: llama-perplexity
    #

    def _divergence(self, setting: Setting, shape: Shape, watch: Watch) -> dict[str, Any]:
        base = self._base(shape)
        if not base.is_file():
            partial = base.with_suffix(".partial")
            exact = Setting("exact")
            self._perplexity(exact, shape, ["--kl-divergence-base", str(partial)], watch, "exact, reference")
            partial.replace(base)
        stats_path = self.work / "stats.tmp"
        stats_path.unlink(missing_ok=True)
        arguments = ["--kl-divergence", "--kl-divergence-base", str(base), "--hobbit-stats", str(stats_path)]
        output = self._perplexity(setting, shape, arguments, watch, setting.name)
        stats = CacheStats.load(stats_path)
        stats_path.unlink()
        return {**_read_divergence(output), **self._selections(setting, stats)}

    def _perplexity(self, setting: Setting, shape: Shape, more: list[str], watch: Watch, what: str) -> str:
        """The output of llama-perplexity, which `watch` follows window by window."""
        model, options = self.variants.options(setting)
        command = [str(_lib.program("llama-perplexity")), "-m", str(model), "-f", str(self.text), "--no-repack"]
        command += ["-c", str(shape.context), "-b", str(shape.context), "-ub", str(shape.ubatch)]
        command += ["--chunks", str(shape.chunks), "-t", str(shape.threads)]
        for name, value in {"cache": "auto", "prefetch": "off", **options}.items():
            option = _lib.OPTIONS[name]
            if option.hint is not None:
                command += [option.flag, _lib.option_text(value)]
            elif value:
                command.append(option.flag)
        env = {k: v for k, v in os.environ.items() if not k.startswith("LLAMA_ARG_")} | {"OMP_WAIT_POLICY": "passive"}
        watch(0, what if shape.ubatch == 1 else f"{what}, prefill")
        process = subprocess.Popen(
            [*command, *more], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env
        )
        assert process.stdout is not None
        text, done = "", 0
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        try:
            while piece := os.read(process.stdout.fileno(), 1 << 16):
                text += decoder.decode(piece)
                tail = text[-4000:]
                tail = tail[tail.find("\n") + 1 :]  # a line that is cut begins with the wrong number
                window = max((int(a or b) for a, b in _WINDOW.findall(tail)), default=0)
                if window > done:
                    watch((window - done) * shape.context * _weight(shape), what)
                    done = window
        except BaseException:
            process.kill()
            raise
        finally:
            process.stdout.close()
            code = process.wait()
        if code != 0 or "failed to decode" in text:
            lines = [
                line for line in text.splitlines() if "error" in line.lower() or "failed" in line
            ] or text.splitlines()
            raise ValueError(f"llama-perplexity failed ({code}) on {setting.name}: {' '.join(lines[-3:])[-600:]}")
        return text

    def _selections(self, setting: Setting, stats: CacheStats) -> dict[str, Any]:
        """Shares of the selections, and expert bytes per token if all missed: by layer and row, then over layers.

        The last layer computes only the scored half of the tokens, so that counts of layers cannot be added.
        """
        model, options = self.variants.options(setting)
        high = expert_sizes(model)
        low = expert_sizes(options["low"]) if "low" in options else high
        shares = [0.0, 0.0, 0.0]
        mass = [0.0, 0.0]
        size = 0.0
        for layer in stats.layers:
            for i, share in enumerate(layer.mix):
                shares[i] += share / len(stats.layers)
            for i, share in enumerate(layer.mass):
                mass[i] += share / len(stats.layers)
            rows = layer.selected / self.variants.n_used
            size += ratio(layer.selected_high * high[layer.block] + layer.selected_low * low[layer.block], rows)
        return {"shares": shares, "mass": mass, "bytes_per_token": size}

    #
    # traffic: decoding through a cache
    #

    def cache_bytes(self, cache: str) -> int:
        """A size in percent of the model's experts, or with a unit; in bytes.

        Raises:
            ValueError: neither.
        """
        found = re.fullmatch(r"([\d.]+)(%|[KMG]iB)", cache)
        if not found:
            raise ValueError(f"cache '{cache}': 15% (of the model's experts), 512MiB or 4GiB is expected")
        unit = {"%": self.variants.expert_bytes / 100, "KiB": 1024, "MiB": MIB, "GiB": 1024 * MIB}[found[2]]
        return int(float(found[1]) * unit)

    def _traffic(self, setting: Setting, cache: str, watch: Watch) -> dict[str, Any] | None:
        model, options = self.variants.options(setting)
        size = self.cache_bytes(cache)
        window = self.shape.context
        try:
            loaded = Hobbit(
                model,
                cache=f"{size // 1024}KiB",
                prefetch="off",
                n_ctx=window,
                n_threads=self.threads,
                n_threads_batch=self.threads,
                verbose=False,
                **options,
            )
        except ValueError as error:
            if "too small" in str(error):
                watch(self.traffic_tokens, setting.name)
                return None
            raise
        with loaded as llm:
            warm = self.traffic_tokens // 4
            before = llm.cache_stats()
            start = time.perf_counter()
            for n in range(self.traffic_tokens):
                if n == warm:
                    before, start = llm.cache_stats(), time.perf_counter()
                if n % window == 0:
                    llm.reset()  # type: ignore[no-untyped-call]
                llm.eval([self.tokens[n % len(self.tokens)]])
                if n % 64 == 63:
                    watch(64, f"{setting.name}, cache {cache}")
            seconds = time.perf_counter() - start
            delta = llm.cache_stats() - before
        n_tokens = self.traffic_tokens - warm
        return {
            "cache_bytes": size,
            "bytes_per_token": delta.total.read_bytes / n_tokens,
            "hit_rate": delta.total.hit_rate,
            "tokens_per_second": n_tokens / seconds,
        }

    #
    # thresholds from quantiles
    #

    def fitted(self, setting: Setting, watch: Watch) -> Setting:
        """The setting with its thresholds, where they are quantiles of the score on the text."""
        if not setting.quantile:
            return setting
        slot = _key([self._identity(Setting("exact")), "quantiles", self.threads])
        found = self._done.get(slot)
        if found is None:
            watch(0, "quantiles of the score")
            found = self._keep(slot, score_quantiles(self.variants.model, self.tokens[:512], self.threads))
        return dataclasses.replace(setting, t1=found[0], t2=found[1])


def score_quantiles(
    model: Path, tokens: Sequence[int], threads: int, shares: Sequence[float] = QUANTILES
) -> list[float]:
    """Scores up to which these shares of the selections lie, with exact experts; to 1/256.

    The model is its own low copy, so that the precision rule counts selections by score and changes no number.
    """

    def share_below(threshold: float) -> float:
        with Hobbit(
            model,
            low=model,
            precision="hobbit",
            t1=threshold,
            t2=1.0,
            deterministic=True,
            prefetch="off",
            n_ctx=len(tokens),
            n_threads=threads,
            verbose=False,
        ) as llm:
            for token in tokens:
                llm.eval([token])
            return llm.cache_stats().total.mix[0]

    known = {0.0: share_below(0.0), 1.0: 1.0}
    found = []
    for share in shares:
        low, high = 0.0, 1.0
        while high - low > 1 / 256:
            middle = (low + high) / 2
            if middle not in known:
                known[middle] = share_below(middle)
            if known[middle] < share:
                low = middle
            else:
                high = middle
        found.append(high)
    return found


def save_profile(report: Report, low: Path, profile: Path) -> int:
    """Writes what `model+file` settings cost into a profile, for budgets and receipts; returns how many.

    Raises:
        ValueError: the profile is of another model or other files.
    """
    points = [
        Point(
            r.setting.t1,
            r.setting.t2,
            r.decode.ppl_percent,
            r.decode.ppl_percent_se,
            max(0.0, r.decode.kl),
            *r.decode.mass,
            r.bytes_per_token,
        )
        for r in report.results
        if (r.setting.rule, r.setting.high, r.setting.low, r.setting.renormalise) == ("hobbit", "", "file", False)
    ]
    # the engine says which model and files a profile is of, in the first line of the one that it writes
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder) / "profile"
        with Hobbit(report.model, low=low, precision="hobbit", profile=fresh, n_ctx=32, verbose=False) as llm:
            llm.eval([0])
        head = fresh.read_text(encoding="utf-8").splitlines()[0]
    write_points(profile, head, points)
    return len(points)


def _weight(shape: Shape) -> float:
    """Cost of a token in a batch, in decoded tokens; only progress depends on it."""
    return 1.0 if shape.ubatch == 1 else 0.2


def _key(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


_WINDOW = re.compile(r"\[(\d+)\]\d|^ *(\d+) +\d+\.\d+ ±", re.MULTILINE)
_NUMBER = r"\s*(-?[\d.]+)(?:\s*±\s*([\d.]+))?"


def _read_divergence(output: str) -> dict[str, Any]:
    def find(label: str) -> tuple[float, float]:
        found = re.search(re.escape(label) + r"\s*:" + _NUMBER, output)
        if not found:
            raise ValueError(f"llama-perplexity printed no '{label}': {output[-600:]}")
        return float(found[1]), float(found[2] or 0)

    ppl, ppl_se = find("Mean PPL(Q)")
    ppl_ratio, ppl_ratio_se = find("Mean PPL(Q)/PPL(base)")
    kl, kl_se = find("Mean    KLD")
    same, same_se = find("Same top p")
    return {
        "ppl": ppl,
        "ppl_se": ppl_se,
        "ppl_percent": 100 * (ppl_ratio - 1),
        "ppl_percent_se": 100 * ppl_ratio_se,
        "kl": kl,
        "kl_se": kl_se,
        "kl_p99": find("99.0%   KLD")[0],
        "kl_max": find("Maximum KLD")[0],
        "flips": 1 - same / 100,
        "flips_se": same_se / 100,
    }


#
# tables and pictures
#

COLUMNS = ("setting", "T1/T2", "perplexity", "change %", "mean KL", "p99", "max", "flips %", "high/low/skip %")


def table_columns(report: Report) -> list[str]:
    prefill = ["prefill KL"] if any(r.prefill for r in report.results) else []
    sizes = [("KiB/token" if cache == "0" else f"at {cache}") for cache in report.caches]
    return [*COLUMNS, *prefill, *sizes, "tok/s", "front"]


def row_texts(report: Report, r: Measured, fronts: dict[str, list[Measured]]) -> list[str]:
    """The cells of `table_columns`. `front` names the caches at which nothing is better in bytes and KL."""
    d, s = r.decode, r.setting

    def kib(cache: str) -> str:
        size = r.bytes_at(cache)
        return "too small" if size is None else f"{size / 1024:.0f}"

    rates = [t.tokens_per_second for t in r.traffic.values() if t is not None]
    return [
        s.name,
        "" if s.uniform else f"{s.t1:.3g}/{s.t2:.3g}",
        f"{d.ppl:.3f} ± {d.ppl_se:.3f}",
        f"{d.ppl_percent:+.2f} ± {d.ppl_percent_se:.2f}",
        f"{d.kl:.6f} ± {d.kl_se:.6f}",
        f"{d.kl_p99:.4f}",
        f"{d.kl_max:.4f}",
        f"{100 * d.flips:.2f} ± {100 * d.flips_se:.2f}",
        "/".join(f"{100 * share:.1f}" for share in d.shares),
        *([f"{r.prefill.kl:.6f}" if r.prefill else ""] if any(x.prefill for x in report.results) else []),
        *(kib(cache) for cache in report.caches),
        f"{rates[0]:.0f}" if rates else "",
        " ".join(cache for cache in report.caches if r in fronts[cache]),
    ]


def fronts(report: Report) -> dict[str, list[Measured]]:
    return {cache: pareto(report.results, cache) for cache in report.caches}


def draw(report: Report) -> Any:
    """A matplotlib figure: bytes per token against KL, one panel per cache; uniform quants are squares.

    Raises:
        ImportError: there is no matplotlib.
    """
    plt = plot_._pyplot()
    figure, axes = plt.subplots(
        1, len(report.caches), figsize=(5.2 * len(report.caches), 5), sharey=True, squeeze=False, layout="constrained"
    )
    floor = max(1e-7, min((r.decode.kl for r in report.results if r.decode.kl > 0), default=1e-7) / 2)
    for axis, cache in zip(axes[0], report.caches, strict=True):
        front = pareto(report.results, cache)
        axis.step(
            [cast(float, r.bytes_at(cache)) / MIB for r in front],
            [max(floor, r.decode.kl) for r in front],
            where="post",
            color=plot_.LOW,
            zorder=1,
            label="Pareto front",
        )
        for uniform, marker, color, label in (
            (True, "s", plot_.MISS, "uniform quant"),
            (False, "o", plot_.HIGH, "mixed"),
        ):
            shown = [r for r in report.results if r.setting.uniform == uniform and r.bytes_at(cache) is not None]
            x = [cast(float, r.bytes_at(cache)) / MIB for r in shown]
            y = [max(floor, r.decode.kl) for r in shown]
            axis.scatter(x, y, marker=marker, color=color, s=22, zorder=2, label=label)
            for r, px, py in zip(shown, x, y, strict=True):
                if r not in front and not uniform:
                    continue
                axis.annotate(r.setting.name, (px, py), fontsize=5.5, xytext=(3, 3), textcoords="offset points")
        axis.set(
            yscale="log",
            xlabel="expert bytes per token, MiB",
            title="every selection missed" if cache == "0" else f"cache {cache}",
        )
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("mean KL divergence from exact mode, nats")
    figure.suptitle(f"{Path(report.model).name}, {report.scored} tokens scored", fontsize=10)
    return figure


def save_plot(report: Report, out: str | os.PathLike[str]) -> None:
    figure = draw(report)
    figure.savefig(out, dpi=130)
    plot_._pyplot().close(figure)
