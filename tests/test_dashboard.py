"""The page at /hobbit, in a headless Chromium, against /hobbit/stats of the same server.

HOBBIT_SCREENSHOTS names a folder for pictures of it.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, find_chromium
from test_server import LOW, Server, server

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium here: apt-get install chromium")

NUMBERS = """({
    totals: Object.fromEntries(
        [...document.querySelectorAll("#totals td")].map((td) => [td.id.slice(6), td.textContent])),
    resident: ["n-high", "n-low", "n-none"].map((id) => document.getElementById(id).textContent),
    state: document.getElementById("state").textContent.trim(),
    tps: parseFloat(document.getElementById("tps").textContent),
    hit: document.getElementById("hit").textContent,
    mix: document.getElementById("mix-all-text").textContent,
    layers: [...document.querySelectorAll("#layers tbody tr")].map((tr) => tr.children[0].textContent),
})"""
COUNTS = ("lookups", "hits", "misses_high", "misses_low", "skips", "evictions", "streamed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_chromium()
    assert program is not None
    with Browser(program) as running:
        yield running


def shown(browser: Browser) -> dict[str, Any]:
    """What stands on the page now; integers where the page groups thousands with commas."""
    page: dict[str, Any] = browser.evaluate(NUMBERS)
    page["totals"] = {
        name: int(text.replace(",", "")) if text.replace(",", "").isdigit() else text
        for name, text in page["totals"].items()
    }
    return page


def wait_for(browser: Browser, condition: str) -> None:
    """Returns when a script's condition holds on the page."""
    script = (
        f"new Promise((done) => {{ (function look() {{ {condition} ? done() : requestAnimationFrame(look); }})(); }})"
    )
    browser.evaluate(script)


def pictures(browser: Browser) -> None:
    folder = os.environ.get("HOBBIT_SCREENSHOTS")
    looks: dict[str, dict[str, Any]] = {"light": {}, "dark": {"dark": True}, "phone": {"width": 390, "height": 844}}
    for name, look in looks.items() if folder else ():
        browser.look(**look)
        browser.evaluate("window.seen = last")
        wait_for(browser, "last !== window.seen")  # drawn with the new colours
        browser.screenshot(Path(folder or "") / f"{name}.png")
    browser.look()


def steps_shown(running: Server) -> str:
    """A condition: the page has caught up with the server."""
    return f"last && last.stats.steps === {running.get('/hobbit/stats')['steps']}"


def test_the_page_shows_the_servers_numbers_during_a_generation_and_after_it(browser: Browser) -> None:
    with (
        server("--hobbit-low", LOW, "--hobbit-precision", "paper", "--hobbit-cache", "8MiB") as running,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        browser.open(running.url + "/hobbit?interval=100")
        wait_for(browser, "last")
        assert shown(browser)["totals"]["lookups"] == 0
        answer = pool.submit(running.complete, "In the beginning", 1000)

        readings = []
        while not answer.done():
            seen = shown(browser)["totals"]["steps"]
            wait_for(browser, f'last.stats.steps > {seen} || document.getElementById("state").textContent === "idle"')
            before = readings[-1][0]["totals"] if readings else {name: 0 for name in COUNTS}
            page = shown(browser)
            after = running.get("/hobbit/stats")
            for name in COUNTS:
                assert before[name] <= page["totals"][name] <= after["total"][name]
            readings.append((page, after))
            if page["state"] == "generating" and [p["state"] for p, _ in readings].count("generating") == 15:
                pictures(browser)
        busy = [page for page, _ in readings if page["state"] == "generating"]
        assert len(busy) > 3
        assert all(page["tps"] > 0 and page["hit"].endswith("%") for page in busy[1:])

        stats = running.get("/hobbit/stats")
        wait_for(browser, steps_shown(running))
        page = shown(browser)
        for name in COUNTS:
            assert page["totals"][name] == stats["total"][name], name
        assert (
            page["totals"]["decode_tokens"] == stats["decode_tokens"] == answer.result()["timings"]["predicted_n"] - 1
        )
        origins = browser.evaluate(
            "[...new Set(performance.getEntriesByType('resource').map((r) => new URL(r.name).origin))]"
        )
        assert origins == [running.url], "the page asked somebody else"
        digits = "".join(stats["resident"])
        assert [int(n) for n in page["resident"]] == [digits.count("2"), digits.count("1"), digits.count("0")]
        assert page["layers"] == [str(layer["block"]) for layer in stats["layers"]]
        selected = [stats["total"][f"selected_{p}"] for p in ("high", "low", "skip")]
        assert page["mix"] == " · ".join(f"{100 * n / sum(selected):.1f} %" for n in selected)


def test_the_page_resizes_the_cache_and_shows_why_it_cannot(browser: Browser) -> None:
    def resize(cache: str) -> None:
        browser.evaluate(f'document.querySelector("#resize input").value = "{cache}"')
        browser.evaluate('document.querySelector("#resize button").click()')
        wait_for(browser, 'document.getElementById("resize-note").textContent.length > 10')

    with server("--hobbit-low", LOW, "--hobbit-cache", "8MiB", "--api-key", "secret") as running:
        browser.open(running.url + "/hobbit?interval=100", width=390, height=844)
        wait_for(browser, '!document.getElementById("key").hidden')
        assert "an API key is needed" in shown(browser)["state"]
        browser.evaluate(
            'document.querySelector("#key input").value = "secret"; document.querySelector("#key button").click()'
        )
        wait_for(browser, "last")
        assert browser.evaluate('document.getElementById("key").hidden')

        resize("24MiB")
        wait_for(browser, "last.stats.cache_bytes > 16 * 2 ** 20")
        assert "the cache has 2" in browser.evaluate('document.getElementById("resize-note").textContent')
        resize("1KiB")
        wait_for(browser, 'document.getElementById("resize-note").className === "note bad"')
        assert "the smallest setting that works" in browser.evaluate(
            'document.getElementById("resize-note").textContent'
        )

        wide = browser.evaluate("document.documentElement.scrollWidth")
        assert wide <= 390, f"a phone 390 wide would scroll sideways to {wide}"
