"""Builds the page of a report: page/page.html with its scripts and the packed digest.

The digest is deflated JSON in base64, which current browsers unpack without a library.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from ringdp.schedule.replay import filled

PARTS = Path(__file__).with_name("page")
SCRIPTS = ("common", "timeline", "memory", "kinds", "chunks", "start")


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
