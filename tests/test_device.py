"""Experts in the memory of an accelerator: the same logits as stock on the CPU, bit for bit.

The accelerator is simulated (llama.cpp/ggml-sim): it computes with the CPU's kernels, so that equality can be asked
for, but its memory is its own, its queues run by themselves, delayed at random here, and memory that nobody wrote
holds NaN. A missing synchronisation is then a wrong logit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import BUILD, DIFFERENT, EQUAL, ROOT, Exact, RunExact
from test_archs import NO_MEMORY, folder, saved_model  # noqa: F401

HIGH = ROOT / "models" / "tiny-moe" / "tiny-moe-F16.gguf"
LOW = BUILD / "models" / "tiny-moe-Q4_0.gguf"
TOKENS = ("--prompt", 100, "--generate", 24, "--ubatch", "1,8,32,512", "--cache", "25%")
DELAYS = {"HOBBIT_SIM_DELAY_US": 100}


def assert_exact_on_device(result: Exact) -> None:
    """Equal, and the device's slots were filled and emptied."""
    assert result.code == EQUAL, result.differences()
    assert result.total("upload_bytes") > 0
    assert result.total("device_evictions") > 0


@pytest.mark.parametrize("n_devices", [1, 2])
@pytest.mark.parametrize("device_cache", ["25%", "60%"])  # without room for a stage, and with it
def test_exact_mode_on_devices_equals_stock(exact: RunExact, n_devices: int, device_cache: str) -> None:
    result = exact(HIGH, *TOKENS, "--sim", n_devices, "--device-cache", device_cache, **DELAYS)
    assert_exact_on_device(result)
    assert result.total("device_hits") > 0


def test_copies_that_block_give_the_same(exact: RunExact) -> None:
    result = exact(HIGH, *TOKENS, "--sim", 1, "--device-cache", "60%", HOBBIT_SIM_ASYNC=0)
    assert_exact_on_device(result)


def test_sequences_side_by_side_under_constant_eviction(exact: RunExact) -> None:
    steps = ("--prompt", 20, "--generate", 60, "--ubatch", 512)
    result = exact(
        HIGH, *steps, "--sequences", 4, "--cache", "25%", "--sim", 1, "--device-cache", "40%", HOBBIT_SIM_DELAY_US=50
    )
    assert_exact_on_device(result)


MIXED = ("--hobbit", f"low={LOW}", "--hobbit", "precision=paper", "--hobbit", "deterministic=on")


@pytest.mark.parametrize("device_cache", ["25%", "80%"])
def test_both_precisions_on_a_device_give_what_the_cpu_gives(exact: RunExact, device_cache: str) -> None:
    result = exact(HIGH, *TOKENS, *MIXED, "--versus", "200%", "--sim", 1, "--device-cache", device_cache, **DELAYS)
    assert_exact_on_device(result)
    for counter in ("selected_high", "selected_low", "selected_skip"):
        assert result.total(counter) > 0, counter


def test_the_comparison_on_a_device_can_fail(exact: RunExact) -> None:
    low = ("--hobbit", f"low={LOW}", "--hobbit", "precision=low")
    result = exact(HIGH, *TOKENS, *low, "--sim", 1, "--device-cache", "60%")
    assert result.code == DIFFERENT
    assert result.total("upload_bytes") > 0
    assert all(run["different"] > run["logits"] / 2 for run in result.runs)


def test_a_device_without_room_leaves_experts_to_the_cpu(exact: RunExact) -> None:
    for arguments, environment in (
        (("--device-cache", "off"), {}),
        (("--device-cache", "10KiB"), {}),
        (("--device-cache", "60%"), {"HOBBIT_SIM_MEMORY_MIB": 12}),
        (("--device-cache", "60%"), {"HOBBIT_SIM_FAIL_ALLOC": 3}),  # after the other weights and the stage
    ):
        result = exact(HIGH, *TOKENS, "--sim", 1, *arguments, "--verbose", **environment)
        assert result.code == EQUAL, result.differences()
        assert result.total("upload_bytes") == 0
        assert result.total("lookups") > 0
        assert "computed on the CPU" in result.stderr


def test_a_device_without_room_for_a_stage_computes_small_batches(exact: RunExact) -> None:
    result = exact(HIGH, *TOKENS, "--sim", 1, "--device-cache", "60%", "--verbose", HOBBIT_SIM_FAIL_ALLOC=2)
    assert_exact_on_device(result)
    assert "large batches on the CPU" in result.stderr


# one of each kind of layer; all of them have run once by hand
KINDS = {
    "qwen35moe": "gate and up in one tensor, shared expert",
    "gpt-oss": "biases for each expert",
    "llama4": "weights before the FFN",
    "grovemoe": "two builds for each layer",
    "deepseek2": "first layers dense",
}


@pytest.mark.parametrize("arch", KINDS)
def test_kinds_of_layers_on_a_device(exact: RunExact, folder: Path, arch: str) -> None:  # noqa: F811
    assert arch not in NO_MEMORY
    steps = ("--prompt", 40, "--generate", 6, "--ubatch", "1,8,512", "--cache", "25%")
    result = exact(saved_model(arch, folder), *steps, "--sim", 2, "--device-cache", "50%", HOBBIT_SIM_DELAY_US=50)
    assert_exact_on_device(result)
