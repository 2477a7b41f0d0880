"""The command `hobbit`, against the embedded model, a real llama-server, and a small server that counts."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from hobbit_models import PROMPT, ROOT, SMALL, example, high, hobbit, low, run_hobbit
from typer.testing import CliRunner

from hobbit_py import CacheStats, top
from hobbit_py.cli import app


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)))


#
# run
#


def test_run_prints_what_the_class_generates(tmp_path: Path) -> None:
    options = ("--low", low(), "--cache", SMALL, "--deterministic", "--temp", 0, "--threads", 1)
    done = run_hobbit("run", high(), *options, "-p", PROMPT, "-n", 16, "--stats", tmp_path / "s.json")
    assert done.returncode == 0, done.stderr
    with hobbit(low=low(), deterministic=True) as model:
        assert done.stdout == model.create_completion(PROMPT, max_tokens=16, temperature=0)["choices"][0]["text"] + "\n"
    assert re.search(r"15 tokens, [\d.]+ tok/s; hit rate [\d.]+ %", done.stderr)
    saved = CacheStats.load(tmp_path / "s.json")
    assert saved.decode_tokens == 15
    assert saved.resident is not None
    assert sum(row.count("2") for row in saved.resident) == saved.resident_high


def test_run_chats_line_by_line() -> None:
    done = run_hobbit("run", high(), "--cache", SMALL, "-n", 8, stdin="Who art thou?\n\nAnd whence?\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("hit rate") == 2


def test_run_shows_a_status_line_on_a_terminal() -> None:
    master, slave = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "hobbit_py",
        "run",
        high(),
        "--cache",
        SMALL,
        "-p",
        PROMPT,
        "-n",
        "600",
        "-c",
        "1024",
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "24"}
    process = subprocess.Popen([*command, "--temp", "1"], stdout=slave, stderr=slave, stdin=slave, env=env)
    os.close(slave)
    output = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while piece := os.read(master, 65536):
            output += piece
    os.close(master)
    text = output.decode("utf-8", errors="replace")
    assert process.wait() == 0, text
    assert "\x1b[1;23r" in text and "\x1b[r" in text  # a scroll region, and its end
    assert re.search(r"\x1b\[24;1H\x1b\[2K\x1b\[7m[\d.]+ tok/s   hit rate [\d.]+ %   read [\d.]+ MB/s", text)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("run", "nowhere.gguf", "-p", "x"), 1, "hobbit: Model path does not exist: nowhere.gguf"),
        (("run", "MODEL", "--cache", "1KiB", "-p", "x"), 1, "smallest setting that works"),
        (("run", "MODEL", "--t1", "7", "-p", "x"), 1, "0 to 1"),
        (("run", "MODEL", "--set", "foo=1", "-p", "x"), 2, "io-threads"),
        (("stats", "nowhere.json"), 1, "hobbit: nowhere.json: No such file or directory"),
        (("plot", "nowhere.json", "-o", "x.png"), 1, "nowhere.json"),
        (("serve", "MODEL", "--policy", "fifo"), 1, "hobbit, lru, lfu, lfu-model, lhu"),
        (("top", "http://127.0.0.1:1"), 1, "refused"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(arguments: tuple[str, ...], code: int, says: str) -> None:
    done = run_hobbit(*(high() if a == "MODEL" else a for a in arguments))
    assert done.returncode == code
    assert says in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


#
# bench, stats, plot
#


def test_bench_shows_what_llama_bench_measures(tmp_path: Path) -> None:
    sizes = ("--cache", f"{SMALL},64MiB", "--policy", "lru,lfu", "--low", low(), "--json", tmp_path / "b.json")
    done = run_hobbit("bench", high(), *sizes, "-p", 8, "-n", 4, "-r", 2, "-t", 1)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "b.json").read_text())
    caches = [(row["hobbit_cache"], row["hobbit_policy"]) for row in rows if row["n_gen"]]
    assert caches == [("off", "")] + [(size, policy) for size in (SMALL, "64MiB") for policy in ("lru", "lfu")]
    assert all(len(row["samples_ts"]) == 2 and row["n_threads"] == 1 for row in rows)
    small, large = (next(r for r in rows if r["hobbit_cache"] == size and r["n_gen"]) for size in (SMALL, "64MiB"))
    assert small["hobbit_cache_bytes"] < large["hobbit_cache_bytes"]

    head, *lines = (line.split() for line in done.stdout.strip().splitlines())
    assert head[:4] == ["cache", "policy", "test", "tok/s"]
    assert lines[0][:2] == ["stock", "pp8"] and len(lines) == len(rows)
    shown = next(line for line in lines if line[:3] == [SMALL, "lru", "tg4"])
    stock = next(row for row in rows if row["hobbit_cache"] == "off" and row["n_gen"])
    assert shown[3:7] == [
        f"{small['avg_ts']:.2f}",
        "±",
        f"{small['stddev_ts']:.2f}",
        f"{small['avg_ts'] / stock['avg_ts']:.2f}",
    ]
    assert f"{100 * small['hobbit_hit_rate']:.1f}" in shown

    done = run_hobbit("bench", high(), "--no-stock", "--cache", SMALL, "-p", 0, "-n", 4, "-r", 1, "-o", "csv")
    assert done.stdout.startswith("build_commit,") and len(done.stdout.splitlines()) == 2


def test_bench_fails_with_the_reason_and_code_of_llama_bench() -> None:
    for options, says in (
        (("--cache", "1KiB"), "smallest setting that works"),
        (("--no-such",), "argument: --no-such\n"),
    ):
        done = run_hobbit("bench", high(), "--no-stock", *options, "-p", 0, "-n", 4, "-r", 1)
        assert done.returncode != 0
        assert says in done.stderr and "Traceback" not in done.stderr and "hobbit:" not in done.stderr


def test_plan_is_that_of_gguf_tools() -> None:
    done = run_hobbit("plan", high(), "--ram", "1G", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert "--vram" in run_hobbit("plan", "--help").stdout
    assert run_hobbit("plan", "nowhere.gguf", "--ram", "1G").returncode != 0


def test_stats_shows_a_file(tmp_path: Path) -> None:
    example().save(tmp_path / "s.json")
    done = invoke("stats", tmp_path / "s.json")
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.output.splitlines()]
    assert ["all", "33", "54.5", "%"] in [line[:4] for line in lines]
    assert "11 of 12 high" in done.output


def test_plot_draws_statistics_traces_and_benches(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with hobbit(low=low()) as model:
        with model.trace(tmp_path / "run.trace"):
            model.create_completion(PROMPT, max_tokens=8)
        model.save_stats(tmp_path / "s.json")
        model.cache_stats().save(tmp_path / "without-residency.json")
    sizes = ("--cache", f"{SMALL},64MiB", "--low", low())
    done = run_hobbit("bench", high(), *sizes, "-p", 8, "-n", 4, "-r", 1, "-t", 1, "--json", tmp_path / "b.json")
    assert done.returncode == 0, done.stderr
    pictures = set()
    for name in ("s.json", "without-residency.json", "run.trace", "b.json"):
        done = invoke("plot", tmp_path / name, "-o", tmp_path / f"{name}.png")
        assert done.exit_code == 0, done.output
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        pictures.add((tmp_path / f"{name}.png").read_bytes())
    assert len(pictures) == 3  # cache_stats() has residency too


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"[]", b"hobbit-trace 9\n\n", b"\x00\x01"])
def test_plot_refuses_other_files_by_name(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "other").write_bytes(content)
    done = run_hobbit("plot", tmp_path / "other", "-o", tmp_path / "out.png")
    assert done.returncode == 1 and done.stderr.startswith(f"hobbit: {tmp_path / 'other'}: "), done.stderr
    assert not (tmp_path / "out.png").exists()


#
# serve
#


@contextlib.contextmanager
def serving(*options: object) -> Iterator[str]:
    """The address of `hobbit serve` on the embedded model, which says when it is ready. Leaving waits for its end."""
    command = [sys.executable, "-m", "hobbit_py", "serve", high(), "--low", low(), "--cache", SMALL, *map(str, options)]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", "0", "--api-key", "secret", "-t", "1"],
        stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    lines = []
    address = None
    for line in process.stdout:
        lines.append(line)
        if found := re.search(r"listening on (http://\S+)", line):
            address = found[1]
            break
    assert address, "".join(lines)
    drain = threading.Thread(target=process.stdout.read)
    drain.start()
    try:
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
        drain.join()


def post(address: str, path: str, body: dict[str, Any]) -> Any:
    headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    request = urllib.request.Request(address + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


def test_serve_answers_as_the_class_does() -> None:
    options = ("--deterministic", "--set", "io-threads=2", "-c", 256, "--flash-attn", "off", "--no-repack")
    with serving(*options) as address, hobbit(low=low(), deterministic=True) as model:
        answer = post(address, "/v1/completions", {"prompt": PROMPT, "max_tokens": 24, "temperature": 0})
        expected = model.create_completion(PROMPT, max_tokens=24, temperature=0)
        assert answer["choices"][0]["text"] == expected["choices"][0]["text"]


def test_the_openai_client_works_and_the_statistics_add_up() -> None:
    openai = pytest.importorskip("openai")
    evaluated: list[int] = []
    own: list[dict[str, int]] = []  # the cache's numbers of each request

    def count(timings: dict[str, Any]) -> None:
        evaluated.append(timings["prompt_n"] + timings["predicted_n"] - 1)  # the last token is not evaluated
        own.append(timings["hobbit"])

    with serving("-c", 1024, "--parallel", 4) as address:
        before = top.fetch(address, "secret")
        client = openai.OpenAI(base_url=address + "/v1", api_key="secret")

        def complete(i: int) -> None:
            answer = client.completions.create(model="m", prompt=f"{i} {PROMPT}", max_tokens=8 + i)
            assert answer.usage.completion_tokens == 8 + i
            count(answer.timings)

        complete(0)
        answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}], max_tokens=8)
        assert answer.choices[0].message.role == "assistant"
        count(answer.timings)
        chunks = list(
            client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "Who art thou?"}], max_tokens=8, stream=True
            )
        )
        assert len(chunks) >= 8
        count(chunks[-1].timings)
        threads = [threading.Thread(target=complete, args=(i,)) for i in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(evaluated) == 7
        delta = top.fetch(address, "secret") - before
        assert delta.prompt_tokens + delta.decode_tokens == sum(evaluated)
        for name in own[0].keys() - {"shared"}:
            assert getattr(delta.total, name) == sum(counts[name] for counts in own), name
        assert delta.total.hits + delta.total.misses + delta.total.skips == delta.total.lookups > 0
        assert f"of {delta.slots_high} slots" in show(address, api_key="secret")
        with pytest.raises(top.ServerError, match="401"):
            top.fetch(address, None)
    with pytest.raises(openai.APIConnectionError):
        client.models.list()


#
# top
#


class Counting(BaseHTTPRequestHandler):
    """A server whose statistics double with every request; it wants the API key that its server names."""

    def do_GET(self) -> None:
        server: Any = self.server
        if server.api_key and self.headers["Authorization"] != f"Bearer {server.api_key}":
            self.send_error(401)
        elif self.path != "/hobbit/stats" or server.stock:
            self.send_error(404)
        else:
            server.scale += server.step
            body = json.dumps({**example(server.scale, layers=8).to_dict(), "resident": ["0120"] * 8}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def counting() -> Iterator[Any]:
    server: Any = HTTPServer(("127.0.0.1", 0), Counting)
    server.api_key, server.stock, server.scale, server.step = None, False, 0, 1
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def show(url: str, *, height: int = 40, terminal: bool = False, count: int = 1, **options: Any) -> str:
    """What `top` draws, with a clock that does not wait."""
    from rich.console import Console

    console = Console(width=120, height=height, force_terminal=terminal, record=True, file=open(os.devnull, "w"))
    top.watch(url, api_key=options.get("api_key"), interval_s=1.0, count=count, console=console, wait=lambda _: None)
    return console.export_text()


def test_top_shows_rates_between_two_readings(counting: Any) -> None:
    text = show(counting.url)
    delta = example(2, layers=8) - example(1, layers=8)
    assert f"hit {100 * delta.total.hit_rate:5.1f} %" in text
    assert "11 of 12 slots" in text and "precision hobbit" in text
    rows = [line.split() for line in text.splitlines()]
    for layer in delta.layers:
        assert [str(layer.block), f"{100 * layer.hit_rate:.0f}", "%"] in [row[:3] for row in rows]
    assert "·▪■·" in text


def test_top_shows_the_layers_that_stall_when_not_all_fit(counting: Any) -> None:
    text = show(counting.url, height=12, terminal=True)
    shown = [line.split()[0] for line in text.splitlines() if "+" in line and "/s" not in line and "tokens" not in line]
    assert shown and shown[-1] == "8" and "more" in text


def test_top_survives_a_restart_of_the_server(counting: Any) -> None:
    counting.scale, counting.step = 9, -4
    assert "hit" in show(counting.url)


def test_top_wants_a_server_of_ours_and_its_key(counting: Any) -> None:
    counting.api_key = "secret"
    with pytest.raises(top.ServerError, match="401: it wants an API key"):
        show(counting.url)
    assert "hit" in show(counting.url, api_key="secret")
    counting.stock = True
    with pytest.raises(top.ServerError, match=r"404: it has no such page"):
        show(counting.url, api_key="secret")


def test_top_is_a_command(counting: Any) -> None:
    done = invoke("top", counting.url, "--interval", "0.05", "--count", "2")
    assert done.exit_code == 0, done.output
    assert done.output.count("precision hobbit") == 2
