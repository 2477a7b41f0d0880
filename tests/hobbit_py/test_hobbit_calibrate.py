"""`hobbit calibrate`: a profile whose settings the engine takes, and an honest word on the gain."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from conftest import BUILD, ROOT

from hobbit_py import Hobbit
from hobbit_py.calibrate import calibrate, fit_weights, ratio_interval, unimportance, within_budget
from hobbit_py.quality import Divergence, Measured, parse_setting
from hobbit_py.trace import Layer, Trace, TraceWriter

HIGH = ROOT / "models/tiny-moe/tiny-moe-F16.gguf"
LOW = BUILD / "models/tiny-moe-Q4_0.gguf"
TEXT = ROOT / "models/tiny-moe/heldout.txt"


def test_a_calibrated_profile_is_what_the_engine_then_does(tmp_path: Path) -> None:
    profile = tmp_path / "tiny.profile"
    result = calibrate(HIGH, TEXT, profile, low=LOW, cache="12MiB", sequences=8, length=40, threads=2)
    lines = profile.read_text().splitlines()
    settings = dict(line.split(" ")[1:] for line in lines if line.startswith("set "))
    assert settings == result.settings
    assert 0 < float(settings["t1"]) < float(settings["t2"]) < 1
    said = "\n".join(result.lines)
    assert re.search(r"held-out half: [+-]\d", said)
    assert ("no gain" in said) == ("policy" not in settings)

    options = {"low": LOW, "cache": "12MiB", "profile": profile, "n_ctx": 64, "verbose": False}
    with Hobbit(HIGH, **options) as llm:
        assert llm.placement.t1 == pytest.approx(float(settings["t1"]))
        assert llm.placement.t2 == pytest.approx(float(settings["t2"]))
        assert llm.placement.policy == settings.get("policy", "hobbit")
        llm.eval(llm.tokenize(b"In the beginning"))
    # the run left its experts in the profile, and the settings with them
    again = profile.read_text().splitlines()
    assert [line for line in again if line.startswith("set ")] == [line for line in lines if line.startswith("set ")]
    assert any(line.startswith("high ") for line in again)
    with Hobbit(HIGH, t2=1.0, policy="lru", **options) as llm:  # an option beats the profile
        assert (llm.placement.t2, llm.placement.policy) == (1.0, "lru")
        assert llm.placement.t1 == pytest.approx(float(settings["t1"]))

    profile.write_text("\n".join([lines[0], "set t1 7"]))
    with pytest.raises(ValueError, match=r"'set t1 7'.*a number from 0 to 1"):
        Hobbit(HIGH, **options)
    profile.write_text("\n".join([lines[0], "set cache 1GiB"]))
    with pytest.raises(ValueError, match="a profile may set"):
        Hobbit(HIGH, **options)


def test_thresholds_keep_a_perplexity_budget(tmp_path: Path) -> None:
    options = {"low": LOW, "cache": "12MiB", "sequences": 8, "length": 64, "threads": 2}
    result = calibrate(HIGH, TEXT, tmp_path / "out", perplexity_budget=0.5, **options)
    said = result.lines[0]
    assert said.startswith("perplexity budget 0.5 %, 9 pairs of thresholds measured")
    found = re.search(r"cost ([+-][\d.]+) % \(standard error ([\d.]+)\)", said)
    if found:
        assert float(found[1]) + float(found[2]) <= 0.5 + 1e-3
    assert (result.settings["t1"] == "1.000") == (found is None)
    with pytest.raises(ValueError, match="--low FILE"):
        calibrate(HIGH, TEXT, tmp_path / "out", perplexity_budget=1.0)


def test_of_what_is_within_the_budget_the_fewest_bytes_are_chosen() -> None:
    def measured(t1: float, percent: float, n_bytes: float) -> Measured:
        divergence = Divergence(40.0, 0.1, percent, 0.1, 0.01, 0.0, 0.1, 1.0, 0.02, 0.0, (0.5, 0.5, 0.0))
        return Measured(parse_setting(f"model+file@{t1}/1"), divergence, bytes_per_token=n_bytes)

    results = [measured(0.6, 0.2, 500), measured(0.3, 0.5, 400), measured(0.1, 0.9, 300)]
    assert within_budget(results, 0.35).t1 == 0.6
    assert within_budget(results, 0.6).t1 == 0.3  # with its standard error just within
    assert within_budget(results, 0.99).t1 == 0.3
    assert within_budget(results, 5).t1 == 0.1
    nothing = within_budget(results, 0.1)
    assert (nothing.t1, nothing.t2) == (1.0, 1.0) and "none within it" in nothing.why


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("In the beginning God created the heaven and the earth.")
    with pytest.raises(ValueError, match="8 sequences of 40 need 320"):
        calibrate(HIGH, text, tmp_path / "out", low=LOW, cache="12MiB", sequences=8, length=40)


def test_the_score_is_the_weight_ranked_before(tmp_path: Path) -> None:
    writer = TraceWriter({"n_expert_used": 3}, [Layer(0, 8, 1, 4)])
    writer.step([(np.array([[1, 5, 2]]), np.array([[0.2, 0.5, 0.3]]))])
    writer.save(tmp_path / "t")
    assert np.allclose(sorted(unimportance(Trace.load(tmp_path / "t"))), [0, 0.5, 0.8])


def test_weights_are_found_where_the_cost_is_least() -> None:
    target = np.array([0.0, 0.8, 0.2, 0.0])
    weights, cost = fit_weights(lambda w: float(np.abs(np.array(w) - target).sum()))
    assert np.allclose(weights, target, atol=0.01)
    assert cost < 0.02


def test_an_interval_holds_the_ratio_and_shrinks_to_it_for_equal_sequences() -> None:
    assert ratio_interval(np.full(20, 9.0), np.full(20, 10.0)) == pytest.approx((0.9, 0.9, 0.9))
    rng = np.random.default_rng(0)
    theirs = rng.uniform(50, 150, 40)
    r, low, high = ratio_interval(theirs * rng.uniform(0.7, 0.9, 40), theirs)
    assert 0.75 < low < r < high < 0.85
