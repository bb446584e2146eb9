"""A page in headless Chromium, over its DevTools protocol: what it draws, prints to the console and asks the network for.

One fresh profile a browser, nothing of Chromium's own traffic. ``CHROMIUM`` is None where it is not installed.
"""

from __future__ import annotations

import asyncio
import base64
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WHY_NOT = "chromium is not installed (apt-get install -y --no-install-recommends chromium)"
LIMIT_S = 90.0  # for all pages of one browser, on a busy machine
_QUIET = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--mute-audio",
)
_COUNT = """(() => [...document.querySelectorAll("figure.chart")].map((figure) => {
  const canvas = figure.querySelector("canvas");
  const pixels = canvas ? canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data : [];
  const colours = new Set();
  for (let i = 0; i < pixels.length; i += 4) if (pixels[i + 3] > 200) colours.add((pixels[i] << 16) | (pixels[i + 1] << 8) | pixels[i + 2]);
  const legend = [...figure.querySelectorAll(".legend li")].map((item) => item.textContent.trim());
  return {title: figure.querySelector("h4").textContent.trim(), colours: colours.size, legend, wide: figure.scrollWidth - figure.clientWidth};
}))()"""


@dataclass
class Opened:
    """What came of opening a page."""

    charts: list[dict[str, Any]] = field(default_factory=list)
    console: list[str] = field(default_factory=list)  # messages and uncaught exceptions
    requests: list[str] = field(default_factory=list)  # beyond the page itself
    text: str = ""
    overflow_px: int = 0  # how much wider the page is than the window
    screenshot: bytes = b""
    seconds: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Look:
    """What to open and how. ``scripts`` are evaluated in order, by name, before the picture is taken."""

    path: Path
    dark: bool = False
    width: int = 1280
    screenshot: bool = False
    scripts: dict[str, str] = field(default_factory=dict)


def open_pages(*looks: Look) -> list[Opened]:
    """Open local files one after another in one browser: wait until each is drawn, look, go on."""
    return asyncio.run(_open(looks))


async def _open(looks: tuple[Look, ...]) -> list[Opened]:
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        words = [CHROMIUM, "--headless", "--no-sandbox", *_QUIET, f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            async with asyncio.timeout(LIMIT_S):
                return await _look_at_all(await _port(Path(profile)), looks)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _port(profile: Path) -> int:
    """Chromium writes it, in two lines, when it listens."""
    path = profile / "DevToolsActivePort"
    while not (path.exists() and "\n" in path.read_text()):
        await asyncio.sleep(0.05)
    return int(path.read_text().split()[0])


async def _look_at_all(port: int, looks: tuple[Look, ...]) -> list[Opened]:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/json") as reply:
            pages = [page for page in await reply.json(content_type=None) if page["type"] == "page"]
        async with session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=1 << 28) as socket:
            tab = _Tab(socket)
            for domain in ("Runtime", "Log", "Network", "Page"):
                await tab.call(f"{domain}.enable")
            return [await _look(tab, look) for look in looks]


async def _look(tab: _Tab, look: Look) -> Opened:
    found = tab.found = Opened()
    tab.url = look.path.absolute().as_uri()
    scheme = {"name": "prefers-color-scheme", "value": "dark" if look.dark else "light"}
    await tab.call("Emulation.setEmulatedMedia", features=[scheme])
    await tab.call("Emulation.setDeviceMetricsOverride", width=look.width, height=900, deviceScaleFactor=1, mobile=False)
    begun = time.monotonic()
    await tab.call("Page.navigate", url=tab.url)
    await tab.until(f"location.href === {tab.url!r} && document.readyState === 'complete'")
    found.seconds = time.monotonic() - begun
    await asyncio.sleep(0.2)  # the observer of the width has its frame
    found.charts = await tab.evaluate(_COUNT)
    found.text = await tab.evaluate("document.body.innerText")
    found.overflow_px = await tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    for name, script in look.scripts.items():
        found.values[name] = await tab.evaluate(script)
    if look.screenshot:
        height = min(int(await tab.evaluate("document.documentElement.scrollHeight")), 16000)
        clip = {"x": 0, "y": 0, "width": look.width, "height": height, "scale": 1}
        found.screenshot = base64.b64decode((await tab.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip))["data"])
    return found


class _Tab:
    """Calls one after another; what happens meanwhile is noted."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.url, self.found = "", Opened()
        self._socket, self._number = socket, 0

    async def call(self, method: str, **params: Any) -> Any:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json()
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._note(message.get("method", ""), message.get("params", {}))

    async def evaluate(self, script: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, script: str) -> None:
        while not await self.evaluate(script):
            await asyncio.sleep(0.05)

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.consoleAPICalled":
            self.found.console.append(f"{params['type']}: {params['args']}")
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.found.console.append(f"exception: {details['text']} {details.get('exception', {}).get('description', '')}")
        elif method == "Log.entryAdded":
            self.found.console.append(f"{params['entry']['level']}: {params['entry']['text']}")
        elif method == "Network.requestWillBeSent" and params["request"]["url"] not in (self.url, "data:,"):
            self.found.requests.append(params["request"]["url"])
