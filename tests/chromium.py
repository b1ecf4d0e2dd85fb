"""A headless Chromium for tests."""

import base64
import contextlib
import json
import os
import pathlib
import select
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium: apt-get install chromium")
PATIENCE_S = 60.0  # for a word of the browser; its start on a busy machine takes ten


class Browser:
    """A headless Chromium, asked through its debugging pipe: one JSON object to a NUL."""

    def __init__(self, write: int, read: int):
        self._write, self._read, self._number, self._left = write, read, 0, b""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.requests, self.said, self.frames = [], [], []
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params):
        """Sends a command and returns its result; what happens meanwhile is noted."""
        self._number += 1
        session = {"sessionId": self._session} if hasattr(self, "_session") else {}
        message = {"id": self._number, "method": method, "params": params} | session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def show(self, url: str, width: int) -> None:
        """Opens a page at a width and waits until it is there."""
        metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", **metrics)
        self.requests, self.said, self.frames, self._loaded = [], [], [], False
        self.ask("Page.navigate", url=url)
        while not self._loaded:
            self._note(self._next())

    def value(self, expression: str):
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def until(self, expression: str) -> None:
        """Waits until an expression is true in the page."""
        end = time.monotonic() + PATIENCE_S
        while not self.value(f"!!({expression})"):
            assert time.monotonic() < end, (expression, self.value("document.body.innerText"))
            time.sleep(0.05)

    def picture(self, path: pathlib.Path) -> None:
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))

    def _note(self, event: dict) -> None:
        method, params = event.get("method"), event.get("params", {})
        self._loaded = method == "Page.loadEventFired" or getattr(self, "_loaded", False)
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        if method.startswith("Network.webSocketFrame"):
            self.frames.append(params.get("response", {}).get("payloadData", ""))
        if method == "Log.entryAdded":
            self.said.append(params["entry"]["text"])

    def _next(self) -> dict:
        while b"\0" not in self._left:
            if not select.select([self._read], [], [], PATIENCE_S)[0]:
                raise TimeoutError(f"the browser says nothing for {PATIENCE_S:g} seconds")
            part = os.read(self._read, 1 << 16)
            assert part, "the browser is gone"
            self._left += part
        message, _, self._left = self._left.partition(b"\0")
        return json.loads(message)


@contextlib.contextmanager
def browser(folder: pathlib.Path) -> Iterator[Browser]:
    """A browser of its own, ended at the end."""
    (its_in, write), (read, its_out) = os.pipe(), os.pipe()
    flags = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe"
    command = f'exec "$0" {flags} --user-data-dir="$1" 3<&{its_in} 4>&{its_out} 2>/dev/null'
    started = subprocess.Popen(["bash", "-c", command, CHROMIUM, str(folder)], pass_fds=(its_in, its_out))
    os.close(its_in), os.close(its_out)
    try:
        yield Browser(write, read)
    finally:
        os.close(write), os.close(read)
        started.kill()
        started.wait()
