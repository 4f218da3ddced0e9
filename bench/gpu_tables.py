"""Tables about the results of `make gpu`, for `readme`: a column or some lines for each GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from bench.results import RESULTS
from bench.tables import bytes_text, markdown
from ringdp.cli.bench.kernel_cases import CASES, OURS
from ringdp.cli.bench.kernels import ALONE

NOTHING, UNMEASURED = "no GPU figure was measured", "not measured"


def measured(part: str) -> Iterator[tuple[str, Any]]:
    """The GPU and the rows of each file of results that has this part of `make gpu`."""
    for file in sorted(RESULTS.glob("*.json")):
        found = json.loads(file.read_bytes())
        for outcome in found.get("parts", []) if isinstance(found, dict) else []:
            if outcome["name"] == part and outcome["rows"]:
                yield found["gpu"], outcome["rows"]


def kernels() -> str:
    found = [(gpu, rows["rows"]) for gpu, rows in measured("bench of kernels")]
    heads = [f"{gpu}, % of a copy (× best of torch)" for gpu, _ in found]
    heads = ["kernel", "must move, bytes an element", *(heads or ["on a GPU"])]
    lines = []
    for kernel, case in CASES.items():
        cells = [_cell(rows, kernel) for _, rows in found] or [NOTHING]
        lines.append([kernel, f"{4 * case.moves:g}", *cells])
    return "\n\n".join([markdown(heads, lines), *(_ahead(gpu, rows) for gpu, rows in found)])


def _cell(rows: list[dict[str, Any]], kernel: str) -> str:
    """The worst figures among sizes from ALONE on."""
    large = [r for r in rows if r["kernel"] == kernel and r["size"] >= ALONE]
    ours = [r["percent_of_copy"] for r in large if r["way"] == OURS]
    theirs = [r["over_ours"] for r in large if r["over_ours"] is not None]
    return f"{min(ours):.0f} ({min(theirs):.2f})" if ours and theirs else UNMEASURED


def _ahead(gpu: str, rows: list[dict[str, Any]]) -> str:
    sizes = [r["size"] for r in rows]
    beside = [r for r in rows if r["over_ours"] is not None]
    if not beside:
        return f"{gpu}: torch's ways were not measured."
    least = min(beside, key=lambda r: r["over_ours"])
    return (
        f"{gpu}: the best of torch's ways takes at least {least['over_ours']:.2f} times as "
        f"long, for all kernels and sizes from {bytes_text(min(sizes))} to "
        f"{bytes_text(max(sizes))} (least for {least['kernel']} of {bytes_text(least['size'])})."
    )


def nccl() -> str:
    """Medians of all_reduce by our schedules and by NCCL's own, of two processes on one GPU."""
    torchs = {
        (gpu, row["bytes"]): row["p50_us"]
        for gpu, found in measured("bench of NCCL: ours beside torch's")
        for row in found["rows"]
        if row["transport"] != "nccl"
    }
    lines = []
    for gpu, found in measured("bench of NCCL: our schedules beside its own"):
        for size in dict.fromkeys(row["bytes"] for row in found["rows"]):
            us = {r["algorithm"]: r["p50_us"] for r in found["rows"] if r["bytes"] == size}
            ring, theirs = us.get("ring"), us.get("nccl")
            times = (ring, us.get("direct"), theirs, torchs.get((gpu, size)))
            cells = [f"{t / 1e3:.1f}" if t else UNMEASURED for t in times]
            ratio = f"{ring / theirs:.2f}" if ring and theirs else UNMEASURED
            lines.append([f"{gpu}, {bytes_text(size)}", *cells, ratio])
    heads = ["all_reduce of", "ring, ms", "direct, ms", "NCCL's own, ms", "torch's group, ms"]
    return markdown([*heads, "ring / NCCL's own"], lines) if lines else NOTHING


def peer_memory() -> str:
    """busbw of all_reduce by kernels over peer memory, of ranks that share one GPU."""
    found = {
        (gpu, row["ranks"], row["algorithm"], row["bytes"]): row
        for gpu, rows in measured("bench of peer memory")
        for row in rows
    }
    sizes = sorted({size for *_, size in found})
    lines = []
    for gpu, ranks, algorithm in dict.fromkeys(key[:3] for key in found):
        cells = [_busbw(found.get((gpu, ranks, algorithm, size), {})) for size in sizes]
        lines.append([f"{gpu}, {ranks} ranks, {algorithm}", *cells])
    return markdown(["busbw, GB/s", *map(bytes_text, sizes)], lines) if lines else NOTHING


def _busbw(row: dict[str, Any]) -> str:
    return f"{row['busbw']:.0f}" if row.get("wrong") == 0 else UNMEASURED
