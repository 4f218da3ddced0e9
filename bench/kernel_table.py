"""The table of kernels: the bytes that each must move, and the results of `make gpu`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from bench.markdown import markdown
from bench.results import RESULTS
from ringdp.cli.bench.kernel_cases import CASES, OURS

LARGE = 256 << 20  # bytes: several times any cache. See Note [written back]


def table() -> str:
    measured = list(_measured())
    heads = [f"{gpu}, % of a copy (× best of torch)" for gpu, _ in measured]
    heads = ["kernel", "must move, bytes an element", *(heads or ["on a GPU"])]
    lines = []
    for kernel, case in CASES.items():
        cells = [_cell(rows, kernel) for _, rows in measured] or ["no GPU figure was measured"]
        lines.append([kernel, f"{4 * case.moves:g}", *cells])
    return markdown(heads, lines)


def _measured() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The GPU and the rows of each file with results of kernels."""
    for file in sorted(RESULTS.glob("*.json")):
        found = json.loads(file.read_bytes())
        for part in found.get("parts", []) if isinstance(found, dict) else []:
            if part["name"] == "bench of kernels" and part["rows"]:
                yield found["gpu"], part["rows"]["rows"]


def _cell(rows: list[dict[str, Any]], kernel: str) -> str:
    """The worst figures among large sizes."""
    large = [r for r in rows if r["kernel"] == kernel and r["size"] >= LARGE]
    ours = [r["percent_of_copy"] for r in large if r["way"] == OURS]
    theirs = [r["over_ours"] for r in large if r["over_ours"] is not None]
    return f"{min(ours):.0f} ({min(theirs):.2f})" if ours and theirs else "not measured"
