"""What a run's precision costs: gate weight counted by the engine, KL divergence estimated from what was measured.

`hobbit quality --profile` writes one line per pair of thresholds into the profile of a model and its low file:

    quality T1 T2 PERCENT SE KL MASS_LOW MASS_SKIP BYTES

perplexity increase in percent with its standard error, mean KL divergence from exact mode in nats per token, shares of
the gate weight in low precision and skipped, expert bytes per token if every selection missed. The engine chooses T1
and T2 from them (`--hobbit-quality-budget`); here a curve through them turns counted gate weight into an estimate.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np

from hobbit_py.stats import CacheStats, Placement


@dataclass(frozen=True)
class Point:
    """One measurement, in the order of the line."""

    t1: float
    t2: float
    percent: float
    percent_se: float
    kl: float
    mass_low: float
    mass_skip: float
    bytes_per_token: float


def read_points(profile: str | os.PathLike[str]) -> tuple[Point, ...]:
    """The measurements in a profile; none if there is no such file."""
    points = []
    try:
        text = Path(profile).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ()
    for line in text.splitlines():
        words = line.split()
        if len(words) == 9 and words[0] == "quality":
            points.append(Point(*map(float, words[1:])))
    return tuple(points)


def write_points(profile: str | os.PathLike[str], head: str, points: Sequence[Point]) -> None:
    """Puts measurements into the profile whose first line is `head`; those of the same thresholds are replaced.

    Raises:
        ValueError: the file is of another model or other files; it is left alone.
    """
    path = Path(profile)
    rest: list[str] = []
    if path.is_file():
        first, *rest = path.read_text(encoding="utf-8").splitlines() or [""]
        if first != head:
            raise ValueError(f"{path}: a profile of another model or other files: '{first}', not '{head}'")
    merged = {(p.t1, p.t2): p for p in (*read_points(path), *points)}
    lines = ["quality " + " ".join(f"{value:.8g}" for value in astuple(p)) for p in merged.values()]
    rest = [line for line in rest if not line.startswith("quality ")]
    partial = path.with_name(path.name + ".tmp")
    partial.write_text("\n".join([head, *lines, *rest]) + "\n", encoding="utf-8")
    partial.replace(path)


@dataclass(frozen=True)
class Curve:
    """KL as a polynomial without constant of the two masses, no factor negative."""

    low: float  # of mass_low
    low2: float  # of its square
    skip: float
    skip2: float
    error: float  # largest error at the measured points, as a share of the measured KL
    max_low: float  # largest masses that were measured
    max_skip: float

    @classmethod
    def fit(cls, points: Sequence[Point]) -> Curve | None:
        """Least squares of the relative error; None without points."""
        used = [p for p in points if p.kl > 0]
        if not used:
            return None
        kl = np.array([p.kl for p in used])
        terms = np.array([[p.mass_low, p.mass_low**2, p.mass_skip, p.mass_skip**2] for p in used]) / kl[:, None]
        best, best_error = np.zeros(4), np.inf
        for size in range(1, 5):
            for columns in itertools.combinations(range(4), size):
                solution, *_ = np.linalg.lstsq(terms[:, columns], np.ones(len(used)), rcond=None)
                error = float(((terms[:, columns] @ solution - 1) ** 2).sum())
                if (solution >= 0).all() and error < best_error:
                    best, best_error = np.zeros(4), error
                    best[list(columns)] = solution
        largest = float(np.abs(terms @ best - 1).max())
        low, low2, skip, skip2 = map(float, best)
        return cls(low, low2, skip, skip2, largest, max(p.mass_low for p in used), max(p.mass_skip for p in used))

    def kl(self, mass_low: float, mass_skip: float) -> float:
        return self.low * mass_low + self.low2 * mass_low**2 + self.skip * mass_skip + self.skip2 * mass_skip**2

    def covers(self, mass_low: float, mass_skip: float) -> bool:
        """Whether nothing beyond the measured masses is asked of it."""
        return mass_low <= self.max_low * 1.05 + 1e-6 and mass_skip <= self.max_skip * 1.05 + 1e-6


def curve_of(profile: str | os.PathLike[str] | None, placement: Placement) -> Curve | None:
    """The curve in the profile of a loaded model, if the profile is of the files that are in use."""
    if profile is None:
        return None
    sizes = {pool.precision: str(os.path.getsize(pool.file)) for pool in placement.pools}
    head = f"hobbit-profile 1 {placement.arch} {placement.n_layer} {placement.n_expert}"
    head += f" {sizes.get('low', 0)} {sizes.get('high', 0)}"
    try:
        with open(profile, encoding="utf-8") as file:
            if file.readline().rstrip("\n") != head:
                return None
    except FileNotFoundError:
        return None
    return Curve.fit(read_points(profile))


class Receipt:
    """What happened within `with model.receipt() as r:`, growing inside it and fixed after it."""

    def __init__(self, read: Callable[[], CacheStats], curve: Curve | None) -> None:
        self._read = read
        self.curve = curve

    @property
    def stats(self) -> CacheStats:
        return self._read()

    @property
    def mass_low(self) -> float:
        """Share of the gate weight that was computed in low precision."""
        return self.stats.total.mass[0]

    @property
    def mass_skip(self) -> float:
        """Share of the gate weight whose experts were skipped."""
        return self.stats.total.mass[1]

    @property
    def layers(self) -> tuple[tuple[int, float, float], ...]:
        """For each layer: its block, and the two shares there."""
        return tuple((layer.block, *layer.mass) for layer in self.stats.layers)

    @property
    def kl(self) -> float | None:
        """Estimated mean KL divergence from exact mode, nats per token; None without a calibrated curve."""
        low, skip = self.stats.total.mass
        if low == skip == 0:
            return 0.0
        return None if self.curve is None else self.curve.kl(low, skip)

    def __str__(self) -> str:
        low, skip = self.stats.total.mass
        if low == skip == 0:
            return "all gate weight in high precision"
        text = f"gate weight {100 * low:.1f} % in low precision, {100 * skip:.1f} % skipped"
        if self.curve is None:
            return f"{text}; cost unknown without a profile from `hobbit quality --profile`"
        beyond = "" if self.curve.covers(low, skip) else ", beyond what was measured"
        return f"{text}; KL about {self.curve.kl(low, skip):.2g} nats per token (estimated{beyond})"
