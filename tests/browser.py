"""Chromium without a window, driven through chromedriver's HTTP interface (W3C WebDriver): for tests and pictures of pages.

Chromium and chromedriver are Debian's ``chromium`` and ``chromium-driver``; ``missing`` says which of them is not there.
"""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KEYS = {
    "right": "\ue014",
    "left": "\ue012",
    "up": "\ue013",
    "down": "\ue015",
    "tab": "\ue004",
    "enter": "\ue007",
    "space": " ",
}


def missing() -> str:
    """Why there is no browser; empty if there is one."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"there is no {' and no '.join(absent)} (apt-get install chromium chromium-driver)" if absent else ""


class Browser:
    """One session of a browser; it has one page at a time."""

    def __init__(self, address: str) -> None:
        self._address = address
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"]
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": arguments, "binary": shutil.which("chromium")},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        found = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{found['sessionId']}"

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if method == "GET" or method == "DELETE" else json.dumps(body or {}).encode()
        request = urllib.request.Request(
            self._address + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=100) as answer:
            return json.load(answer)["value"]

    def close(self) -> None:
        self._call("DELETE", self._session)

    def view(self, width: int, height: int, dark: bool = False, touch: bool = False) -> None:
        """The size of the page in CSS pixels, the colours of the system, and whether it is a phone."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": touch}
        self.devtools("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", {"features": [scheme]})

    def devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        """A command of Chromium's own protocol."""
        return self._call("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def open(self, path: Path) -> None:
        """Load a file and wait until its scripts have run."""
        self.visit(path.resolve().as_uri())

    def visit(self, address: str) -> None:
        """Load an address and wait until its scripts have run."""
        self._call("POST", f"{self._session}/url", {"url": address})

    def wait(self, condition: str, seconds: float = 60) -> None:
        """Wait until an expression of JavaScript is true."""
        end = time.monotonic() + seconds
        while not self.run(f"return Boolean({condition})"):
            if time.monotonic() > end:
                raise TimeoutError(f"not after {seconds:.0f} s: {condition}")
            time.sleep(0.05)

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a function body of JavaScript returns."""
        return self._call("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def keys(self, keys: Sequence[str]) -> None:
        """Press and release keys, given as characters or as names of ``KEYS``."""
        steps = [{"type": kind, "value": KEYS.get(key, key)} for key in keys for kind in ("keyDown", "keyUp")]
        self._actions({"type": "key", "id": "keyboard", "actions": steps})

    def hover(self, x: float, y: float, click: bool = False) -> None:
        """Move the mouse to a point of the view, and click if asked to."""
        # a second movement: charts look at the mouse when it moves on them
        moves = [{"type": "pointerMove", "x": round(x) + i, "y": round(y), "duration": 50} for i in (-2, 0)]
        clicks = [{"type": kind, "button": 0} for kind in ("pointerDown", "pointerUp")] if click else []
        pointer = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}}
        self._actions(pointer | {"actions": moves + clicks})

    def _actions(self, source: dict[str, Any]) -> None:
        self._call("POST", f"{self._session}/actions", {"actions": [source]})

    def picture(self, path: Path, whole: bool = False) -> None:
        """A PNG of the view, or of the whole page."""
        options = {"format": "png", "captureBeyondViewport": whole, "optimizeForSpeed": False}
        if whole:
            size = self.devtools("Page.getLayoutMetrics", {})["cssContentSize"]
            options["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        path.write_bytes(base64.b64decode(self.devtools("Page.captureScreenshot", options)["data"]))

    def complaints(self) -> list[str]:
        """What the page has written to the console since the last call: errors and warnings."""
        found = self._call("POST", f"{self._session}/se/log", {"type": "browser"})
        return [f"{entry['level']}: {entry['message']}" for entry in found if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """The addresses that the browser asked for since the last call."""
        found = self._call("POST", f"{self._session}/se/log", {"type": "performance"})
        events = [json.loads(entry["message"])["message"] for entry in found]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen(
        ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as driver:
        try:
            address = f"http://127.0.0.1:{port}"
            _wait(address)
            session = Browser(address)
            try:
                yield session
            finally:
                session.close()
        finally:
            driver.terminate()


def _wait(address: str) -> None:
    for _ in range(100):
        try:
            with urllib.request.urlopen(f"{address}/status", timeout=5) as answer:
                if json.load(answer)["value"]["ready"]:
                    return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("chromedriver does not answer")
