"""Log-likelihood comparisons on fixed texts: does the right continuation still beat near misses?

Nothing is downloaded: arithmetic, copying, JSON against a schema and tool calls, made from the tables below. A model
chooses the continuation with the most log-likelihood per byte. For a lossy setting what matters is beside exact mode:
how often it chooses the same, and how far the margin between right and best wrong moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hobbit_py.hobbit import Hobbit
from hobbit_py.quality import Setting, Variants

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Item:
    """A text and its continuations; the first is right."""

    kind: str
    context: str
    choices: tuple[str, ...]


_WORDS = (
    "king river stone bread mountain servant garden window silver evening winter letter candle forest shepherd "
    "harbour kitchen feather bridge lantern orchard captain thunder meadow"
).split()
_PEOPLE = (("Ada", 36, "London"), ("Boris", 51, "Sofia"), ("Chen", 28, "Taipei"), ("Dora", 44, "Athens"))
_TOOLS = (
    ("get_weather", "city", "Paris", "What is the weather in Paris?"),
    ("send_mail", "address", "ada@example.org", "Write to ada@example.org."),
    ("read_file", "path", "notes.txt", "Show me notes.txt."),
    ("set_timer", "minutes", "12", "Wake me in 12 minutes."),
    ("play_song", "title", "Greensleeves", "Play Greensleeves."),
    ("translate", "language", "Greek", "Say that in Greek."),
)


def _arithmetic() -> Iterator[Item]:
    for i, (a, b) in enumerate(((12, 7), (30, 15), (8, 9), (41, 22), (6, 5), (70, 19), (25, 25), (14, 3))):
        for sign, right in (("+", a + b), ("-", a - b)):
            wrong = (right + 1, right + 10, right - 1 if right > 0 else right + 2)
            shots = f"{i + 3} + 4 = {i + 7}\n{i + 9} - 2 = {i + 7}\n"
            yield Item("arithmetic", f"{shots}{a} {sign} {b} =", tuple(f" {n}\n" for n in (right, *wrong)))


def _copying() -> Iterator[Item]:
    for start in range(0, 16):
        words = [_WORDS[(start * 5 + 7 * k) % len(_WORDS)] for k in range(6)]
        at = 2 + start % 3
        context = f"First: {' '.join(words)}.\nAgain: {' '.join(words[:at])}"
        wrong = [w for w in (words[at + 1], words[at - 1], _WORDS[(start + 11) % len(_WORDS)]) if w != words[at]]
        yield Item("copying", context, tuple(f" {w}" for w in (words[at], *wrong)))


def _json() -> Iterator[Item]:
    schema = (
        '{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": '
        '"string"}}, "required": ["name", "age", "city"]}'
    )
    example = '{"name": "Eve", "age": 30, "city": "Rome"}'
    for name, age, city in _PEOPLE:
        head = f"Schema: {schema}\nDocument: {example}\nDocument: "
        yield Item("json", head + f'{{"name": "{name}", "age":', (f" {age},", f' "{age}",', f" {age}.5,", " null,"))
        yield Item("json", head + f'{{"name": "{name}",', (f' "age": {age}', f" age: {age}", f' "Age": {age}', "}"))
        yield Item(
            "json",
            head + f'{{"name": "{name}", "age": {age}, "city": "{city}"',
            ("}\n", "]\n", ",}\n", "\n"),
        )


def _tools() -> Iterator[Item]:
    listed = "\n".join(f"{name}({argument})" for name, argument, _, _ in _TOOLS)
    for i, (name, argument, value, request) in enumerate(_TOOLS):
        other, other_argument, _, _ = _TOOLS[(i + 2) % len(_TOOLS)]
        shown, shown_argument, shown_value, shown_request = _TOOLS[(i + 1) % len(_TOOLS)]
        head = (
            f'Tools:\n{listed}\nUser: {shown_request}\nCall: {{"name": "{shown}", "arguments": {{"{shown_argument}": '
            f'"{shown_value}"}}}}\nUser: {request}\nCall: {{"name": '
        )
        yield Item("tool calls", head, (f'"{name}"', f'"{other}"', f'"{name}_now"', f'"{argument}"'))
        yield Item(
            "tool calls",
            head + f'"{name}", "arguments": ',
            (
                f'{{"{argument}": "{value}"}}}}',
                f'{{"{other_argument}": "{value}"}}}}',
                f'{{"{argument}": }}}}',
                f'["{value}"]}}',
            ),
        )


def items() -> tuple[Item, ...]:
    return tuple([*_arithmetic(), *_copying(), *_json(), *_tools()])


class Scorer:
    """Log-likelihoods of continuations, one token per step, what two texts share computed once.

    The model must have been loaded with `logits_all=True`.
    """

    def __init__(self, model: Hobbit) -> None:
        self._model = model
        self._tokens: list[int] = []

    def log_likelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        """Of the continuation's tokens after the context, in nats, and whether each would be the first choice.

        Raises:
            ValueError: the text does not fit into the model's context.
        """
        model = self._model
        begin = model.tokenize(context.encode(), special=False)
        tokens = model.tokenize((context + continuation).encode(), special=False)
        if len(tokens) > model.n_ctx():
            raise ValueError(f"{len(tokens)} tokens do not fit into a context of {model.n_ctx()}")
        shared = 0
        while shared < min(len(begin), len(tokens) - 1) and begin[shared] == tokens[shared]:
            shared += 1
        start = max(1, shared)  # tokens from here on are the continuation; a merge at the border belongs to it
        logp, first = self.token_log_likelihoods(tokens)
        return float(logp[start - 1 :].sum()), bool(first[start - 1 :].all())

    def token_log_likelihoods(self, tokens: Sequence[int]) -> tuple[FloatArray, BoolArray]:
        """Of each token but the first, after those before it: nats, and whether it is the first choice."""
        model = self._model
        known = 0
        while known < min(len(self._tokens), len(tokens) - 1) and self._tokens[known] == tokens[known]:
            known += 1
        model.n_tokens = known
        for token in tokens[known:-1]:
            model.eval([token])
        self._tokens = list(tokens[:-1])
        rows = np.asarray(model.scores[: len(tokens) - 1], dtype=np.float64)
        wanted = np.array(tokens[1:], dtype=np.int64)
        first = rows.argmax(axis=1) == wanted
        rows = rows - rows.max(axis=1, keepdims=True)
        return rows[np.arange(len(wanted)), wanted] - np.log(np.exp(rows).sum(axis=1)), first

    def forget(self) -> None:
        """Something else used the model."""
        self._tokens = []

    def per_byte(self, item: Item) -> list[float]:
        """Of each choice: nats per byte."""
        return [self.log_likelihood(item.context, c)[0] / len(c.encode()) for c in item.choices]


@dataclass(frozen=True)
class TaskResult:
    setting: str
    kind: str
    n: int
    right: float  # share of items whose right continuation won
    right_se: float
    margin: float  # mean of right minus best wrong, nats per byte
    same: float | None = None  # share of items with the choice of exact mode
    moved: float | None = None  # mean |change of the margin| against exact mode, nats per byte


def run(
    variants: Variants, settings: Sequence[Setting], threads: int, watch: Callable[[int, str], None]
) -> Iterator[TaskResult]:
    """Yields a result per setting and kind. The first setting should be `exact`; the others are compared with it."""
    chosen = items()
    reference: list[list[float]] | None = None
    for setting in settings:
        model, options = variants.options(setting)
        llama: dict[str, Any] = {"n_ctx": 512, "n_threads": threads, "logits_all": True, "verbose": False}
        scores = []
        with Hobbit(model, **options, **llama) as llm:
            scorer = Scorer(llm)
            for item in chosen:
                scores.append(scorer.per_byte(item))
                watch(1, setting.name)
        if setting.rule == "high" and not setting.high:
            reference = scores
        for kind in dict.fromkeys(item.kind for item in chosen):
            at = [i for i, item in enumerate(chosen) if item.kind == kind]
            yield _compare(setting.name, kind, [scores[i] for i in at], reference and [reference[i] for i in at])


def _compare(name: str, kind: str, scores: list[list[float]], exact: list[list[float]] | None) -> TaskResult:
    margins = [s[0] - max(s[1:]) for s in scores]
    right = sum(m > 0 for m in margins) / len(margins)
    error = math.sqrt(right * (1 - right) / (len(margins) - 1))
    result = TaskResult(name, kind, len(margins), right, error, float(np.mean(margins)))
    if exact is None:
        return result
    same = [int(np.argmax(s)) == int(np.argmax(e)) for s, e in zip(scores, exact, strict=True)]
    moved = [abs(m - (e[0] - max(e[1:]))) for m, e in zip(margins, exact, strict=True)]
    return TaskResult(name, kind, result.n, right, error, result.margin, float(np.mean(same)), float(np.mean(moved)))


COLUMNS = ("setting", "task", "items", "right %", "margin, nats/byte", "same as exact %", "margin moved by")


def row_texts(r: TaskResult) -> list[str]:
    return [
        r.setting,
        r.kind,
        str(r.n),
        f"{100 * r.right:.1f} ± {100 * r.right_se:.1f}",
        f"{r.margin:+.3f}",
        "" if r.same is None else f"{100 * r.same:.1f}",
        "" if r.moved is None else f"{r.moved:.4f}",
    ]
