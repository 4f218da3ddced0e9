"""Opens pages in headless Chromium and returns their DOM after their scripts have run."""

from __future__ import annotations

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

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
    "--dump-dom",
    "--virtual-time-budget=300000",  # milliseconds of virtual time, which do not take real time
)
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


def open_page(at: Path, page: str, place: str = "", *, script: str = "") -> Dom:
    """Writes the page to the directory `at`; returns its DOM after its scripts and `script` have
    run."""
    file = at / "page.html"
    # Errors of scripts are put into the title.
    watch = "<script>onerror = (what) => { document.title = `ERROR ${what}`; }</script>"
    page = page.replace("<title>", watch + "<title>", 1)
    file.write_text(page.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    run = subprocess.run(
        [BROWSER, *FLAGS, f"--user-data-dir={at / 'profile'}", file.as_uri() + place],
        capture_output=True,
        encoding="utf-8",
        timeout=600,
        check=True,
    )
    dom = Dom(run.stdout)
    assert "ERROR" not in dom.texts["title"], dom.texts["title"]
    return dom
