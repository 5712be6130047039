"""A headless Chromium over the pipe of its debugging protocol: no driver, no port, no package beside it.

python -m tests.support.browser    says which one there is; status 1 if there is none
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
ABSENT = f"none of {', '.join(NAMES)} is installed; make browser-test installs one"

_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--remote-debugging-pipe"),
)
_KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Tab": 9, "Escape": 27, "Enter": 13}
_DEADLINE = 60.0
"""Seconds after which an answer is missing."""


def chromium() -> str | None:
    """The program of a Chromium, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@contextmanager
def opened(page: Path, width: int = 1400, height: int = 1000, dark: bool = False) -> Iterator[Tab]:
    """``page`` in a browser of its own, once it says that it is drawn."""
    program = chromium()
    assert program is not None, ABSENT
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        there, ours = os.pipe(), os.pipe()
        actions = [
            (os.POSIX_SPAWN_DUP2, there[0], 3),
            (os.POSIX_SPAWN_DUP2, ours[1], 4),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ]
        command = [program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = os.posix_spawn(program, command, os.environ, file_actions=actions, setpgroup=0)
        os.close(there[0])
        os.close(ours[1])
        try:
            tab = Tab(there[1], ours[0])
            tab.open(page, width, height, dark)
            yield tab
        finally:
            os.close(there[1])
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            os.close(ours[0])


class Tab:
    """``errors``: what the page's console and its scripts complained of. ``requests``: addresses that it asked for."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._number, self._session = 0, ""
        self._buffer = b""
        self.errors: list[str] = []
        self.requests: list[str] = []

    def open(self, page: Path, width: int, height: int, dark: bool) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.until("document.documentElement?.dataset.ready === 'true'")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a call of the protocol."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _DEADLINE
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])
            self._note(answer)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser did not answer within {_DEADLINE:g} s; so far: {self.errors}"
            data = os.read(self._read, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        what, details = event.get("method"), event.get("params", {})
        if what == "Runtime.exceptionThrown":
            thrown = details["exceptionDetails"]
            self.errors.append(str(thrown.get("exception", {}).get("description", thrown["text"])))
        elif what == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning", "assert"):
            self.errors.append(str([argument.get("value") for argument in details["args"]]))
        elif what == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
            self.errors.append(details["entry"]["text"])
        elif what == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])

    def value(self, script: str) -> Any:
        """The value of a JavaScript expression on the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + _DEADLINE
        while not self.value(script):
            assert time.monotonic() < deadline and not self.errors, (script, self.errors)
            time.sleep(0.02)

    def drawn(self) -> None:
        """Wait until the page has drawn all that it was asked for."""
        self.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def place(self, selector: str, x: float = 0.5, y: float = 0.5) -> tuple[float, float]:
        """The point at these shares of an element's width and height, scrolled into view."""
        script = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{script}.scrollIntoView({{block: 'center'}})")
        box = self.value(
            f"(() => {{ const b = {script}.getBoundingClientRect(); return [b.x, b.y, b.width, b.height] }})()"
        )
        return box[0] + x * box[2], box[1] + y * box[3]

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """``kind``: mouseMoved, mousePressed, mouseReleased, mouseWheel."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, selector: str, x: float = 0.5, y: float = 0.5) -> None:
        at = self.place(selector, x, y)
        self.mouse("mouseMoved", *at)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, *at, button="left", clickCount=1)
        self.drawn()

    def press(self, key: str) -> None:
        """A key, by its name or its character."""
        code = _KEYS.get(key, ord(key.upper()[0]))
        text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)
        self.drawn()

    def type(self, selector: str, text: str) -> None:
        """Write ``text`` into an input in place of its own."""
        self.value(f"document.querySelector({json.dumps(selector)}).select()")
        self.value(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)
        self.drawn()

    def picture(self, clip: tuple[float, float, float, float] | None = None) -> bytes:
        """A PNG of the visible part, or of ``clip``: left, top, width, height in pixels of the page."""
        more: dict[str, Any] = {}
        if clip is not None:
            more = {"clip": dict(zip(("x", "y", "width", "height"), clip, strict=True)) | {"scale": 1}}
            more["captureBeyondViewport"] = True
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", **more)["data"])


if __name__ == "__main__":
    print(chromium() or ABSENT)
    raise SystemExit(chromium() is None)
