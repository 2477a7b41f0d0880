"""Expert tensors are byte-equal to those of llama-quantize --pure, on the same source."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from gguf_models import ARR, F32, STR, U32, Gguf, Moe, Tensor, built_program, imatrix_gguf, pack, read_back

from gguf_tools.pair import PairOptions, plan_pair, run_pair

TYPES = {"Q8_0": "Q8_0", "Q4_0": "Q4_0", "Q2_K": "Q2_K", "Q4_K": "Q4_K", "IQ4_NL": "IQ4_NL", "MXFP4": "MXFP4_MOE"}
MORE = {"Q3_K": "Q3_K", "Q5_K": "Q5_K", "Q6_K": "Q6_K", "IQ4_XS": "IQ4_XS", "TQ2_0": "TQ2_0", "Q5_1": "Q5_1"}


def loadable(moe: Moe) -> Gguf:
    """A model that llama-quantize accepts: its loader reads hyperparameters and a vocabulary."""
    a = moe.arch
    model = moe.build().without("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "general.file_type")
    return model.with_kv(
        (f"{a}.context_length", U32, 64),
        (f"{a}.embedding_length", U32, moe.n_embd),
        (f"{a}.feed_forward_length", U32, moe.n_ff),
        (f"{a}.expert_feed_forward_length", U32, moe.n_ff),
        (f"{a}.attention.head_count", U32, 4),
        (f"{a}.attention.head_count_kv", U32, 4),
        (f"{a}.attention.layer_norm_rms_epsilon", F32, 1e-6),
        (f"{a}.rope.freq_base", F32, 1e4),
        ("tokenizer.ggml.model", STR, "no_vocab"),
        (f"{a}.vocab_size", U32, 8),
        ("general.file_type", U32, 1),
        ("tokenizer.ggml.merges", ARR, (STR, [])),
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    moe = Moe(n_embd=256, n_ff=512, n_expert=4, n_layer=1, type="F16")
    return loadable(moe).write(tmp_path_factory.mktemp("model") / "m.gguf")


def experts_of(path: Path) -> dict[str, Tensor]:
    return {n: t for n, t in read_back(path).items() if "_exps.weight" in n}


def quantize(source: Path, out: Path, kind: str, *options: str) -> dict[str, Tensor]:
    done = subprocess.run(
        [str(built_program("llama-quantize")), "--pure", *options, str(source), str(out), kind, "2"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return experts_of(out)


def test_low_files_equal_llama_quantize_pure(source: Path, tmp_path: Path) -> None:
    kinds = {**TYPES, **MORE}
    plan = plan_pair(PairOptions(source, tmp_path / "out", low=tuple(kinds), low_only=True))
    run_pair(plan)
    plan.close()
    for label, kind in kinds.items():
        expected = quantize(source, tmp_path / "q.gguf", kind)
        assert len(expected) == 3 and experts_of(tmp_path / "out" / f"m.experts-{label}.gguf") == expected, label


@pytest.mark.parametrize("label", ["IQ2_XXS", "IQ3_XXS", "Q4_K"])
def test_low_file_with_imatrix_equals_llama_quantize(label: str, source: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    sums = {}
    for t in read_back(source).values():
        if len(t.ne) > 1:
            n = t.ne[2] if len(t.ne) > 2 else 1
            counts = np.arange(n, dtype=np.float32)  # expert 0 was never routed
            if n == 1:
                counts[:] = 3
            sums[t.name] = (rng.random((n, t.ne[0]), dtype=np.float32) * 9, counts)
    imatrix = imatrix_gguf(sums).write(tmp_path / "imatrix.gguf")
    plan = plan_pair(PairOptions(source, tmp_path / "out", low=(label,), low_only=True, imatrix=imatrix))
    run_pair(plan)
    plan.close()
    expected = quantize(source, tmp_path / "q.gguf", label, "--imatrix", str(imatrix))
    assert experts_of(tmp_path / "out" / f"m.experts-{label}.gguf") == expected


def test_the_comparison_can_fail(source: Path, tmp_path: Path) -> None:
    values = np.zeros((4, 512, 256), np.float32)
    expected = quantize(source, tmp_path / "q.gguf", "Q4_0")
    assert expected["blk.0.ffn_up_exps.weight"].data != pack(values, "Q4_0")
