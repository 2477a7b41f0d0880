"""llama-server with expert caching: statistics, metrics and resizing over HTTP, parallel requests, sleep, the table."""

from __future__ import annotations

import concurrent.futures
import json
import re
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import BUILD, ROOT, clean_environment, finish, program

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

    def post(self, path: str, body: object, **headers: str) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def complete(self, prompt: str, n: int, **more: object) -> dict[str, Any]:
        body = {"prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True, "cache_prompt": True, **more}
        result: dict[str, Any] = self.post("/completion", body)
        return result

    def refused(self, path: str, body: object, **headers: str) -> tuple[int, str]:
        """Status and message of a POST that is not answered with 200."""
        try:
            self.post(path, body, **headers)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]["message"]
        raise AssertionError(f"POST {path} {body} was not refused")

    def stop(self) -> str:
        """Interrupts the server; returns everything it wrote."""
        self.process.send_signal(signal.SIGINT)
        _, rest = self.process.communicate(timeout=60)
        return self.log + rest


@contextmanager
def server(*options: object, model: Path | None = HIGH) -> Iterator[Server]:
    """llama-server with the embedded model; without a model it is a router."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        program("llama-server"),
        *(("-m", model) if model else ()),
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
    with server("--hobbit-low", LOW, "--hobbit-precision", "paper", "--hobbit-cache", "8MiB", "-np", 4) as running:
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

        # each request has its own numbers, and together they are the cache's
        own = [a["timings"]["hobbit"] for a in answers]
        for name in own[0].keys() - {"shared"}:
            assert sum(counts[name] for counts in own) == total[name], name
        assert all(counts["lookups"] > 0 for counts in own)

        again = running.complete(prompts[0], 24)
        assert again["timings"]["cache_n"] > 0
        later = running.get("/hobbit/stats")
        assert later["steps"] > stats["steps"]
        alone = again["timings"]["hobbit"]
        assert alone["lookups"] == later["total"]["lookups"] - total["lookups"]
        assert alone["shared"] == 0
        written = running.stop()
    assert "hobbit: expert cache on\n" in written
    assert "hobbit: expert cache\n" in written.split("hobbit: expert cache on\n")[1]


def test_several_completions_of_one_prompt_add_up() -> None:
    with server("--hobbit-low", LOW, "--hobbit-cache", "8MiB", "-np", 4) as running:
        answers = running.post(
            "/completion", {"prompt": "In the beginning", "n_predict": 16, "n_cmpl": 3, "ignore_eos": True, "seed": 1}
        )
        assert len(answers) == 3
        total = running.get("/hobbit/stats")["total"]
        own = [answer["timings"]["hobbit"] for answer in answers]
        assert all(counts["lookups"] > 0 for counts in own)
        assert any(counts["shared"] > 0 for counts in own)  # they run in the same steps
        for name in own[0].keys() - {"shared"}:
            assert sum(counts[name] for counts in own) == total[name], name

        # OpenAI's format has one answer with several choices, and the numbers of all
        body = {"messages": [{"role": "user", "content": "Who art thou?"}], "n": 3, "max_tokens": 12, "seed": 2}
        for path, prompt in (("/v1/chat/completions", body), ("/v1/completions", {**body, "prompt": "And it came"})):
            answer = running.post(path, prompt)
            assert len(answer["choices"]) == 3
            later = running.get("/hobbit/stats")["total"]
            for name in answer["timings"]["hobbit"].keys() - {"shared"}:
                assert answer["timings"]["hobbit"][name] == later[name] - total[name], (path, name)
            total = later


def test_a_router_passes_our_options_and_requests_to_its_models(tmp_path: Path) -> None:
    (tmp_path / "one.gguf").symlink_to(HIGH)
    (tmp_path / "other.gguf").symlink_to(HIGH)
    options = ("--models-dir", tmp_path, "--hobbit-low", LOW, "--hobbit-cache", "8MiB", "--metrics")
    with server(*options, model=None) as running:
        for n, name in ((8, "one"), (16, "other")):
            answer = running.complete("In the beginning", n, model=name)
            assert answer["timings"]["hobbit"]["lookups"] > 0
            stats = running.get(f"/hobbit/stats?model={name}")
            assert stats["decode_tokens"] == n - 1
            assert stats["total"]["lookups"] == answer["timings"]["hobbit"]["lookups"]
            with urllib.request.urlopen(f"{running.url}/metrics?model={name}", timeout=60) as metrics:
                found = samples(metrics.read().decode())
            assert found["hobbit_lookups_total"] == stats["total"]["lookups"]

        before = running.get("/hobbit/stats?model=other")["cache_bytes"]
        after = running.post("/hobbit/cache", {"model": "one", "cache": "16MiB"})["cache_bytes"]
        assert after > before
        assert running.get("/hobbit/stats?model=one")["cache_bytes"] == after
        assert running.get("/hobbit/stats?model=other")["cache_bytes"] == before
        code, message = running.refused("/hobbit/cache", {"model": "one", "cache": "1KiB"})
        assert code == 400 and "the smallest setting that works" in message
        code, message = running.refused("/hobbit/cache", {"model": "third", "cache": "16MiB"})
        assert code == 400 and "third" in message
        with urllib.request.urlopen(running.url + "/hobbit", timeout=60) as page:
            assert b"<!doctype html>" in page.read(200).lower()
        running.stop()


def test_without_options_there_are_no_statistics() -> None:
    with server() as running:
        assert running.complete("In the beginning", 4)["content"]
        try:
            running.get("/hobbit/stats")
        except urllib.error.HTTPError as error:
            assert "--hobbit" in json.load(error)["error"]["message"]
        else:
            raise AssertionError("statistics without a cache")
        assert running.refused("/hobbit/cache", {"cache": "8MiB"})[0] == 501
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
    done = finish(program("llama-server"), "-m", HIGH, "--hobbit-low", absent, timeout=60)
    assert done.returncode != 0
    assert str(absent) in done.stderr


def test_a_resize_during_a_generation_changes_no_token() -> None:
    options = ("--hobbit-low", LOW, "--hobbit-cache", "4MiB", "--hobbit-deterministic", "-np", 1, "--api-key", "secret")
    key = {"Authorization": "Bearer secret"}
    with server(*options) as running, concurrent.futures.ThreadPoolExecutor() as pool:
        body = {
            "prompt": "In the beginning",
            "n_predict": 200,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        expected = running.post("/completion", body, **key)["content"]
        sizes = set()
        answer = pool.submit(running.post, "/completion", body, **key)
        for cache in ("16MiB", "5MiB", 32, "4MiB"):
            result = running.post("/hobbit/cache", {"cache": cache}, **key)
            assert result["resident_high"] <= result["slots_high"]
            sizes.add(result["cache_bytes"])
        assert not answer.done(), "the resizes came too late to be in the middle"
        assert answer.result()["content"] == expected
        assert len(sizes) == 4

        code, message = running.refused("/hobbit/cache", {"cache": "100KiB"}, **key)
        smallest = re.search(r"the smallest setting that works is --hobbit-cache (\d+KiB)", message)
        assert code == 400 and smallest, message
        assert (
            running.post("/hobbit/cache", {"cache": smallest[1]}, **key)["cache_bytes"] <= int(smallest[1][:-3]) * 1024
        )
        assert running.post("/completion", body, **key)["content"] == expected

        assert running.refused("/hobbit/cache", {"cache": "8 apples"}, **key)[0] == 400
        for nonsense in ({}, {"cache": None}, {"size": "8MiB"}, [], "8MiB"):
            code, message = running.refused("/hobbit/cache", nonsense, **key)
            assert code == 400 and '{"cache": "64MiB"}' in message
        assert running.refused("/hobbit/cache", {"cache": "8MiB"})[0] == 401


def samples(text: str) -> dict[str, float]:
    """Metrics by name and labels; what Prometheus refuses is an assertion."""
    kinds: dict[str, str] = {}
    helped: set[str] = set()
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            helped.add(line.split()[2])
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name in helped and name not in kinds, line
            kinds[name] = kind
        else:
            matched = re.fullmatch(r'([a-z_:]+)(\{[a-z]+="[a-z]+"\})? (\S+)', line)
            assert matched, line
            assert matched[1] in kinds, f"no TYPE before {line}"
            assert matched[1] + (matched[2] or "") not in found, f"twice: {line}"
            found[matched[1] + (matched[2] or "")] = float(matched[3])
    for name, kind in kinds.items():
        if name.startswith("hobbit_"):
            assert (kind == "counter") == name.endswith("_total"), name
    return found


def test_metrics_are_the_statistics_in_the_format_of_prometheus() -> None:
    with server("--hobbit-low", LOW, "--hobbit-cache", "8MiB", "--metrics") as running:
        running.complete("In the beginning", 24)
        stats = running.get("/hobbit/stats")
        with urllib.request.urlopen(running.url + "/metrics", timeout=60) as answer:
            found = samples(answer.read().decode())
        for name, value in stats["total"].items():
            if name == "stall_us":
                assert found["hobbit_stall_seconds_total"] == pytest.approx(value / 1e6)
            else:
                assert found[f"hobbit_{name}_total"] == value
        assert found['hobbit_tokens_total{phase="decode"}'] == stats["decode_tokens"] == 23
        assert found['hobbit_resident_experts{precision="low"}'] == stats["resident_low"]
        assert found["hobbit_cache_bytes"] == stats["cache_bytes"]


def test_statistics_of_a_sleeping_model_are_its_last_and_do_not_wake_it() -> None:
    """The model is unloaded while it sleeps; asking all the time must neither crash nor keep it awake."""
    options = ("--hobbit-cache", "4MiB", "--metrics", "--sleep-idle-seconds", 1)
    with server(*options) as running, concurrent.futures.ThreadPoolExecutor() as pool:
        text = running.complete("In the beginning", 8)["content"]
        resized = running.post("/hobbit/cache", {"cache": "12MiB"})["cache_bytes"]
        last = running.get("/hobbit/stats")
        asking = threading.Event()
        asking.set()

        def ask() -> int:
            n = 0
            while asking.is_set():
                running.get("/hobbit/stats")
                n += 1
            return n

        askers = [pool.submit(ask) for _ in range(2)]
        while not running.get("/props")["is_sleeping"]:
            pass
        asleep = running.get("/hobbit/stats")
        assert asleep.pop("sleeping") is True
        assert asleep["total"] == last["total"]
        with urllib.request.urlopen(running.url + "/metrics", timeout=60) as answer:
            assert samples(answer.read().decode())["hobbit_lookups_total"] == last["total"]["lookups"]
        assert running.get("/props")["is_sleeping"]

        assert running.complete("In the beginning", 8)["content"] == text
        asking.clear()
        assert all(asker.result() > 0 for asker in askers)
        awake = running.get("/hobbit/stats")
        assert "sleeping" not in awake
        assert awake["cache_bytes"] == resized
