"""llama-server with expert caching: statistics over HTTP, parallel requests, the closing table."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conftest import BUILD, ROOT, clean_environment, program

HIGH = ROOT / "models/tiny-moe/tiny-moe-F16.gguf"
LOW = BUILD / "models/tiny-moe-Q4_0.gguf"


class Server:
    def __init__(self, port: int, process: subprocess.Popen[str]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.process = process
        self.log = ""

    def wait_until_ready(self) -> None:
        assert self.process.stderr is not None
        while "listening on http" not in self.log:
            line = self.process.stderr.readline()
            assert line, f"llama-server ended: {self.log}"
            self.log += line

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.load(answer)

    def complete(self, prompt: str, n: int) -> dict[str, Any]:
        body = {"prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True, "cache_prompt": True}
        request = urllib.request.Request(
            self.url + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            result: dict[str, Any] = json.load(answer)
            return result

    def stop(self) -> str:
        """Interrupts the server; returns everything it wrote."""
        self.process.send_signal(signal.SIGINT)
        _, rest = self.process.communicate(timeout=60)
        return self.log + rest


@contextmanager
def server(*options: object) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        program("llama-server"),
        "-m",
        HIGH,
        "--host",
        "127.0.0.1",
        "--port",
        port,
        "-c",
        2048,
        "-t",
        2,
        *options,
    ]
    process = subprocess.Popen(
        [str(c) for c in command],
        env=clean_environment(OMP_WAIT_POLICY="passive"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    running = Server(port, process)
    try:
        running.wait_until_ready()
        yield running
    finally:
        process.kill()


def test_statistics_over_http_add_up_and_the_table_comes_at_the_end() -> None:
    with server("--hobbit-low", LOW, "--hobbit-cache", "8MiB", "-np", 4) as running:
        assert running.get("/hobbit/stats")["steps"] == 0
        prompts = ["In the beginning", "And it came to pass", "To be, or not", "hacker /n./"]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            answers = list(pool.map(lambda prompt: running.complete(prompt, 24), prompts))
        stats = running.get("/hobbit/stats")
        total = stats["total"]
        assert total["lookups"] == total["hits"] + total["misses_high"] + total["misses_low"] + total["skips"]
        assert total["misses_low"] > 0
        evaluated = sum(a["timings"]["prompt_n"] + a["timings"]["predicted_n"] - 1 for a in answers)
        assert stats["prompt_tokens"] + stats["decode_tokens"] == evaluated

        again = running.complete(prompts[0], 24)
        assert again["timings"]["cache_n"] > 0
        assert running.get("/hobbit/stats")["steps"] > stats["steps"]
        written = running.stop()
    assert "hobbit: expert cache on\n" in written
    assert "hobbit: expert cache\n" in written.split("hobbit: expert cache on\n")[1]


def test_without_options_there_are_no_statistics() -> None:
    with server() as running:
        assert running.complete("In the beginning", 4)["content"]
        try:
            running.get("/hobbit/stats")
        except urllib.error.HTTPError as error:
            assert "--hobbit" in json.load(error)["error"]["message"]
        else:
            raise AssertionError("statistics without a cache")
        assert "hobbit: expert cache" not in running.stop()


def test_parallel_sequences_in_exact_mode_say_what_stock_says() -> None:
    """Four at once from a cache that evicts all the time, one after the other for a fixed batch shape."""
    prompts = ["In the beginning", "And it came to pass", "To be, or not", "The jargon of"]
    texts = []
    for options in ([], ["--hobbit-cache", "4MiB", "--hobbit-precision", "high"]):
        with server("--no-repack", "-np", 4, *options) as running:
            texts.append([running.complete(prompt, 32)["content"] for prompt in prompts])
    assert texts[0] == texts[1]


def test_a_missing_low_file_ends_the_server(tmp_path: Path) -> None:
    absent = tmp_path / "absent.gguf"
    done = subprocess.run(
        [str(program("llama-server")), "-m", str(HIGH), "--hobbit-low", str(absent)],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=60,
    )
    assert done.returncode != 0
    assert str(absent) in done.stderr
