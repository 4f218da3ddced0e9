"""Writes what README shows but nobody types: the figure of a ring and the tables of results.

    python -m bench.readme

A part of README between `<!-- name -->` and `<!-- /name -->` is replaced by what PARTS[name] says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from bench.rows import Row, read
from ringdp.schedule import schedule, svg

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
FIGURE = RESULTS / "ring.svg"


def figure() -> str:
    return svg(schedule("all_reduce", "ring", 4))


def stages() -> str:
    """Bytes per rank of the demo, from `ringdp train --json bench/results/train.json`."""
    runs = json.loads((RESULTS / "train.json").read_text())
    names = ("parameters", "gathered_peak", "gradients", "buckets", "optimizer")
    lines = [
        "| stage | " + " | ".join(n.replace("_", " ") for n in names) + " | sent per step |",
        "|---|" + "---:|" * (len(names) + 1),
    ]
    for run in runs:
        cells = [f"{run['memory'][n]:,}" for n in names]
        cells.append(f"{run['traffic']['sent_bytes_per_step']:,}")
        lines.append(f"| {run['stage']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def all_reduce() -> str:
    """Times relative to gloo's in the same run, minimum and median."""
    rows = {(r.algorithm, r.bytes): r for r in read(RESULTS / "all_reduce.json")}
    sizes = sorted({size for _, size in rows})

    def ratio(algorithm: str, size: int, of: Callable[[Row], float]) -> str:
        return f"{of(rows['gloo', size]) / of(rows[algorithm, size]):.1f}"

    lines = [
        "| bytes | direct, min | direct, median | ring, min | ring, median |",
        "|" + "---:|" * 5,
    ]
    for size in sizes:
        cells = [
            ratio(algorithm, size, of)
            for algorithm in ("direct", "ring")
            for of in (lambda r: r.min_us, lambda r: r.p50_us)
        ]
        lines.append(f"| {size:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


PARTS: dict[str, Callable[[], str]] = {"stages": stages, "all_reduce": all_reduce}


def render(text: str) -> str:
    for name, part in PARTS.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text, count = pattern.subn(lambda m, p=part: f"{m[1]}{p()}\n{m[2]}", text)
        assert count == 1, f"README has {count} parts named {name}"
    return text


if __name__ == "__main__":
    FIGURE.write_text(figure())
    readme = ROOT / "README.md"
    readme.write_text(render(readme.read_text()))
