"""A headless Chromium: opens pages, and returns their DOM after their scripts have run.

Starting it takes seconds, opening a page a tenth of one. So it is started once per session, and
gets commands of the DevTools protocol through a pipe.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-dev-shm-usage",  # a container may have little /dev/shm
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--window-size=1400,900",
    "--remote-debugging-pipe",
)
# The protocol's file descriptors are 3 and 4.
WITH_PIPES = ("sh", "-c", 'exec "$@" 3<&0 4>&1 </dev/null >&2', "sh")
VIRTUAL_TIME = {
    "policy": "pauseIfNetworkFetchesPending",
    "budget": 300_000,  # ms, which do not take real time
    "maxVirtualTimeTaskStarvationCount": 9999,
}
needs_browser = pytest.mark.skipif(not BROWSER, reason="no chromium on PATH")


class Dom(HTMLParser):
    """A page's elements with their attributes, and the text inside each id or tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self._under: list[str] = []
        self.texts: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {k: v or "" for k, v in attributes}
        self.elements.append((tag, found))
        if tag not in ("meta", "input", "link", "br"):
            self._under.append(found.get("id", tag))

    def handle_endtag(self, tag: str) -> None:
        self._under.pop()

    def handle_data(self, data: str) -> None:
        for name in self._under:
            self.texts[name] = self.texts.get(name, "") + data

    def of_class(self, name: str) -> list[dict[str, str]]:
        return [a for _, a in self.elements if name in a.get("class", "").split()]

    @property
    def holdings(self) -> dict[str, str]:
        """`rank 0 chunk 1` -> `0.1 + 2.1`, from the cells' aria-labels."""
        return dict(a["aria-label"].split(": ") for a in self.of_class("cell"))


class Browser:
    def __init__(self, profile: Path) -> None:
        self._process = subprocess.Popen(
            [*WITH_PIPES, BROWSER, *FLAGS, f"--user-data-dir={profile}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._sent = 0
        self._received = self._messages()

    def open(self, at: Path, page: str, place: str = "", *, script: str = "") -> Dom:
        """Writes the page to the directory `at`; returns its DOM after its scripts and `script`
        have run."""
        file = at / "page.html"
        # Errors of scripts are put into the title.
        watch = "<script>onerror = (what) => { document.title = `ERROR ${what}`; }</script>"
        page = page.replace("<title>", watch + "<title>", 1)
        page = page.replace("</body>", f"<script>{script}</script></body>")
        file.write_text(page, encoding="utf-8")
        target = self._call("Target.createTarget", url="about:blank")
        session = self._call("Target.attachToTarget", **target, flatten=True)
        self._call("Page.navigate", session, url=file.as_uri() + place)
        self._call("Emulation.setVirtualTimePolicy", session, **VIRTUAL_TIME)
        for message in self._received:
            if message.get("method") == "Emulation.virtualTimeBudgetExpired":
                break
        html = "document.documentElement.outerHTML"
        dom = Dom(self._call("Runtime.evaluate", session, expression=html)["result"]["value"])
        self._call("Target.closeTarget", **target)
        assert "ERROR" not in dom.texts["title"], dom.texts["title"]
        return dom

    def close(self) -> None:
        self._call("Browser.close")  # killed, it would leave its folder of sockets
        self._process.communicate()

    def _call(self, method: str, session: Any = None, **parameters: Any) -> Any:
        self._sent += 1
        command = {"id": self._sent, "method": method, "params": parameters, **(session or {})}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\0")
        answer = next(m for m in self._received if m.get("id") == self._sent)
        assert "error" not in answer, f"{method}: {answer}"
        return answer["result"]

    def _messages(self) -> Iterator[dict[str, Any]]:
        """Answers and events, until the browser ends."""
        assert self._process.stdout is not None
        received = b""
        while more := self._process.stdout.read(1 << 20):
            *whole, received = (received + more).split(b"\0")
            yield from map(json.loads, whole)
