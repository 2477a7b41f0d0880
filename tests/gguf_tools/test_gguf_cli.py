"""The command as a user meets it: exit codes, one-line errors, tables and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gguf_models import Moe, run_cli, split

from gguf_tools.errors import ExitCode, ToolError, show
from gguf_tools.units import format_rate, format_size, parse_rate, parse_size


def test_a_model_becomes_a_pair_in_one_command(tmp_path: Path) -> None:
    source = Moe(type="F16").build().write(tmp_path / "m.gguf")
    done = run_cli("pair", source, "-o", tmp_path / "out", "--low", "q4_0", "--low", "q2_k")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "m.experts-Q2_K.gguf" in done.stdout
    assert "fallback: Q2_K -> Q4_0 for 4 tensors, because rows of 64" in done.stdout  # every one is listed
    assert all(f"blk.{i}.ffn_{role}_exps.weight" in done.stdout for i in (0, 1) for role in ("gate", "up", "down"))
    done = run_cli("verify", tmp_path / "out" / "m.base.gguf")
    assert done.returncode == 0 and "pair: ok" in done.stdout and "worst expert" in done.stdout
    done = run_cli("merge", tmp_path / "out" / "m.base.gguf", "-o", tmp_path / "merged.gguf")
    assert done.returncode == 0 and "byte-identical to the source" in done.stdout
    assert (tmp_path / "merged.gguf").read_bytes() == source.read_bytes()


def test_errors_are_one_line_with_a_documented_code(tmp_path: Path) -> None:
    good = Moe().build().write(tmp_path / "m.gguf")
    dense = Moe(n_layer=1, dense_first=True).build().write(tmp_path / "dense.gguf")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(good.read_bytes()[:-100])
    out = tmp_path / "out"
    cases: list[tuple[ExitCode, list[object], str]] = [
        (ExitCode.USAGE, ["pair", good, "-o", out, "--low", "q9"], "'q9' is not a tensor type"),
        (
            ExitCode.USAGE,
            ["pair", good, "-o", out, "--high", "q4_0"],
            "--high q4_0 is not one of f16, bf16, q8_0, keep",
        ),
        (ExitCode.USAGE, ["pair", good], "Missing option"),
        (ExitCode.USAGE, ["pair", good, "-o", out, "--frobnicate"], "No such option"),
        (ExitCode.USAGE, ["pair", good, "-o", out, "--low-only", "--high", "f16"], "--low-only makes no high file"),
        (ExitCode.USAGE, ["pair", tmp_path, "-o", out], "config.json"),
        (ExitCode.USAGE, ["inspect", good, "--memory", "lots"], "is not a size"),
        (ExitCode.MALFORMED, ["pair", broken, "-o", out], "truncated"),
        (ExitCode.UNSUPPORTED, ["pair", dense, "-o", out], "is a dense model"),
        (ExitCode.UNSUPPORTED, ["merge", good, "-o", out], "is not part of a pair"),
        (ExitCode.IO, ["inspect", tmp_path / "none.gguf"], "No such file"),
    ]
    for code, arguments, text in cases:
        done = run_cli(*arguments)
        assert done.returncode == code, (arguments, done.stderr)
        assert text in done.stderr and done.stderr.count("\n") == 1, done.stderr
        assert done.stdout == ""
    assert not out.exists()


def test_without_arguments_the_help_is_shown() -> None:
    for arguments in ([], ["--help"]):
        done = run_cli(*arguments)
        assert done.returncode == 0 and done.stderr == ""
        assert all(f"  {name} " in done.stdout for name in ("pair", "inspect", "verify", "merge", "plan"))


def test_missing_library_is_its_own_code(tmp_path: Path) -> None:
    (tmp_path / "libggml-base.so").write_bytes(b"not a library")
    (tmp_path / "libggml-base.dylib").write_bytes(b"not a library")
    good = Moe().build().write(tmp_path / "m.gguf")
    done = run_cli("inspect", good, HOBBIT_GGML_LIB=str(tmp_path))
    assert done.returncode == ExitCode.LIBRARY and done.stderr.count("\n") == 1


def test_verify_fails_with_its_own_code(tmp_path: Path) -> None:
    source = Moe().build().write(tmp_path / "m.gguf")
    assert run_cli("pair", source, "-o", tmp_path / "out").returncode == 0
    low = tmp_path / "out" / "m.experts-Q4_0.gguf"
    data = bytearray(low.read_bytes())
    data[-5000] ^= 1
    low.write_bytes(data)
    done = run_cli("verify", tmp_path / "out" / "m.base.gguf")
    assert done.returncode == ExitCode.MISMATCH and "blk.1.ffn_down_exps.weight" in done.stdout
    report = json.loads(run_cli("verify", tmp_path / "out" / "m.base.gguf", "--json").stdout)
    assert report["ok"] is False and len(report["problems"]) == 1


def test_inspect_json_has_layers_types_bytes_and_fits(tmp_path: Path) -> None:
    moe = Moe(n_embd=256, n_ff=256, n_layer=3)
    source = moe.build().write(tmp_path / "m.gguf")
    run_cli("pair", source, "-o", tmp_path / "out", "--low", "q4_0")
    info = json.loads(run_cli("inspect", tmp_path / "out" / "m.base.gguf", "--json", "--memory", "4MiB").stdout)
    one_high, one_low = 3 * 256 * 256 * 2, 3 * 256 * 256 // 32 * 18
    assert info["kind"] == "pair" and info["n_expert"] == 4 and info["n_used"] == 2 and info["total_experts"] == 12
    assert info["expert_bytes"] == {"high F16": 12 * one_high, "low Q4_0": 12 * one_low}
    assert info["layers"][2]["copies"][1] == {
        "label": "low Q4_0",
        "types": {"gate": "Q4_0", "up": "Q4_0", "down": "Q4_0"},
        "expert_bytes": one_low,
        "layer_bytes": 4 * one_low,
        "reads": 3,
        "aligned": True,
    }
    (fit,) = info["fits"]
    assert fit["high F16"]["experts"] == (4 * 2**20 - info["base_bytes"]) // one_high
    assert fit["low Q4_0"]["experts"] == 12


def test_inspect_shows_a_sharded_and_a_dense_model(tmp_path: Path) -> None:
    shards = split(Moe().build(), tmp_path, "m", 3)
    done = run_cli("inspect", shards[1])
    assert done.returncode == 0 and all(p.name in done.stdout for p in shards)
    dense = Moe(n_layer=1, dense_first=True).build().write(tmp_path / "dense.gguf")
    done = run_cli("inspect", dense)
    assert done.returncode == 0 and "a dense model: no routed experts" in done.stdout


def test_sizes_and_rates() -> None:
    assert parse_size("24G") == 24 << 30
    assert parse_size("24GB") == 24 * 10**9
    assert parse_size("1.5 gib") == 3 << 29
    assert parse_size("100") == 100
    assert parse_rate("25GB/s") == 25e9
    assert parse_rate("800M") == 8e8
    for bad in ("", "G", "-1G", "1e3", "nan", "1 GBps", "1" * 30, "0"):
        with pytest.raises(ToolError) as error:
            parse_rate(bad)
        assert error.value.code == ExitCode.USAGE
    assert format_size(3 << 29) == "1.50 GiB" and format_size(12) == "12 B"
    assert format_rate(25e9) == "25.00 GB/s"


def test_messages_cannot_control_a_terminal() -> None:
    assert show("a\x1b[31mb\n\ud800") == "a\\x1b[31mb\\n\\ud800"
    assert "\x1b" not in str(ToolError("x\x1b[2J", file="f\x1b", tensor="t\n"))
