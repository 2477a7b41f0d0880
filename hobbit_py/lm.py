"""`HobbitLM`: a `Hobbit` as an `LM` of lm-eval-harness, for log-likelihood tasks such as TruthfulQA's multiple choice.

    import lm_eval
    from hobbit_py import Hobbit
    from hobbit_py.lm import HobbitLM

    model = Hobbit("model-Q8_0.gguf", low="model-Q2_K.gguf", deterministic=True, n_ctx=2048, logits_all=True)
    lm_eval.simple_evaluate(HobbitLM(model), tasks=["truthfulqa_mc1"])

Needs `pip install lm-eval` and the tasks' data. Tokens are computed one per step, as in a generation. GSM8K and other
generating tasks run faster through `hobbit serve` and lm-eval's `local-completions`; llama-server cannot give the
log-probabilities of a prompt, which is what this class is for.
"""

from __future__ import annotations

from typing import Any

from hobbit_py.hobbit import Hobbit
from hobbit_py.quality_tasks import Scorer

try:
    from lm_eval.api.model import LM
except ImportError:
    raise ImportError("hobbit_py.lm needs lm-eval: pip install lm-eval") from None


class HobbitLM(LM):  # type: ignore[misc]
    """See the module. The model must have been loaded with `logits_all=True`.

    Raises:
        ValueError: it was not.
    """

    def __init__(self, model: Hobbit) -> None:
        super().__init__()
        if not model._logits_all:
            raise ValueError("log-likelihoods of a whole text are needed: load the model with logits_all=True")
        self._model = model
        self._scorer = Scorer(model)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """For each (context, continuation): nats, and whether greedy decoding would write it."""
        # an empty context means the text's beginning: the newline stands for it
        return [self._scorer.log_likelihood(r.args[0] or "\n", r.args[1]) for r in requests]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """For each text: nats of all its tokens but the first of each window of the model's context."""
        found = []
        for request in requests:
            tokens = self._model.tokenize(request.args[0].encode(), special=False)
            total = 0.0
            for start in range(0, len(tokens), self._model.n_ctx() - 1):
                window = tokens[start : start + self._model.n_ctx()]
                total += float(self._scorer.token_log_likelihoods(window)[0].sum())
            found.append(total)
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy text up to one of `until`, at most `max_gen_toks` tokens (256)."""
        found = []
        for request in requests:
            context, options = request.args
            until = options.get("until") or []
            answer: Any = self._model.create_completion(
                context,
                max_tokens=int(options.get("max_gen_toks", 256)),
                temperature=float(options.get("temperature", 0.0)),
                stop=[until] if isinstance(until, str) else until,
            )
            found.append(answer["choices"][0]["text"])
            self._scorer.forget()
        return found
