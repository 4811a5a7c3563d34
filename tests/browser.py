"""A headless Chromium, driven over the pipe of its debugging protocol, for tests of pages."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --remote-debugging-pipe"
)
_COMPLAINTS = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
_KEYS = {"Tab": 9, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class Browser:
    """One tab. Chromium reads commands from descriptor 3 and answers on 4, each a JSON text and a zero."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        shell = f'exec "$0" "$@" 3<&{commands} 4>&{answers}'
        words = ["bash", "-c", shell, CHROMIUM, *_FLAGS.split(), f"--user-data-dir={self._profile.name}"]
        self._process = subprocess.Popen(
            [*words, "about:blank"],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._number, self._pending, self._session = 0, b"", ""
        self._events: list[dict[str, Any]] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, page: Path, width: int = 1280, dark: bool = False) -> list[str]:
        """Load a page, and return the errors and messages of its console."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        self._call("Page.navigate", url=page.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._message())
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return [json.dumps(event) for event in self._events if event["method"] in _COMPLAINTS]

    def run(self, script: str) -> Any:
        """Return the value of an expression of JavaScript; it may be a promise."""
        got = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in got, got["exceptionDetails"]
        return got["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key, such as Tab, ArrowRight or n."""
        words = {"key": key, "windowsVirtualKeyCode": _KEYS.get(key, ord(key[0].upper()))}
        self._call("Input.dispatchKeyEvent", type="keyDown", **words)
        self._call("Input.dispatchKeyEvent", type="keyUp", **words)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def screenshot(self, path: Path) -> None:
        """Write what the window shows as PNG."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        limit = time.monotonic() + 120
        while True:
            assert time.monotonic() < limit, f"{method} is not answered"
            got = self._message()
            if got.get("id") == self._number:
                assert "error" not in got, got
                return got["result"]
            if "method" in got:
                self._events.append(got)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            came = os.read(self._read, 1 << 16)
            assert came, "the browser has ended"
            self._pending += came
        text, _, self._pending = self._pending.partition(b"\0")
        return dict(json.loads(text))
