"""Exact mode on every MoE architecture: the same logits as stock, bit for bit, under the smallest cache.

Upstream's test-llama-archs writes a small random model of each architecture; with
HOBBIT_TEST_MANY_EXPERTS (patch 0005-test-archs) these have 8 experts of which a token uses 2, and three layers where
the architecture accepts that. The list of architectures is read from its source, so that a new pin brings its new ones.
One model exists at a time.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from conftest import BUILD, EQUAL, REFUSED, ROOT, Exact, RunExact, clean_environment, program

SOURCE = BUILD / "llama.cpp-src"
N_PROMPT, N_GENERATE = 64, 12
SETTINGS = ("--prompt", N_PROMPT, "--generate", N_GENERATE, "--ubatch", "1,8,512", "--cache", "min")

# in upstream's list of MoE architectures, but written by nobody
NOT_SAVED = {
    "step35": "upstream's saver does not support it",
    "llama-embed": "an embedding model, which upstream's test leaves out",
}
# in that list too, but their models have no experts
DENSE = {"ernie4_5", "paddleocr"}
# experts are loaded, but upstream's graph computes a dense FFN
UNUSED = {"refact"}
# there is no memory between batches: one batch, no generation
NO_MEMORY = {"llada-moe", "rnd1"}


def moe_architectures() -> list[str]:
    """The architectures that upstream's test-llama-archs takes for MoE."""
    test, table = SOURCE / "tests" / "test-llama-archs.cpp", SOURCE / "src" / "llama-arch.cpp"
    if not test.is_file():
        return []
    names = dict(re.findall(r'\{ *(LLM_ARCH_\w+), *"([^"]+)" *\}', table.read_text()))
    text = test.read_text()
    constants: list[str] = []
    for function in ("moe_mandatory", "moe_implemented"):
        body = re.search(rf"static bool {function}\(.*?\n\}}\n", text, re.DOTALL)
        assert body, f"{test} has no {function}"
        constants += re.findall(r"case (LLM_ARCH_\w+):", body.group())
    return sorted({names[constant] for constant in constants})


ARCHITECTURES = moe_architectures()
SAVED = [arch for arch in ARCHITECTURES if arch not in NOT_SAVED]
MANAGED = [arch for arch in SAVED if arch not in DENSE | UNUSED]


def write_model(arch: str, folder: Path, seed: int = 1) -> Path | None:
    subprocess.run(
        [str(program("test-llama-archs")), "--arch", arch, "--seed", str(seed), "--out", str(folder)],
        env=clean_environment(HOBBIT_TEST_MANY_EXPERTS="1"),
        check=True,
        capture_output=True,
        timeout=300,
    )
    path = folder / f"{arch}-moe.gguf"
    return path if path.is_file() else None


def saved_model(arch: str, folder: Path) -> Path:
    path = write_model(arch, folder)
    assert path, f"test-llama-archs wrote no MoE model of {arch}"
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder whose files are gone when the test ends; pytest would keep them."""
    yield tmp_path
    for path in tmp_path.iterdir():
        path.unlink()


def assert_exact(result: Exact) -> None:
    """Equal, and not because nothing happened."""
    assert result.code == EQUAL, result.differences()
    assert result.total("evictions") > 0
    assert result.total("streamed") > 0


def expert_tensors(path: Path) -> list[gguf.ReaderTensor]:
    return [
        t for t in gguf.GGUFReader(path).tensors if re.search(r"\.ffn_(gate|up|down|gate_up)_exps\.weight$", t.name)
    ]


def test_architectures_are_known() -> None:
    assert len(ARCHITECTURES) >= 50, f"{SOURCE} is not there or its test has changed: make build"
    assert set(NOT_SAVED) < set(ARCHITECTURES)
    assert DENSE | UNUSED | NO_MEMORY < set(SAVED)


@pytest.mark.parametrize("arch", MANAGED)
def test_exact_mode_equals_stock_for_every_moe_architecture(exact: RunExact, folder: Path, arch: str) -> None:
    path = saved_model(arch, folder)
    tensors = expert_tensors(path)
    assert {int(t.shape[2]) for t in tensors} == {8}

    result = exact(path, *SETTINGS)
    assert result.report["arch"] == arch
    assert_exact(result)
    blocks = {int(t.name.split(".")[1]) for t in tensors}
    for run in result.runs:
        assert {layer["block"] for layer in run["stats"]["layers"] if layer["lookups"]} == blocks
    generated = {run["generated"] for run in result.runs}
    assert generated == ({0} if arch in NO_MEMORY else {N_GENERATE})

    if arch not in NO_MEMORY:
        # as in generation: the last layer gets one row of the prompt, and none in its first ubatches
        result = exact(path, *SETTINGS, "--ubatch", 24, "--outputs", "last")
        assert result.code == EQUAL, result.differences()
        assert result.runs[0]["logits"] == 128 * (1 + N_GENERATE)


@pytest.mark.parametrize("policy", ["hobbit", "lru", "lfu"])
@pytest.mark.parametrize("arch", ["qwen3moe", "qwen35moe"])
def test_experts_in_use_stay_while_others_of_their_step_come(
    exact: RunExact, folder: Path, arch: str, policy: str
) -> None:
    """Under the smallest cache nothing is found again; here a step finds some experts and evicts for others."""
    result = exact(saved_model(arch, folder), *SETTINGS, "--cache", "25%", "--hobbit", f"policy={policy}")
    assert_exact(result)
    assert result.total("hits") > 0


@pytest.mark.parametrize("arch", sorted(DENSE))
def test_a_model_without_experts_is_refused(exact: RunExact, folder: Path, arch: str) -> None:
    path = saved_model(arch, folder)
    assert not expert_tensors(path)
    result = exact(path, *SETTINGS)
    assert result.code == REFUSED, result.differences()
    assert "dense model" in result.report["refused"] and arch in result.report["refused"]


@pytest.mark.parametrize("arch", sorted(UNUSED))
def test_experts_that_the_graph_never_uses_are_never_read(exact: RunExact, folder: Path, arch: str) -> None:
    path = saved_model(arch, folder)
    assert expert_tensors(path)
    result = exact(path, *SETTINGS)
    assert result.code == EQUAL, result.differences()
    assert result.total("lookups") == result.total("read_bytes_high") == 0


@pytest.mark.parametrize("arch", sorted(NOT_SAVED))
def test_the_other_moe_architectures_are_still_not_saved(folder: Path, arch: str) -> None:
    assert write_model(arch, folder) is None, f"upstream saves {arch} now: remove it from NOT_SAVED"


def test_every_architecture_is_in_the_docs() -> None:
    page = (ROOT / "docs" / "architectures.md").read_text()
    assert sorted(re.findall(r"^\| `([\w.-]+)` ", page, re.MULTILINE)) == ARCHITECTURES


@pytest.mark.parametrize("arch", ["qwen3moe", "llama4"])
def test_swapping_two_experts_changes_the_logits_of_stock(exact: RunExact, folder: Path, arch: str) -> None:
    path = saved_model(arch, folder)
    result = exact(path, "--swap-experts", folder / "swapped.gguf")
    assert result.code == EQUAL, result.differences()
    assert result.report["swapped"]["different"] > 0


#
# other types
#

QUANTISED = {
    "qwen3moe": "plain",
    "qwen35moe": "gate and up in one tensor, shared expert",
    "gpt-oss": "biases for each expert",
    "bailingmoe2": "groups of experts, shared experts, added selection bias",
    "llama4": "weights before the FFN",
    "grovemoe": "two builds for each layer",
}
TYPES = {"F16": "F16", "Q8_0": "Q8_0", "Q4_K_S": "Q4_K", "MXFP4_MOE": "MXFP4"}  # of llama-quantize, of the tensors


@pytest.mark.parametrize("arch", QUANTISED)
def test_exact_mode_equals_stock_for_other_types(exact: RunExact, folder: Path, arch: str) -> None:
    f32 = saved_model(arch, folder)
    path = folder / "other.gguf"
    for file_type, tensor_type in TYPES.items():
        subprocess.run(
            [str(program("llama-quantize")), "--pure", str(f32), str(path), file_type, "2"],
            env=clean_environment(),
            check=True,
            capture_output=True,
            timeout=300,
        )
        assert {t.tensor_type.name for t in expert_tensors(path)} == {tensor_type}
        assert_exact(exact(path, *SETTINGS))


def test_the_other_types_cover_what_they_are_for(folder: Path) -> None:
    """One of them has a fused gate_up, one per-expert biases, several shared experts: seen in the files."""
    names = {arch: {t.name for t in gguf.GGUFReader(saved_model(arch, folder)).tensors} for arch in QUANTISED}
    assert "blk.1.ffn_gate_up_exps.weight" in names["qwen35moe"]
    assert {"blk.1.ffn_gate_exps.bias", "blk.1.ffn_up_exps.bias", "blk.1.ffn_down_exps.bias"} <= names["gpt-oss"]
    assert "blk.1.ffn_up_shexp.weight" in names["bailingmoe2"]
    assert "blk.1.ffn_up_chexps.weight" in names["grovemoe"]


#
# a graph as long as a real one, in one file and in shards
#


def write_qwen3moe(path: Path, n_layer: int, tensors_per_shard: int = 0) -> None:
    """A random qwen3moe of small tensors: of 16 experts a token uses 8, as many as in Qwen3-30B-A3B."""
    n_embd, n_head, n_ff, n_expert, n_vocab = 64, 2, 32, 16, 256
    head_size = n_embd // n_head
    random = np.random.default_rng(1)

    writer = gguf.GGUFWriter(path, "qwen3moe", split_max_tensors=tensors_per_shard)
    writer.add_block_count(n_layer)
    writer.add_context_length(512)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_expert_count(n_expert)
    writer.add_expert_used_count(8)
    writer.add_expert_feed_forward_length(n_ff)
    writer.add_vocab_size(n_vocab)
    writer.add_tokenizer_model("none")

    def add(name: str, *shape: int) -> None:
        values = random.standard_normal(shape, np.float32) * 0.1
        writer.add_tensor(f"{name}.weight", values + np.float32("norm" in name))

    add("token_embd", n_vocab, n_embd)
    add("output_norm", n_embd)
    add("output", n_vocab, n_embd)
    for il in range(n_layer):
        add(f"blk.{il}.attn_norm", n_embd)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{il}.{name}", n_embd, n_embd)
        add(f"blk.{il}.attn_q_norm", head_size)
        add(f"blk.{il}.attn_k_norm", head_size)
        add(f"blk.{il}.ffn_norm", n_embd)
        add(f"blk.{il}.ffn_gate_inp", n_expert, n_embd)
        add(f"blk.{il}.ffn_gate_exps", n_expert, n_ff, n_embd)
        add(f"blk.{il}.ffn_up_exps", n_expert, n_ff, n_embd)
        add(f"blk.{il}.ffn_down_exps", n_expert, n_embd, n_ff)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_model_of_48_layers_is_exact(exact: RunExact, folder: Path) -> None:
    path = folder / "long.gguf"
    write_qwen3moe(path, 48)
    result = exact(path, *SETTINGS)
    assert_exact(result)
    assert len(result.runs[0]["stats"]["layers"]) == 48


def test_a_model_in_shards_is_exact(exact: RunExact, folder: Path) -> None:
    write_qwen3moe(folder / "shards.gguf", 4, tensors_per_shard=7)  # a layer's experts lie in two files
    shards = sorted(folder.glob("shards-*.gguf"))
    assert len(shards) == 8
    assert_exact(exact(shards[0], *SETTINGS))
