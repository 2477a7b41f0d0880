"""What lossy settings cost: the counters behind a receipt, deterministic mode, and the command `hobbit quality`."""

from __future__ import annotations

import fcntl
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hobbit_models import PROMPT, ROOT, greedy, high, hobbit, low, run_hobbit

from hobbit_py import CacheStats
from hobbit_py import quality as q
from hobbit_py import quality_tasks as tasks
from hobbit_py import receipt as receipt_

TEXT = ROOT / "models" / "tiny-moe" / "heldout.txt"
EXPERT = 3 * 256 * 256 * 2  # bytes of one F16 expert of tiny-moe: 16 in each of 6 layers, 4 used
KEPT = ("selected_high", "selected_low", "selected_skip", "routed", "mass_low", "mass_skip")


#
# counters of gate weight
#


def test_all_of_the_gate_weight_is_counted() -> None:
    expected = {"high": (0, 0), "low": (1, 0)}
    for precision, (in_low, skipped) in expected.items():
        with hobbit(low=low(), precision=precision) as model:
            greedy(model, 8)
            total = model.cache_stats().total
            assert total.routed == 6 * (len(model.tokenize(PROMPT.encode())) + 7) - total_without_output(model)
            assert total.mass == pytest.approx((in_low, skipped), abs=1e-4)


def total_without_output(model: Any) -> int:
    """The last layer sees only the tokens whose logits are wanted: of the prompt the last one."""
    return len(model.tokenize(PROMPT.encode())) - 1


def test_what_is_skipped_weighs_less_than_what_is_not() -> None:
    with hobbit(low=low(), precision="paper", deterministic=True) as model:
        for token in model.tokenize(PROMPT.encode()):  # one by one: a batch gives an expert one precision
            model.eval([token])
        stats = model.cache_stats()
    total = stats.total
    in_low, skipped = total.mass
    high_share, _, skip_share = total.mix
    assert 0 < skipped < skip_share and 0 < in_low
    assert (1 - in_low - skipped) > high_share  # rank by rank, larger weights come first
    assert skipped <= 0.1 + 1e-6  # T2 0.9: what ranks behind 90 % of the weight has at most the rest
    assert total.mass_skip == sum(layer.mass_skip for layer in stats.layers)
    assert all(0 < layer.mass[1] <= 0.1 + 1e-6 for layer in stats.layers)


#
# deterministic mode
#


def receipt(model: Any, resize: str | None = None) -> tuple[list[int], list[dict[str, int]]]:
    """Greedy tokens after a prompt in one batch, and what each layer decided; half way the cache changes its size."""
    model.reset()  # or the prompt would be found in memory, and the batches be others
    model.reset_stats()
    out: list[int] = []
    for token in model.generate(model.tokenize(PROMPT.encode()), temp=0.0):
        out.append(token)
        if resize is not None and len(out) == 24:
            model.resize(resize)
        if len(out) == 48:
            break
    return out, [{name: getattr(layer, name) for name in KEPT} for layer in model.cache_stats().layers]


def test_deterministic_mode_decides_the_same_whatever_the_cache_holds() -> None:
    """Caches of 15 to 100 % of the experts, with and without prefetching, after and during a resize."""
    expected: Any = None
    hit_rates = set()
    for cache, other in ((0.15, "24MiB"), (0.4, "6MiB"), (1.0, "8MiB")):
        for prefetch in ("off", 2):
            size = f"{int(cache * 96 * EXPERT / 1024)}KiB"
            with hobbit(low=low(), precision="paper", deterministic=True, cache=size, prefetch=prefetch) as model:
                found = receipt(model)
                expected = expected or found
                assert found == expected, f"cache {cache}, prefetch {prefetch}"
                hit_rates.add(round(model.cache_stats().total.hit_rate, 3))
                assert receipt(model, other) == expected, f"cache {cache}, prefetch {prefetch}, during a resize"
                assert receipt(model) == expected, f"cache {cache}, prefetch {prefetch}, after a resize"
    assert len(hit_rates) == 6  # the caches did differ
    assert all(layer["mass_low"] > 0 and layer["mass_skip"] > 0 for layer in expected[1])


def test_without_deterministic_mode_the_receipt_depends_on_the_cache() -> None:
    """The proof that the test above can fail."""
    found = []
    for cache in ("6MiB", "64MiB"):
        with hobbit(cache=cache, low=low()) as model:
            greedy(model, 48)
            found.append(model.cache_stats().total.mass_low)
    assert found[0] > found[1]


#
# settings and tables
#


LONG = "model+file@0.5/0.7/renormalise"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("exact", q.Setting("exact")),
        ("uniform:q4_k", q.Setting("uniform:q4_k", low="Q4_K", rule="low")),
        ("model+Q4_0", q.Setting("model+Q4_0", low="Q4_0", rule="hobbit")),
        ("Q8_0+Q2_K@noskip", q.Setting("Q8_0+Q2_K@noskip", "Q8_0", "Q2_K", "hobbit", 0.6, 1.0)),
        (LONG, q.Setting(LONG, "", "file", "hobbit", 0.5, 0.7, True)),
        ("article:model+Q4_0@0.6/0.9", q.Setting("article:model+Q4_0@0.6/0.9", "", "Q4_0", "article")),
        ("skip@0.8", q.Setting("skip@0.8", rule="hobbit", t1=0.8, t2=0.8)),
    ],
)  # fmt: skip
def test_settings_are_read(text: str, expected: q.Setting) -> None:
    assert q.parse_setting(text) == expected


@pytest.mark.parametrize("text", ["", "fast", "file+Q4_0", "Q4_0+model", "model+Q4_0@0.9/0.6", "uniform:model"])
def test_other_settings_are_refused_with_what_would_work(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"setting '{text}'")):
        q.parse_setting(text)


def measured(name: str, size: float, kl: float) -> q.Measured:
    d = q.Divergence(30, 1, 0, 0, kl, 0, 0, 0, 0, 0, (1, 0, 0))
    return q.Measured(q.parse_setting(name), d, bytes_per_token=size)


POINTS = [
    measured("exact", 100, 0),
    measured("uniform:Q8_0", 50, 0.1),
    measured("uniform:Q5_K", 40, 0.7),  # worse than a mixture of its neighbours
    measured("uniform:Q4_K", 30, 0.9),
    measured("model+Q8_0", 45, 0.2),
    measured("model+Q4_0", 42, 0.5),
    measured("model+Q2_K", 60, 0.3),
]


def test_the_pareto_front_has_what_nothing_beats() -> None:
    assert [r.setting.name for r in q.pareto(POINTS, "0")] == [
        "uniform:Q4_K", "uniform:Q5_K", "model+Q4_0", "model+Q8_0", "uniform:Q8_0", "exact"
    ]  # fmt: skip


def test_a_pair_is_held_against_uniform_quants_of_no_more_bytes_and_their_mixtures() -> None:
    assert q.uniform_line(POINTS, "0", 45) == (0.7, pytest.approx(0.3))  # Q5_K itself; between Q4_K and Q8_0
    assert q.uniform_line(POINTS, "0", 20) == (None, None)
    assert q.uniform_line(POINTS, "0", 200) == (0, 0)
    report = q.Report("m", "t", 1, 1, 1, 1, 100, ("0",), tuple(POINTS))
    said = q.verdict(report, "0")
    assert "2 of 3 mixed settings" in said
    assert "model+Q8_0 3.5 times less (and their mixture); model+Q4_0 1.4 times less." in said


#
# hobbit quality
#


def quality(work: Path, *more: object) -> Any:
    options = ("--work", work / "w", "--text", TEXT, "--chunks", 2, "-t", 1, "--cache", "20%", "--traffic", 64)
    return run_hobbit("quality", high(), "--low", low(), *options, *more)


def test_quality_measures_resumes_and_draws(tmp_path: Path) -> None:
    out = tmp_path / "q.json"
    settings = "exact uniform:file model+file@paper"
    done = quality(tmp_path, "--settings", settings, "--json", out, "--plot", tmp_path / "q.png")
    assert done.returncode == 0, done.stderr
    assert "2 windows of 256 tokens, 254 scored; exact log probabilities take 2.0 MiB" in done.stderr
    base = next((tmp_path / "w").glob("*.logits"))
    assert base.stat().st_size == pytest.approx(254 * 2 * (4096 + 4), rel=0.01)
    assert (tmp_path / "q.png").stat().st_size > 1000

    report = q.Report.load(out)
    exact, uniform, mixed = report.results
    assert exact.decode.kl == pytest.approx(0, abs=1e-5) and exact.decode.kl_max < 4.5e-5
    assert exact.decode.flips < 0.005 and exact.decode.shares == pytest.approx((1, 0, 0))
    assert exact.bytes_per_token == 6 * 4 * EXPERT
    assert uniform.bytes_per_token == pytest.approx(6 * 4 * EXPERT * 18 / 64)
    assert 0 < uniform.decode.kl < mixed.decode.kl < 0.1
    assert sum(mixed.decode.shares) == pytest.approx(1) and min(mixed.decode.shares) > 0.1
    high_share, low_share, _ = mixed.decode.shares
    assert mixed.bytes_per_token == pytest.approx(6 * 4 * EXPERT * (high_share + low_share * 18 / 64))
    for r in report.results:
        size = r.bytes_at("20%")
        assert size is not None and size < r.bytes_per_token  # some selections hit

    again = quality(tmp_path, "--settings", settings + " skip@0.6", "--json", out)
    assert again.returncode == 0, again.stderr
    assert q.Report.load(out).results[:3] == report.results  # rates included: nothing was measured again
    assert "every selection missed: " in again.stdout and "skip@0.6" in again.stdout


def test_quality_bounds_the_file_of_log_probabilities(tmp_path: Path) -> None:
    done = quality(tmp_path, "--max-base", "1500KiB")
    assert done.returncode == 1
    assert "log probabilities of 254 tokens take 2.0 MiB, 8200 bytes each, more than the 1.5 MiB allowed" in done.stderr
    assert "--chunks 1 fits" in done.stderr


def test_quality_wants_enough_text(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("In the beginning", encoding="utf-8")
    done = quality(tmp_path, "--text", tmp_path / "short.txt")
    assert done.returncode == 1 and "512 tokens are needed" in done.stderr
    done = quality(tmp_path, "--settings", "fast")
    assert done.returncode == 2 and "setting 'fast'" in done.stderr


def test_two_calls_do_not_share_a_work_folder(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    with open(tmp_path / "w" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = quality(tmp_path, "--settings", "exact")
    assert done.returncode == 1 and "another `hobbit quality` works there" in done.stderr


def test_a_report_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    file.write_text(json.dumps(CacheStats().to_dict()), encoding="utf-8")
    with pytest.raises(ValueError, match="no quality report"):
        q.Report.load(file)


#
# profile, budget, receipt
#


def point(name: str, percent: float, kl: float, mass: tuple[float, float], size: float) -> q.Measured:
    d = q.Divergence(30, 1, percent, 0.05, kl, 0, 0, 0, 0, 0, (1, 0, 0), mass)
    return q.Measured(q.parse_setting(name), d, bytes_per_token=size)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """With two measurements of the pair that the tests use, and one of another pair, which does not belong."""
    results = (
        point("model+file@0.6/0.9", 0.75, 0.009, (0.3, 0.05), 5e6),
        point("model+file@0.6/1", 0.02, 0.0003, (0.35, 0.0), 6e6),
        point("model+Q2_K@0.6/1", 0.01, 0.0003, (0.35, 0.0), 1e6),
    )
    report = q.Report(high(), str(TEXT), 1, 1, 1, 1, 100, ("0",), results)
    path = tmp_path / "tiny.profile"
    assert q.save_profile(report, Path(low()), path) == 2
    return path


def test_a_budget_picks_thresholds_from_the_profile(profile: Path) -> None:
    for budget, t2 in ((1, 0.9), (0.5, 1.0)):
        with hobbit(low=low(), profile=profile, quality_budget=budget) as model:
            assert (model.placement.t1, model.placement.t2) == (0.6, t2)


def test_a_budget_goes_before_what_was_calibrated(profile: Path) -> None:
    """`hobbit calibrate` writes its choice into the same file."""
    profile.write_text(profile.read_text() + "set t1 0.3\nset t2 0.8\nset low-share 0.3\n")
    for budget, thresholds in ((None, (0.3, 0.8)), (0.5, (0.6, 1.0))):
        with hobbit(low=low(), profile=profile, quality_budget=budget) as model:
            assert (model.placement.t1, model.placement.t2) == pytest.approx(thresholds)


def test_a_budget_is_refused_without_measurements(profile: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"low": low()}, "--hobbit-profile FILE"),
        ({"low": low(), "profile": profile, "t2": 1.0}, "leave out --hobbit-t1"),
        ({"low": low(), "profile": tmp_path / "none"}, "it is not there"),
        ({"profile": profile}, "--hobbit-low FILE"),
        ({"low": low(), "profile": profile, "quality_budget": 0.01}, "--hobbit-quality-budget 0.07 takes it"),
    ]
    for options, says in cases:
        with pytest.raises(ValueError, match=says):
            hobbit(**{"quality_budget": 1, **options})
    with hobbit(low=low(), profile=profile, quality_budget=0.07) as model:
        assert model.placement.t2 == 1.0


def test_a_run_keeps_the_measurements_of_its_profile(profile: Path) -> None:
    before = receipt_.read_points(profile)
    with hobbit(low=low(), profile=profile) as model:
        greedy(model, 4)
    assert receipt_.read_points(profile) == before and len(before) == 2
    assert "\nhigh " in profile.read_text()


def test_a_profile_of_other_files_is_left_alone(profile: Path) -> None:
    text = profile.read_text()
    with pytest.raises(ValueError, match="of another model or other files"):
        receipt_.write_points(profile, "hobbit-profile 1 olmoe 2 8 1 1", [])
    with hobbit(low=low(), precision="low", profile=profile) as model, model.receipt() as r:
        greedy(model, 4)
    assert r.kl is None
    assert profile.read_text() == text


def test_a_receipt_counts_and_estimates(profile: Path) -> None:
    with hobbit(low=low(), precision="paper", deterministic=True, profile=profile) as model:
        greedy(model, 4)
        with model.receipt() as r:
            greedy(model, 16, "And it came to pass")
            growing = r.mass_low
        assert r.curve is not None
        greedy(model, 4, "Of Man's first disobedience")
    assert growing == r.mass_low > 0 and 0 < r.mass_skip < 0.1
    assert r.kl == pytest.approx(r.curve.kl(r.mass_low, r.mass_skip)) and 0 < r.kl < 0.03
    assert len(r.layers) == 6 and r.stats.steps == 16
    assert str(r).startswith(f"gate weight {100 * r.mass_low:.1f} % in low precision") and "KL about" in str(r)


def test_a_receipt_without_measurements_says_so_and_exact_mode_costs_nothing() -> None:
    with hobbit(low=low()) as model, model.receipt() as r:
        greedy(model, 4)
    assert r.kl is None and "cost unknown" in str(r)
    with hobbit() as model, model.receipt() as r:
        greedy(model, 4)
    assert r.kl == 0 and str(r) == "all gate weight in high precision"


def test_the_curve_finds_the_factors_of_gate_weight() -> None:
    def points(*masses: tuple[float, float]) -> list[receipt_.Point]:
        kl = [0.002 * low_ + 0.008 * low_**2 + 0.1 * skip + 1.5 * skip**2 for low_, skip in masses]
        return [receipt_.Point(0, 1, 0, 0, value, *mass, 1) for value, mass in zip(kl, masses, strict=True)]

    curve = receipt_.Curve.fit(points((0.3, 0.05), (0.5, 0.0), (0.2, 0.2), (0.0, 0.1), (0.1, 0.0)))
    assert curve is not None
    assert (curve.low, curve.low2, curve.skip, curve.skip2) == pytest.approx((0.002, 0.008, 0.1, 1.5))
    assert curve.error < 1e-6 and curve.covers(0.5, 0.2) and not curve.covers(0.9, 0.0)
    assert receipt_.Curve.fit([]) is None
    one = receipt_.Curve.fit(points((0.5, 0.0)))
    assert one is not None and one.kl(0.5, 0.0) == pytest.approx(0.003) and 0 < one.kl(0.25, 0.0) < 0.003


def test_run_ends_with_the_receipt(profile: Path) -> None:
    done = run_hobbit("run", high(), "--low", low(), "--set", f"profile={profile}", "-p", PROMPT, "-n", 8)
    assert done.returncode == 0, done.stderr
    assert re.search(r"gate weight [\d.]+ % in low precision, [\d.]+ % skipped; KL about", done.stderr)


#
# tasks
#


def test_tasks_have_one_right_continuation() -> None:
    for item in tasks.items():
        assert len(item.choices) >= 3 and item.choices[0] not in item.choices[1:], item
    kinds = [item.kind for item in tasks.items()]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "arithmetic": 16,
        "copying": 16,
        "json": 12,
        "tool calls": 12,
    }


def test_log_likelihoods_do_not_depend_on_what_was_asked_before() -> None:
    context, right, wrong = PROMPT, " And the earth was without form", " And the whale was without form"
    with hobbit(logits_all=True, low=low(), deterministic=True) as model:
        scorer = tasks.Scorer(model)
        scorer.log_likelihood(context, wrong)
        found, _ = scorer.log_likelihood(context, right)
        model.reset()
        tokens = model.tokenize((context + right).encode())
        for token in tokens:
            model.eval([token])
        x = model.scores[: len(tokens)].astype(np.float64)
        logp = x - np.logaddexp.reduce(x, axis=1, keepdims=True)
        start = len(model.tokenize(context.encode()))
        expected = sum(logp[i - 1, tokens[i]] for i in range(start, len(tokens)))
    assert found == pytest.approx(expected, abs=1e-4)


def test_quality_tasks_compares_settings_with_exact_mode(tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    done = quality(tmp_path, "--tasks", "--settings", "skip@0.3", "--json", out)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert [r["setting"] for r in rows] == ["exact"] * 4 + ["skip@0.3"] * 4
    assert all(r["same"] == 1 and r["moved"] == 0 for r in rows[:4])
    assert any(r["moved"] > 0 for r in rows[4:])
    assert "tool calls" in done.stdout and "skip@0.3" in done.stdout


def test_every_test_that_the_document_names_exists() -> None:
    text = (ROOT / "docs" / "quality.md").read_text()
    defined = {
        path.name: set(re.findall(r"^def (test_\w+)", path.read_text(), re.M))
        for path in (ROOT / "tests").rglob("test_*.py")
    }
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", text)
    assert len(named) > 10
    assert [(file, name) for file, name in named if name not in defined.get(file, set())] == []
