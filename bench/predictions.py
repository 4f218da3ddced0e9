"""README's words and tables about what was predicted beside what was measured."""

from __future__ import annotations

import json
from statistics import median

from bench.link import LinkRow
from bench.required import RESULTS

LINK = RESULTS / "link.json"


def link_rows() -> list[LinkRow]:
    return [LinkRow(**row) for row in json.loads(LINK.read_text())["rows"]]


def link() -> str:
    """From `python -m bench.link`."""
    found, rows = json.loads(LINK.read_text())["link"], link_rows()
    ratios = sorted(row.ratio for row in rows)
    ranks = sorted({row.ranks for row in rows})
    return (
        f"Over an emulated link of {1e3 * found['latency']:g} ms and "
        f"{found['bandwidth'] / 1e6:g} MB/s, an `all_reduce` of 64 KiB to 16 MiB on {ranks[0]} to "
        f"{ranks[-1]} ranks, {' or '.join(dict.fromkeys(r.algorithm for r in rows))}, takes "
        f"{ratios[0]:.2f} to {ratios[-1]:.2f} times as long as predicted, {median(ratios):.2f} at "
        f"the median of {len(rows)} cases (`bench/link.py`)."
    )
