"""What a user gets wrong ends with a clear message and a non-zero exit, and nothing half-done."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from conftest import BUILD, ROOT, clean_environment, program

HIGH = ROOT / "models/tiny-moe/tiny-moe-F16.gguf"
LOW = BUILD / "models/tiny-moe-Q4_0.gguf"

Run = Callable[..., subprocess.CompletedProcess[str]]


def run(model: Path, *options: object, tool: str = "llama-completion", **env: str) -> subprocess.CompletedProcess[str]:
    arguments = ["-m", model, "-p", "In the beginning", "-n", 4, "--no-warmup", *options]
    if tool == "llama-completion":
        arguments.append("-no-cnv")
    return subprocess.run(
        [str(program(tool)), *map(str, arguments)],
        env=clean_environment(**env),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=120,
    )


def refused(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """The program failed, did not crash, generated nothing, and its message has every part."""
    assert 0 < done.returncode < 128, f"exit code {done.returncode}: {done.stderr[-2000:]}"
    for part in parts:
        assert part in done.stderr, f"{part!r} is not in: {done.stderr[-3000:]}"
    assert "expert cache\n" not in done.stderr


def edited(source: Path, target: Path, edit: Callable[[str, np.memmap], None]) -> Path:
    """A copy of a GGUF whose tensor data edit(name, data) may change in place."""
    shutil.copy(source, target)
    for tensor in gguf.GGUFReader(target, "r+").tensors:
        edit(tensor.name, tensor.data)
    return target


def dense_model(path: Path) -> Path:
    """A small llama with the tokenizer of tiny-moe and one layer of random weights."""
    writer = gguf.GGUFWriter(path, "llama")
    for field in gguf.GGUFReader(HIGH).fields.values():
        if field.name.startswith("tokenizer."):
            is_array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[1] if is_array else None)
            if field.name == "tokenizer.ggml.tokens":
                n_vocab = len(field.contents())
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    shapes = {"token_embd": (n_vocab, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    shapes |= {f"blk.0.attn_{x}": (32, 32) for x in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64)}
    rng = np.random.default_rng(1)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape, dtype=np.float32) * 0.1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_unharmed_model_works() -> None:
    done = run(HIGH, "--hobbit-low", LOW, "--hobbit-cache", "8MiB")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "hobbit: expert cache" in done.stderr


@pytest.mark.parametrize("tool", ["llama-completion", "llama-cli", "llama-perplexity"])
def test_a_missing_low_file_is_named(tool: str, tmp_path: Path) -> None:
    absent = tmp_path / "absent.gguf"
    more = ["-st"] if tool == "llama-cli" else ["-f", __file__] if tool == "llama-perplexity" else []
    refused(run(HIGH, "--hobbit-low", absent, *more, tool=tool), str(absent), "No such file")


def test_a_truncated_low_file_is_named_with_the_tensor(tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    shutil.copy(LOW, cut)
    os.truncate(cut, LOW.stat().st_size - 4096)
    refused(run(HIGH, "--hobbit-low", cut), str(cut), "truncated", "blk.5.ffn_")


def test_a_truncated_high_file_is_refused(tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    shutil.copy(HIGH, cut)
    os.truncate(cut, HIGH.stat().st_size - 4096)
    refused(run(cut, "--hobbit-cache", "8MiB"), "corrupted or incomplete")


@pytest.mark.parametrize("keep", [0, 3, 100])
def test_a_damaged_header_is_refused(keep: int, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    shutil.copy(LOW, cut)
    os.truncate(cut, keep)
    refused(run(HIGH, "--hobbit-low", cut), str(cut), "header")


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    refused(run(HIGH, "--hobbit-low", tmp_path), str(tmp_path))


def test_low_experts_of_another_model_are_refused(tmp_path: Path) -> None:
    def other_router(name: str, data: np.memmap) -> None:
        if name == "blk.3.ffn_gate_inp.weight":
            data[0, 0] += 1

    other = edited(LOW, tmp_path / "other.gguf", other_router)
    refused(run(HIGH, "--hobbit-low", other), str(other), "blk.3.ffn_gate_inp.weight")


def test_low_experts_of_a_dense_model_are_refused(tmp_path: Path) -> None:
    dense = dense_model(tmp_path / "dense.gguf")
    refused(run(HIGH, "--hobbit-low", dense), str(dense), "architecture is llama")


def test_a_dense_model_is_refused_and_runs_without_options(tmp_path: Path) -> None:
    dense = dense_model(tmp_path / "dense.gguf")
    refused(run(dense, "--hobbit-cache", "8MiB"), "dense model", "without --hobbit options")
    assert run(dense).returncode == 0


def test_a_gap_in_the_shards_is_named(tmp_path: Path) -> None:
    """Two shards' headers over one file's tensors: the second shard does not exist."""
    reader = gguf.GGUFReader(LOW)
    shard = tmp_path / "m-00001-of-00002.gguf"
    writer = gguf.GGUFWriter(shard, "qwen3moe")
    writer.add_uint16("split.no", 0)
    writer.add_uint16("split.count", 2)
    writer.add_int32("split.tensors.count", len(reader.tensors))
    for tensor in reader.tensors[:10]:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(run(HIGH, "--hobbit-low", shard), "m-00002-of-00002.gguf")


def test_too_small_a_cache_names_the_size_that_works() -> None:
    done = run(HIGH, "--hobbit-cache", "100KiB")
    refused(done, "too small")
    size = done.stderr.split("--hobbit-cache ")[1].split("\n")[0].strip()
    assert size.endswith("KiB")
    assert run(HIGH, "--hobbit-cache", size).returncode == 0
    refused(run(HIGH, "--hobbit-cache", f"{int(size[:-3]) - 1}KiB"), "too small")


def test_a_cache_larger_than_memory_is_refused_only_if_the_experts_would_fill_it() -> None:
    assert run(HIGH, "--hobbit-cache", "100000GiB").returncode == 0  # 36 MiB of experts


@pytest.mark.parametrize(
    ("option", "value", "hint"),
    [
        ("cache", "-1", "4GiB"),
        ("cache", "much", "4GiB"),
        ("cache", "0", "4GiB"),
        ("precision", "medium", "hobbit, paper, high, low or article"),
        ("t1", "1.5", "0 to 1"),
        ("t2", "-0.5", "0 to 1"),
        ("policy", "newest", "lru"),
        ("weights", "1,2", "recency"),
        ("low-share", "0", "0.01"),
        ("io-threads", "0", "1 to 64"),
    ],
)
def test_a_bad_value_names_the_option_and_what_it_takes(option: str, value: str, hint: str) -> None:
    refused(run(HIGH, f"--hobbit-{option}", value), f"--hobbit-{option}", hint)
    variable = "LLAMA_ARG_HOBBIT_" + option.upper().replace("-", "_")
    refused(run(HIGH, **{variable: value}), variable, hint)


def test_options_that_do_not_fit_together_are_refused() -> None:
    refused(run(HIGH, "--hobbit-t1", 0.8, "--hobbit-t2", 0.5), "--hobbit-t1 0.8", "--hobbit-t2 0.5")
    refused(run(HIGH, "--hobbit-precision", "low"), "--hobbit-low")
    refused(run(HIGH, "--hobbit-cache", "8MiB", "--check-tensors"), "--hobbit-check")
    refused(run(HIGH, "--hobbit-cache", "8MiB", "--split-mode", "row"), "--split-mode")


def test_an_unknown_option_is_refused() -> None:
    refused(run(HIGH, "--hobbit-cash", "8MiB"), "--hobbit-cash")


def test_statistics_that_cannot_be_written_are_reported(tmp_path: Path) -> None:
    done = run(HIGH, "--hobbit-cache", "8MiB", "--hobbit-stats", tmp_path / "no/such/folder.json")
    assert "folder.json: statistics cannot be written" in done.stderr


def test_nan_in_an_expert_is_found_when_asked_for(tmp_path: Path) -> None:
    def nan_everywhere(name: str, data: np.memmap) -> None:
        if name.endswith("ffn_up_exps.weight"):
            data[:, 0, 0] = np.float16("nan")

    broken = edited(HIGH, tmp_path / "nan.gguf", nan_everywhere)
    done = run(broken, "--hobbit-cache", "8MiB", "--hobbit-check")
    assert done.returncode != 0
    assert "invalid numbers" in done.stderr
    assert "ffn_up_exps.weight, expert" in done.stderr


class Decoder:
    """A managed model driven through llama's C API, to see what llama_decode returns."""

    def __init__(self, model: Path, **options: str) -> None:
        os.environ["LLAMA_CPP_LIB_PATH"] = str(BUILD / "bin")
        import llama_cpp

        self.api = llama_cpp
        self.log: list[str] = []

        @llama_cpp.llama_log_callback
        def keep(_level: int, text: bytes, _data: object) -> None:
            self.log.append(text.decode(errors="replace"))

        self.keep = keep
        lib = ctypes.CDLL(str(BUILD / "bin/libllama.so"))
        lib.llama_log_set.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        lib.llama_log_get.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_void_p)]
        self.lib = lib
        # whoever loaded the library before, as hobbit_py does, reads its errors from the log
        self.log_before = (ctypes.c_void_p(), ctypes.c_void_p())
        lib.llama_log_get(*map(ctypes.byref, self.log_before))
        lib.llama_log_set(ctypes.cast(keep, ctypes.c_void_p), None)
        handle = lib.hobbit_config_new()
        err = ctypes.create_string_buffer(1024)
        for name, value in options.items():
            assert lib.hobbit_config_set(handle, name.encode(), value.encode(), err, 1024), err.value
        overrides = (llama_cpp.llama_model_kv_override * 2)()
        overrides[0].key = b"hobbit.config"
        overrides[0].tag = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_INT
        overrides[0].value.val_i64 = handle
        self.overrides = overrides
        params = llama_cpp.llama_model_default_params()
        params.kv_overrides = overrides
        self.model = llama_cpp.llama_model_load_from_file(str(model).encode(), params)
        context = llama_cpp.llama_context_default_params()
        context.n_ctx, context.n_threads, context.n_threads_batch = 256, 2, 2
        self.context = llama_cpp.llama_init_from_model(self.model, context)

    def decode(self, *tokens: int) -> int:
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        return int(self.api.llama_decode(self.context, self.api.llama_batch_get_one(ids, len(tokens))))

    def close(self) -> None:
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)
        self.lib.llama_log_set(*self.log_before)


def test_a_file_that_shrinks_while_running_fails_the_decode_call(tmp_path: Path) -> None:
    shrinking = tmp_path / "shrinking.gguf"
    shutil.copy(HIGH, shrinking)
    decoder = Decoder(shrinking, cache="2MiB")
    try:
        assert decoder.decode(5, 6, 7) == 0
        os.truncate(shrinking, HIGH.stat().st_size // 4)
        assert decoder.decode(8, 9, 10) == -3
        log = "".join(decoder.log)
        assert str(shrinking) in log
        assert "changed while in use" in log
        assert "expert " in log.split("changed while in use")[1]
        # and again: the error is of the step, the context survives it
        assert decoder.decode(8, 9, 10) == -3
    finally:
        decoder.close()
    now = (ctypes.c_void_p(), ctypes.c_void_p())
    decoder.lib.llama_log_get(*map(ctypes.byref, now))
    assert [pointer.value for pointer in now] == [pointer.value for pointer in decoder.log_before]
