"""Experts in the memory of an accelerator: the same logits as stock on the CPU, bit for bit.

The accelerator is simulated (llama.cpp/ggml-sim): it computes with the CPU's kernels, so that equality can be asked
for, but its memory is its own, its queues run by themselves, delayed at random here, and memory that nobody wrote
holds NaN. A missing synchronisation is then a wrong logit.
"""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

import pytest
from conftest import BUILD, DIFFERENT, EQUAL, ROOT, Exact, RunExact, clean_environment, finish, program
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


def with_misses(miss: str) -> tuple[object, ...]:
    return ("--hobbit", f"miss={miss}")


@pytest.mark.parametrize("n_devices", [1, 2])
@pytest.mark.parametrize("miss", ["cpu", "auto"])
def test_misses_that_the_cpu_computes_give_the_same(exact: RunExact, miss: str, n_devices: int) -> None:
    result = exact(HIGH, *TOKENS, *with_misses(miss), "--sim", n_devices, "--device-cache", "25%", **DELAYS)
    assert_exact_on_device(result)
    assert result.total("device_hits") > 0
    assert result.total("cpu_computed") > 0
    if miss == "cpu":  # each lookup that small batches missed, and with no stage the large ones are the CPU's anyway
        decode = result.runs[0]["stats"]["total"]  # one token at a time
        assert decode["cpu_computed"] == decode["lookups"] - decode["device_hits"]


def test_misses_that_the_cpu_computes_of_sequences_side_by_side(exact: RunExact) -> None:
    steps = ("--prompt", 20, "--generate", 60, "--ubatch", 512, "--sequences", 4, "--cache", "25%")
    for miss in ("cpu", "auto"):
        result = exact(HIGH, *steps, *with_misses(miss), "--sim", 1, "--device-cache", "40%", HOBBIT_SIM_DELAY_US=50)
        assert_exact_on_device(result)
        assert result.total("cpu_computed") > 0


@pytest.mark.parametrize("miss", ["cpu", "auto"])
def test_misses_that_the_cpu_computes_in_both_precisions(exact: RunExact, miss: str) -> None:
    device = ("--sim", 1, "--device-cache", "25%", *with_misses(miss))
    result = exact(HIGH, *TOKENS, *MIXED, "--versus", "200%", *device, **DELAYS)
    assert_exact_on_device(result)
    assert result.total("cpu_computed") > 0
    assert result.total("selected_low") > 0


def test_misses_that_the_cpu_computes_with_copies_that_block(exact: RunExact) -> None:
    result = exact(HIGH, *TOKENS, *with_misses("cpu"), "--sim", 1, "--device-cache", "25%", HOBBIT_SIM_ASYNC=0)
    assert result.code == EQUAL, result.differences()
    assert result.total("cpu_computed") > 0
    assert result.total("device_hits") > 0  # slots were filled beside it


def test_misses_do_not_wait_for_a_slow_link(exact: RunExact) -> None:
    """A link that takes 10 ms for an expert: once measured, the CPU computes most (how many depends on the machine)."""
    steps = ("--prompt", 4, "--generate", 50, "--ubatch", 1, "--cache", "110%", *with_misses("auto"))
    result = exact(HIGH, *steps, "--sim", 1, "--device-cache", "25%", HOBBIT_SIM_BANDWIDTH_MBPS=20)
    assert_exact_on_device(result)
    missed = result.total("lookups") - result.total("device_hits")
    assert 0.5 * missed < result.total("cpu_computed") < missed


def test_misses_on_the_cpu_need_a_device_cache() -> None:
    done = finish(program("llama-cli"), "-m", HIGH, "--hobbit-miss", "cpu")
    assert done.returncode != 0
    assert "--hobbit-miss cpu needs --hobbit-device-cache" in done.stderr + done.stdout


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


def test_a_device_that_does_not_know_negative_ids_leaves_experts_to_the_cpu(exact: RunExact) -> None:
    """As over RPC, whose server may be anybody's."""
    result = exact(HIGH, *TOKENS, "--sim", 1, "--device-cache", "60%", "--verbose", HOBBIT_SIM_SKIP=0)
    assert result.code == EQUAL, result.differences()
    assert result.total("upload_bytes") == 0
    assert "SIM0 are computed on the CPU: the backend does not know MUL_MAT_ID with negative ids" in result.stderr


def test_over_rpc_experts_stay_with_the_client() -> None:
    """The rest of the model is computed by a server on loopback; slots there are refused, with the reason."""
    if not (BUILD / "bin" / "ggml-rpc-server").is_file():
        pytest.skip("built without GGML_RPC=ON, or without the target ggml-rpc-server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [program("ggml-rpc-server"), "-H", "127.0.0.1", "-p", str(port)],
        env=clean_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        ask = (program("llama-completion"), "-m", HIGH, "-no-cnv", "-p", "Hello", "-n", 16, "--temp", 0, "--no-repack")
        over_rpc = ("--rpc", f"127.0.0.1:{port}", "-ngl", 99)
        stock = finish(*ask, *over_rpc)
        ours = finish(*ask, *over_rpc, "--hobbit-cache", "12MiB", "--hobbit-device-cache", "10MiB")
    finally:
        server.kill()
        server.wait()
    assert stock.returncode == 0 and ours.returncode == 0, stock.stderr + ours.stderr
    assert ours.stdout == stock.stdout
    assert "on RPC0 are computed on the CPU: the backend does not know MUL_MAT_ID with negative ids" in ours.stderr


@pytest.mark.parametrize("miss", ["load", "cpu"])
def test_two_contexts_of_a_model_share_its_slots(exact: RunExact, miss: str) -> None:
    """As a target's and its MTP head's do: they take turns, and each uses or evicts what the other left in slots."""
    device = ("--sim", 1, "--device-cache", "25%", *with_misses(miss))
    result = exact(HIGH, *TOKENS, "--contexts", 2, *device, **DELAYS)
    assert_exact_on_device(result)
    assert result.total("device_hits") > 0


# what else says where tensors lie or how attention is computed: beside slots on a device it works
BESIDE: dict[str, tuple[object, ...]] = {
    "KV cache on the host": ("--no-kv-offload",),
    "quantised KV cache": ("--kv-type", "q8_0", "--flash-attn", "on"),
    "flash attention": ("--flash-attn", "on"),
    "no flash attention": ("--flash-attn", "off"),
    "uneven split": ("--tensor-split", "3,1"),
    "experts of some layers on the CPU": ("--experts-on-cpu", "blk\\.[01]\\.ffn_.*_exps"),
    "one weight of a layer on the CPU": ("--experts-on-cpu", "blk\\.1\\.ffn_down_exps"),
    "host cache resized": ("--resize", "60%"),
    "memory is the host's": (),
}


@pytest.mark.parametrize("miss", ["load", "cpu"])
@pytest.mark.parametrize("beside", BESIDE)
def test_options_beside_a_device_cache(exact: RunExact, beside: str, miss: str) -> None:
    device = ("--sim", 2, "--device-cache", "30%", *with_misses(miss))
    unified = {"HOBBIT_SIM_UNIFIED": int(beside == "memory is the host's")}
    result = exact(HIGH, *TOKENS, *BESIDE[beside], *device, **DELAYS, **unified)
    assert_exact_on_device(result)
    assert (result.total("cpu_computed") > 0) == (miss == "cpu")


def test_experts_on_the_cpu_by_override_get_no_slots(exact: RunExact) -> None:
    device = ("--sim", 1, "--device-cache", "60%", "--experts-on-cpu", "exps")
    result = exact(HIGH, *TOKENS, *device)
    assert result.code == EQUAL, result.differences()
    assert result.total("upload_bytes") == 0
    assert result.total("lookups") > 0


def test_placement_states_the_slots_on_devices(exact: RunExact) -> None:
    result = exact(HIGH, *TOKENS, "--sim", 2, "--device-cache", "60%", *with_misses("auto"))
    placement = result.runs[0]["placement"]
    assert placement["miss"] == "auto"
    assert [d["name"] for d in placement["devices"]] == ["SIM0", "SIM1"]
    assert sum(d["layers"] for d in placement["devices"]) == placement["n_layer"]
    assert all(d["slots_high"] >= placement["n_expert_used"] and d["queue"] for d in placement["devices"])


def test_an_expert_in_memory_that_is_the_hosts_is_there_once(exact: RunExact) -> None:
    """Beside a host cache with room for all experts, those with a slot on the device are not in it."""
    device = ("--sim", 1, "--device-cache", "50%", "--cache", "200%", "--generate", 40, "--ubatch", 1)
    resident = {}
    for unified in (0, 1):
        run = exact(HIGH, "--prompt", 100, *device, HOBBIT_SIM_UNIFIED=unified).runs[0]
        n_device = run["placement"]["devices"][0]["slots_high"]
        resident[unified] = run["stats"]["resident_high"]
        n_experts = run["placement"]["n_layer"] * run["placement"]["n_expert"]
        assert resident[unified] <= n_experts - (n_device if unified else 0)
    assert resident[1] < resident[0]


# one of each kind of layer; all of them have run once by hand
KINDS = {
    "qwen35moe": "gate and up in one tensor, shared expert",
    "gpt-oss": "biases for each expert",
    "llama4": "weights before the FFN",
    "grovemoe": "two builds for each layer",
    "deepseek2": "first layers dense",
}


@pytest.mark.parametrize("miss", ["load", "cpu"])
@pytest.mark.parametrize("arch", KINDS)
def test_kinds_of_layers_on_a_device(exact: RunExact, folder: Path, arch: str, miss: str) -> None:  # noqa: F811
    assert arch not in NO_MEMORY
    steps = ("--prompt", 40, "--generate", 6, "--ubatch", "1,8,512", "--cache", "25%", *with_misses(miss))
    result = exact(saved_model(arch, folder), *steps, "--sim", 2, "--device-cache", "50%", HOBBIT_SIM_DELAY_US=50)
    assert_exact_on_device(result)
    assert (result.total("cpu_computed") > 0) == (miss == "cpu")
