"""A headless Chromium for tests of a page: open, evaluate, screenshot.

It speaks the DevTools protocol over two pipes (JSON messages that end with a 0 byte), so no client library is needed.
"""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any


def find_chromium() -> str | None:
    """A Chromium-like program; HOBBIT_CHROMIUM names one."""
    names = (os.environ.get("HOBBIT_CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if name and (path := shutil.which(name))), None)


class Browser:
    """One page."""

    def __init__(self, program: str) -> None:
        self._ids = itertools.count(1)
        self._rest = b""
        self._events: set[str] = set()
        self._session: str | None = None
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        their_in, our_out = os.pipe()
        our_in, their_out = os.pipe()
        flags = ["--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        flags += ["--disable-dev-shm-usage", "--hide-scrollbars", f"--user-data-dir={self._profile.name}"]

        def onto_3_and_4() -> None:  # where Chromium looks for them
            high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (their_in, their_out)]
            for fd, place in zip(high, (3, 4), strict=True):
                os.dup2(fd, place)

        self._process = subprocess.Popen(
            [program, *flags, "about:blank"],
            pass_fds=(3, 4),
            preexec_fn=onto_3_and_4,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_in)
        os.close(their_out)
        self._in, self._out = our_in, our_out
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._out)  # Chromium ends with its pipe
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        self._profile.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A method of the protocol; its error is an exception."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        """The next message; of events only the name is kept."""
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], 120)[0]:
                raise RuntimeError("the browser says nothing for two minutes")
            piece = os.read(self._in, 1 << 16)
            if not piece:
                raise RuntimeError("the browser ended")
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._events.add(message.get("method", ""))
        return message

    def open(self, url: str, **look: Any) -> None:
        self.look(**look)
        self._events.clear()
        self.call("Page.navigate", url=url)
        while "Page.loadEventFired" not in self._events:
            self._receive()

    def look(self, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Sets the window's size in CSS pixels, and the colour scheme that the user prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def evaluate(self, script: str) -> Any:
        """The value of an expression; a promise is awaited.

        Raises:
            RuntimeError: the script threw.
        """
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description", answer["exceptionDetails"]))
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page, not only what fits in the window."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))
