"""`ringdp report`: reads a trace, writes the page, and prints the main figures.

The page is page/page.html with its scripts and the packed digest: deflated JSON in base64, which
current browsers unpack without a library.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ringdp.cli.checks import check_writable
from ringdp.cli.console import counted, say
from ringdp.cli.files import write
from ringdp.cli.timeline.digest import digest
from ringdp.cli.timeline.read import read
from ringdp.errors import UsageError
from ringdp.schedule.replay import filled

PARTS = Path(__file__).with_name("page")
SCRIPTS = ("common", "timeline", "memory", "kinds", "chunks", "start")


def report(trace: Path, page: Path, bench: str | None, console: Console) -> int:
    """Return the exit code, 0. Raises UsageError for bad input, RingdpError if writing fails."""
    if bench is not None and not bench.endswith(".json"):
        raise UsageError(f"--network is {bench!r}; allowed: a .json file of `ringdp bench --json`")
    check_writable(page, "--html")
    if page.exists() and trace.exists() and page.samefile(trace):
        raise UsageError(f"--html: {page} is the trace itself; allowed: another file")
    with console.status(Text(f"reading {trace}")) as status:
        run = read(trace)
        data = digest(run, bench, lambda what: status.update(Text(what)))
        text = fill(data, f"{trace.name}: {counted(run.ranks, 'rank')}")
        status.update(Text(f"writing {page}"))
        size = write(page, text)
    for share in data["shares"]:
        rank, total, compute, engine, moves, hidden, exposed, late = share.values()
        say(
            console,
            f"rank {rank}: in {total / 1e3:.1f} ms computed {compute / 1e3:.1f} ms, was "
            f"{engine / 1e3:.1f} ms in the engine, communicated {moves / 1e3:.1f} ms, of which "
            f"{hidden / 1e3:.1f} hidden and {exposed / 1e3:.1f} waited for; waited "
            f"{late / 1e3:.1f} ms for late ranks",
        )
    for note in data["notes"]:
        say(console, note, "bold red")
    say(console, f"wrote {page}, {size:,} bytes")
    return 0


def fill(data: Mapping[str, Any], title: str) -> str:
    packed = zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 6)
    parts = {
        "title": escape(title),
        "script": "\n".join(_text(f"{name}.js") for name in SCRIPTS),
        "data": base64.b64encode(packed).decode(),
    }
    return filled(_text("page.html"), parts)


def _text(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8")
