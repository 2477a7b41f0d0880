"""The engine's options in upstream's programs: help, load block, closing table, statistics file, interruption."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest
from conftest import BUILD, ROOT, clean_environment, finish, program

HIGH = ROOT / "models/tiny-moe/tiny-moe-F16.gguf"
LOW = BUILD / "models/tiny-moe-Q4_0.gguf"
TEXT = ROOT / "models/tiny-moe/heldout.txt"
SMALL = ["--hobbit-low", LOW, "--hobbit-cache", "8MiB"]


def command(tool: str, *options: object) -> list[str]:
    return [str(program(tool)), "-m", str(HIGH), *map(str, options)]


def run(tool: str, *options: object) -> subprocess.CompletedProcess[str]:
    done = finish(*command(tool, *options))
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.mark.parametrize("tool", ["llama-cli", "llama-completion", "llama-server", "llama-perplexity"])
def test_help_has_a_section_for_the_engines_options(tool: str) -> None:
    text = run(tool, "--help").stdout
    section = text.split("----- expert caching params -----")[1].split("-----")[0]
    for option in ("--hobbit-cache SIZE", "--hobbit-low FILE", "--hobbit-precision RULE", "--hobbit-deterministic"):
        assert option in section
    assert "(env: LLAMA_ARG_HOBBIT_CACHE)" in section
    assert "--hobbit" not in text.split("----- expert caching params -----")[0]


def test_every_documented_option_exists_and_the_other_way_round() -> None:
    offered = set(re.findall(r"--hobbit-[a-z0-9-]+", run("llama-cli", "--help").stdout))
    documented = set(re.findall(r"^\| `(--hobbit-[a-z0-9-]+)`", (ROOT / "docs/options.md").read_text(), re.MULTILINE))
    assert offered == documented


def test_cli_says_what_will_happen_and_what_did() -> None:
    done = run("llama-cli", *SMALL, "-st", "-p", "In the beginning", "-n", 32, "--temp", 0)
    for line in ("high ", "low ", "q4_0", "precision  hobbit, T1 0.6, T2 1", "policy     hobbit"):
        assert line in done.stderr
    for line in ("prompt", "decode", "hit rate", "misses", "skips", "bytes read", "stall time", "evictions"):
        assert re.search(rf"^  {line} ", done.stderr, re.MULTILINE), line


def test_statistics_add_up(tmp_path: Path) -> None:
    file = tmp_path / "stats.json"
    run(
        "llama-completion",
        *SMALL,
        "--hobbit-precision",
        "paper",
        "-no-cnv",
        "-p",
        "In the beginning",
        "-n",
        40,
        "--ignore-eos",
        "--hobbit-stats",
        file,
    )
    stats = json.loads(file.read_text())
    total = stats["total"]
    assert list(tmp_path.iterdir()) == [file]
    assert stats["decode_tokens"] == 39  # the first generated token comes from the prompt
    for layer in [total, *stats["layers"]]:
        assert layer["lookups"] == layer["hits"] + layer["misses_high"] + layer["misses_low"] + layer["skips"]
    for counter in total:
        assert total[counter] == sum(layer[counter] for layer in stats["layers"])
    selections = total["selected_high"] + total["selected_low"] + total["selected_skip"]
    # top-4 in six layers; the last one sees only the prompt's last token
    assert selections == 4 * (6 * stats["decode_tokens"] + 5 * stats["prompt_tokens"] + 1)
    assert total["misses_low"] > 0
    assert 0 < total["hits"] < total["lookups"]
    # bytes follow from misses: three F16 matrices of 256 x 256, and their Q4_0 copies at 18 bytes per 32 values
    assert total["read_bytes_high"] == total["misses_high"] * 3 * 256 * 256 * 2
    assert total["read_bytes_low"] == total["misses_low"] * 3 * 256 * 256 * 18 // 32


def test_a_profile_makes_the_next_start_warm(tmp_path: Path) -> None:
    profile = tmp_path / "tiny.profile"
    # room for most of what so few tokens touch: the first run misses each of them once
    options = ["--hobbit-low", LOW, "--hobbit-cache", "24MiB", "--hobbit-prefetch", "off", "--no-warmup"]
    options += ["-no-cnv", "-p", "In the beginning", "-n", 12, "--temp", 0]
    misses = []
    for name in ("cold", "warm"):
        done = run("llama-completion", *options, "--hobbit-profile", profile, "--hobbit-stats", tmp_path / name)
        total = json.loads((tmp_path / name).read_text())["total"]
        misses.append(total["misses_high"] + total["misses_low"])
    assert "experts from" in done.stderr.split("warm start")[1].split("\n")[0]
    assert misses[1] < misses[0]

    # another model's profile is neither used nor lost
    before = "hobbit-profile 1 olmoe 2 8 1 1\nhigh 0 0\n"
    profile.write_text(before)
    assert "left alone" in run("llama-completion", *options, "--hobbit-profile", profile).stderr
    assert profile.read_text() == before


def test_a_warm_start_that_does_not_help_is_dropped(tmp_path: Path) -> None:
    """The same text again: what was resident at its end helps, what was not does not."""
    profile = tmp_path / "tiny.profile"
    options = ["--hobbit-cache", "26MiB", "--hobbit-prefetch", "off", "--no-warmup", "--hobbit-profile", profile]
    options += ["-no-cnv", "-p", "In the beginning", "-n", 40, "--temp", 0, "--ignore-eos"]
    run("llama-completion", *options)
    head, *resident = profile.read_text().splitlines()
    others = {f"high {layer} {expert}" for layer in range(6) for expert in range(16)} - set(resident)

    for experts, verdict in ((resident, "kept"), (sorted(others), "dropped")):
        profile.write_text("\n".join([head, *experts]) + "\n")
        run("llama-completion", *options, "--hobbit-stats", tmp_path / "stats")
        assert f"{verdict} after the first tokens" in json.loads((tmp_path / "stats").read_text())["warm_start"]


def test_warm_up_does_not_count(tmp_path: Path) -> None:
    files = [tmp_path / "with.json", tmp_path / "without.json"]
    for file, option in zip(files, (["--warmup"], ["--no-warmup"]), strict=True):
        run("llama-completion", *SMALL, *option, "-no-cnv", "-p", "In the", "-n", 4, "--hobbit-stats", file)
    stats = [json.loads(file.read_text()) for file in files]
    assert stats[0]["steps"] == stats[1]["steps"]
    assert stats[0]["total"]["lookups"] == stats[1]["total"]["lookups"]


@pytest.mark.parametrize(
    ("tool", "options"),
    [
        ("llama-cli", ["-st", "-p", "In the beginning", "-n", 100000, "-c", 1024, "--context-shift", "--ignore-eos"]),
        (
            "llama-completion",
            ["-no-cnv", "-p", "In the beginning", "-n", 100000, "-c", 1024, "--context-shift", "--ignore-eos"],
        ),
        ("llama-perplexity", ["-f", TEXT, "-c", 256]),
    ],
)
def test_interrupted_programs_still_print_the_table(tool: str, options: list[object]) -> None:
    process = subprocess.Popen(
        command(tool, *SMALL, *options),
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    assert process.stderr is not None and process.stdout is not None
    try:
        # perplexity prints its first result, the others the prompt and then what they generate
        started = r"\[2\]" if tool == "llama-perplexity" else r"In the beginning[\s\S]{20}"
        seen = ""
        while not re.search(started, seen):
            char = process.stdout.read(1)
            assert char, f"{tool} ended by itself: {seen}"
            seen += char
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "hobbit: expert cache\n" in err
    assert re.search(r"^  hit rate ", err, re.MULTILINE)


def bench(*options: object) -> list[dict[str, object]]:
    done = run("llama-bench", "-p", 0, "-n", 4, "-r", 1, "-t", 2, "-o", "json", *options)
    rows: list[dict[str, object]] = json.loads(done.stdout)
    return rows


def test_bench_takes_lists_and_reports_what_the_cache_did() -> None:
    rows = bench(
        "--hobbit-cache", "off,6MiB", "--hobbit-low", LOW, "--hobbit-policy", "lru,lfu", "--hobbit-prefetch", 0
    )
    settings = [(row["hobbit_cache"], row["hobbit_policy"], row["hobbit_prefetch"]) for row in rows]
    assert settings == [("off", "", ""), ("6MiB", "lru", "0"), ("6MiB", "lfu", "0")]
    assert rows[0]["hobbit_hit_rate"] is None and rows[0]["hobbit_bytes_per_token"] is None
    for row in rows[1:]:
        assert 0 < row["hobbit_hit_rate"] < 1 and row["hobbit_bytes_per_token"] > 0 and row["hobbit_stall_share"] >= 0
    lists = (
        ("precision", "high,low"),
        ("t1", "0.5,0.6"),
        ("t2", "0.9,1"),
        ("weights", "1/0/0/0,0/1/0/0"),
        ("check", "0,1"),
    )
    for name, values in lists:
        rows = bench("--hobbit-cache", "4MiB", "--hobbit-low", LOW, f"--hobbit-{name}", values)
        assert [str(row[f"hobbit_{name}"]).replace(",", "/") for row in rows] == values.split(",")


def test_bench_without_our_options_has_upstreams_fields_only() -> None:
    (row,) = bench()
    assert row.keys() and not [name for name in row if "hobbit" in name]


def test_bench_says_why_a_cache_will_not_do() -> None:
    for options, why in (
        (("--hobbit-cache", "4KiB"), r"the smallest setting that works is --hobbit-cache \d+KiB"),
        (("--hobbit-policy", "lru,best"), "--hobbit-policy"),
        (("--hobbit-cash", "4MiB"), "no option --hobbit-cash"),
    ):
        done = finish(*command("llama-bench", "-p", 0, "-n", 4, *options))
        assert done.returncode == 1 and re.search(why, done.stderr), done.stderr
