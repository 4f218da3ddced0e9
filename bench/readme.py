"""Generates the figures and tables of results in README and docs/speed.md.

    python -m bench.readme        # needs matplotlib, the extra `plot`

The text between `<!-- name -->` and `<!-- /name -->` in a page is what PARTS[name] returns.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bench import ddp_step as ddp
from bench import torch_backend as backend
from bench import trace as tracing
from bench import turns
from bench import zero_step as zero
from bench.ddp_step import KEPT
from bench.gpu_tables import kernels, nccl, peer_memory
from bench.guard import Row
from bench.required import REQUIRED, Reached, beside_gloo, median, minimum, of_suite, reached
from bench.results import OTHER, RESULTS, load
from bench.small import Small
from bench.tables import bytes_text, cpu_kernels, error, link, markdown, plan
from ringdp.cli.bench.rows import best_peer, read
from ringdp.cli.runs import MEMORY
from ringdp.schedule import schedule, svg

ROOT = Path(__file__).parent.parent
PAGES = README, SPEED = ROOT / "README.md", ROOT / "docs" / "speed.md"
PART = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- /\2 -->)", re.DOTALL)
FIGURE = RESULTS / "ring.svg"
LESS = "↓"
Machine = dict[str, str]  # as `ringdp.cli.bench.machine` describes it
PLOTS = {
    "all_reduce": "busbw of all_reduce by size: measured, predicted, bound, and peers",
    "all_gather": "the same for all_gather",
}


def figure() -> str:
    return svg(schedule("all_reduce", "ring", 4))


def best() -> str:
    """The summary: medians of some sizes and steps, and where ringdp's lead is smallest."""
    lines = []
    for size in (4 << 10, 1 << 20, 64 << 20):
        rows = [r for r in read(RESULTS / "all_reduce.json").rows if r.bytes == size]
        (ours,) = (r for r in rows if r.ours and not r.registered)
        peer = best_peer(rows, ours)
        assert peer is not None
        times = f"{median(ours):,.1f} µs", f"{median(peer):,.1f} µs ({peer.label})"
        lines.append(
            [f"all_reduce of {bytes_text(size)}", *times, f"{median(ours) / median(peer):.2f}"]
        )
    for name, case, way, other in (
        ("ddp_step", "training step, DDP", "ringdp", f"torch over gloo{KEPT}"),
        ("zero_step", "training step, stage 3", "stage 3", f"FSDP2 over gloo{KEPT}"),
        ("muon_step", "the same with Muon", "stage 3", f"FSDP2 over gloo{KEPT}"),
    ):
        steps = [turns.Row(**row) for row in load(name)["steps"]]
        (ours,) = (row for row in steps if row.name == way)
        (peer,) = (row for row in steps if row.by["kept"] == 1)
        times = f"{ours.median:,.0f} ms", f"{peer.median:,.0f} ms ({other})"
        lines.append([case, *times, f"{ours.by['kept']:.2f}"])
    table = markdown(["2 ranks, medians", "ringdp", "the best of others", "ringdp / it"], lines)
    least, case = min((found, r.case) for r in REQUIRED if (found := reached(r, median, OTHER)))
    return (
        f"{table}\n\nWhere others come nearest, on another machine, ringdp is "
        f"{least.ratio:.2f} times as fast as the best of them ({case})."
    )


def stages() -> str:
    """Bytes per rank of the demo, from `python -m bench.suite train`."""
    runs = load("train")
    lines = []
    for run in runs:
        held = [f"{run['memory'][n]:,}" for n in MEMORY]
        lines.append([f"{run['stage']}", *held, f"{run['traffic']['sent_bytes_per_step']:,}"])
    table = markdown(["stage", *(n.replace("_", " ") for n in MEMORY), "sent per step"], lines)
    least, *_, most = (run["traffic"]["sent_bytes_per_step"] for run in runs)
    return (
        f"{table}\n\nStage 3 sends {most / least:.2f} times what the others do, not 1.5 times: the "
        "root (what lies in no unit) and the last unit stay for backward, and are gathered once."
    )


def ratios() -> str:
    """Promised and measured ratios, at the worst size of each case."""
    times, places = (median, minimum), (RESULTS, OTHER)
    lines = [
        [
            r.case,
            f"{r.ratio}",
            *(_cell(reached(r, t, where), r.ratio) for where in places for t in times),
        ]
        for r in REQUIRED
    ]
    everything = "everything measured, 2 to 8 ranks, gloo alone"
    cells = [_cell(beside_gloo(t, where), 1) for where in places for t in times]
    lines.append([everything, "1.0", *cells])
    names = ["by medians", "by minima", "another machine, by medians", "by minima"]
    table = markdown(["case", "promised, by medians", *names], lines)
    other = [found.machine for found in of_suite(OTHER)]
    return (
        f"{table}\n\n{LESS}: less than is promised. The other machine: {_on(other[0])}, "
        f"{_loads(other)}."
    )


def _cell(found: Reached | None, promised: float) -> str:
    if found is None:
        return "not measured"
    less = f" {LESS}" if found.ratio < promised else ""
    return f"{found.ratio:.2f} ({bytes_text(found.size)}){less}"


def all_reduce() -> str:
    """The table of all_reduce: medians in µs."""
    rows = read(RESULTS / "all_reduce.json").rows
    labels = list(dict.fromkeys((r.transport, r.label) for r in rows))
    lines = []
    for size in sorted({r.bytes for r in rows}):
        here = {(r.transport, r.label): r for r in rows if r.bytes == size}
        cells = [f"{here[label].p50_us:,.1f}" for label in labels]
        bounds = {r.registered: r.bound_us for r in here.values()}
        lines.append([f"{size:,}", *cells, *(_bound(bounds[where]) for where in (False, True))])
    ways = (label.replace("auto", "ringdp").replace("reg", "registered") for _, label in labels)
    beaten = [f"{r.min_us:,.0f} µs at {bytes_text(r.bytes)}" for r in rows if r.beats_bound]
    table = markdown(["bytes", *ways, "bound", "bound, registered"], lines, left=())
    if not beaten:
        return table
    says = "The best call is faster than numpy's passes, and so below its bound, here:"
    return f"{table}\n\n{says} {', '.join(beaten)}."


def _bound(us: float | None) -> str:
    assert us is not None
    return f"{us:.3g}" if us < 100 else f"{us:,.1f}"


def plots() -> str:
    return "\n".join(f"![{says}](../bench/results/{name}.svg)" for name, says in PLOTS.items())


def guard() -> str:
    """From `python -m bench.guard`."""
    rows = [Row(**row) for row in load("guard")["rows"]]
    costs = [f"{r.cost_us:.2f} µs ({r.ratio:.1%}) of {bytes_text(r.bytes)}" for r in rows]
    return (
        "What a call pays for saying what it does, should it hang (`bench/guard.py`): "
        f"{', '.join(costs)}."
    )


def small() -> str:
    """From `python -m bench.small`."""
    found = Small(**load("small")["times"])
    parts = [f"{us:.2f} µs of {bytes_text(int(size))}" for size, us in found.exchange_us.items()]
    return (
        f"What a small call is made of (`bench/small.py`): the exchange, in a loop of C++ on two "
        f"cores, takes {' and '.join(parts)}; all the rest, as on one rank, which exchanges "
        f"nothing, {found.alone_us:.2f} µs. A method in C++ that does nothing takes "
        f"{found.method_us:.2f} µs to call from Python, so that and the exchange are the "
        f"least that a call could take."
    )


def contenders() -> str:
    return f"They are {'; '.join(read(RESULTS / 'all_reduce.json').contenders.values())}."


def machines() -> str:
    """The machine of most results, then others with the names of theirs."""
    found: dict[str, dict[str, Machine]] = defaultdict(dict)
    for file in sorted(RESULTS.glob("*.json")):
        if "machine" in (contents := load(file.stem)):
            found[_on(contents["machine"])][file.stem] = contents["machine"]
    (on, most), *others = sorted(found.items(), key=lambda item: -len(item[1]))
    parts = [
        f"All that ran on a CPU did so on {on}, {_loads(most.values())}",
        *(f"but {', '.join(of)} on {on}, {_loads(of.values())}" for on, of in others),
    ]
    return f"{'; '.join(parts)}."


def _on(machine: Machine) -> str:
    return (
        f"{machine['cores']} cores of an {machine['cpu']} ({machine['caches']}), kernel "
        f"{machine['kernel']}"
    )


def _loads(machines: Iterable[Machine]) -> str:
    began = sorted(float(machine["load"].split()[0]) for machine in machines)
    loads = " to ".join(dict.fromkeys(f"{load:.1f}" for load in (began[0], began[-1])))
    return f"with a load of {loads} when a run began"


def torch_backend() -> str:
    """Medians in ms and their ratios, from `python -m bench.torch_backend`."""
    rows = [backend.Row(**row) for row in load("torch_backend")["rows"]]
    ways = ("ringdp", "gloo", f"gloo{KEPT}")
    lines = []
    found = {(row.case, row.backend): row for row in rows}
    for case in dict.fromkeys(row.case for row in rows):
        ours = found[case, "ringdp"]
        cells = [f"{found[case, way].median / 1e3:,.3g}" for way in ways]
        lines.append([case, *cells, f"{ours.by_gloo:.3g}", f"{ours.by_kept:.3g}"])
    table = markdown(["on 2 ranks", *ways, "ringdp / gloo", f"ringdp / gloo{KEPT}"], lines)
    least = found["DDP step", "nothing"].by_kept
    return (
        f"{table}\n\nDDP whose hook reduces nothing takes {least:.3g} of its step over gloo{KEPT}."
    )


def ddp_step() -> str:
    """Times of a step, and its overlap over a slow link, from `python -m bench.ddp_step`."""
    found = load("ddp_step")
    default = ddp.Overlap(**found["slow_link"][0])
    return (
        _steps(found, "torch's DDP over gloo") + "\n\n"
        f"Over an emulated link of {default.mb_per_s:.0f} MB/s, where all reductions take "
        f"{default.communication:.0f} ms and backward {default.backward:.0f} ms, forward and "
        f"backward take {default.exposed:.0f} ms longer than without communication: "
        f"{default.hidden_share:.0%} is hidden, and {default.without_copies:.0%} but for the "
        f"{default.copies:.0f} ms for which the emulation itself takes the core."
    )


def zero_step() -> str:
    """Times of a step, and its overlap over a slow link, from `python -m bench.zero_step`."""
    found = load("zero_step")
    default, drawn = (zero.Overlap(**row) for row in found["slow_link"])
    return (
        _steps(found, "FSDP2 over gloo") + "\n\n"
        f"Over an emulated link of {default.mb_per_s:.0f} MB/s, where a step's communication "
        f"takes {default.communication:.0f} ms and its compute {default.silent:.0f} ms, "
        f"stage 3 takes {default.together:.0f} ms. All could be hidden but the "
        f"{default.edges:.0f} ms of the first two gathers and the last reduction, beside which "
        f"there is nothing to compute: of {default.communication - default.edges:.0f} ms "
        f"{default.hidden:.0f} are, {default.hidden_share:.0%}. "
        f"With {drawn.ahead} blocks gathered ahead instead of "
        f"{default.ahead}, as drawn here, it takes {drawn.together:.0f} ms, and "
        f"of {drawn.communication - drawn.edges:.0f} ms {drawn.hidden:.0f} are hidden, "
        f"{drawn.hidden_share:.0%}."
    )


def muon_step() -> str:
    """Times of a step with Muon, from `python -m bench.muon_step`."""
    return _steps(load("muon_step"), "FSDP2 over gloo")


def replicas() -> str:
    """Steps on two hosts, from `python -m bench.replicas`."""
    found = load("replicas")
    lines = []
    for row in found["steps"]:
        cells = [f"{row[name]:,.0f}" for name in ("min", "median", "max", "mb")]
        lines.append([row["name"], *cells, *(f"{ratio:.2f}" for ratio in row["by"].values())])
    model = f"{found['parameters']:,} parameters, 2 hosts of 2 ranks, {found['rate']}/s"
    others = ("/ FSDP2", "/ the same, pieces", "/ the same, replicas")
    return markdown([model, "min, ms", "median", "max", "MB a host sends", *others], lines)


def _steps(found: dict[str, Any], peer: str) -> str:
    others = [f"/ {other}" for other in ("one process alone", peer, "the same, freed memory kept")]
    model = f"{found['parameters']:,} parameters, {found['ranks']} ranks"
    lines = []
    for row in (turns.Row(**row) for row in found["steps"]):
        cells = [f"{ms:,.0f}" for ms in (row.min, row.median, row.max)]
        cells += [f"{row.by[way]:.2f}" for way in ("alone", "peer", "kept")]
        lines.append([row.name, *cells])
    return markdown([model, "min, ms", "median", "max", *others], lines)


def trace() -> str:
    """From `python -m bench.trace`."""
    found = load("trace")
    lines = []
    for row in (tracing.Row(**row) for row in found["rows"]):
        times = f"{row.off_median:,.3g}", f"{row.on_median:,.3g}"
        lines.append([row.name, *times, f"{row.slower:.1%}"])
    return markdown(
        [f"{found['ranks']} ranks, medians", "without a trace", "with one", "slower"], lines
    )


PARTS: dict[str, Callable[[], str]] = {
    part.__name__: part
    for part in (
        *(best, stages, machines, all_reduce, contenders, plots, ratios, small, guard),
        *(
            ddp_step,
            zero_step,
            muon_step,
            replicas,
            torch_backend,
            link,
            plan,
            trace,
            error,
            cpu_kernels,
        ),
        *(kernels, nccl, peer_memory),
    )
}


def render(page: Path) -> str:
    """The page with all generated parts up to date."""
    text = page.read_text(encoding="utf-8")
    made, count = PART.subn(lambda m: f"{m[1]}{PARTS[m[2]]()}\n{m[3]}", text)
    assert count == len(re.findall(r"<!-- \w+ -->", text)), f"a part in {page.name} has no end"
    return made


if __name__ == "__main__":
    from bench.plots import write

    FIGURE.write_text(figure(), encoding="utf-8")
    write(PLOTS)
    for page in PAGES:
        page.write_text(render(page), encoding="utf-8")
