"""`HobbitLM` in lm-eval-harness, on a task of local data. Skipped where lm-eval (no dependency) is not installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hobbit_models import hobbit, low

pytest.importorskip("lm_eval", reason="lm-eval is not installed")

import lm_eval
from lm_eval.api.task import ConfigurableTask

from hobbit_py import quality_tasks as tasks
from hobbit_py.lm import HobbitLM


def test_lm_eval_scores_as_our_own_comparison(tmp_path: Path) -> None:
    chosen = [item for item in tasks.items() if item.kind == "copying"]
    data = tmp_path / "copying.jsonl"
    rows = [{"text": item.context, "choices": list(item.choices), "right": 0} for item in chosen]
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    task = ConfigurableTask(
        config={
            "task": "copying",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "text",
            "doc_to_choice": "choices",
            "doc_to_target": "right",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}],
        }
    )
    with hobbit(low=low(), deterministic=True, logits_all=True) as model:
        scorer = tasks.Scorer(model)
        sums = [[scorer.log_likelihood(item.context, c)[0] for c in item.choices] for item in chosen]
        expected = sum(s[0] == max(s) for s in sums) / len(sums)
        found = lm_eval.evaluate(HobbitLM(model), {"copying": task}, bootstrap_iters=0)
    assert found["results"]["copying"]["acc,none"] == pytest.approx(expected)


def test_a_model_without_all_logits_is_refused() -> None:
    with hobbit() as model, pytest.raises(ValueError, match="logits_all=True"):
        HobbitLM(model)


def test_texts_longer_than_the_context_are_scored_in_windows() -> None:
    class Request:
        def __init__(self, *args: object) -> None:
            self.args = args

    text = "In the beginning God created the heaven and the earth. " * 60
    with hobbit(logits_all=True) as model:
        lm = HobbitLM(model)
        (total,) = lm.loglikelihood_rolling([Request(text)])
        n = len(model.tokenize(text.encode()))
        assert n > 2 * model.n_ctx() and -12 * n < total < 0
        context = "And it came to pass, that David"
        whole, answer = lm.generate_until(
            [Request(context, {"until": until, "max_gen_toks": 20}) for until in ([], [","])]
        )
        assert whole and answer == whole.split(",")[0]
