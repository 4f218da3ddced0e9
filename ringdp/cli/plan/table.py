"""The tables of `ringdp plan` and `ringdp plan --published`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from rich.console import Console

from ringdp.cli.console import counted, say, show_table, table
from ringdp.cli.plan.models import Model
from ringdp.cli.plan.options import UTILISATION, Options
from ringdp.cli.plan.published import figures
from ringdp.cli.plan.stages import Row, Setting
from ringdp.schedule.cost import Machine

LEFT_OUT = (
    "Left out: activations, attention's own flops (2 a parameter and token forward, 4 backward), "
    "launches, the input."
)


class Scale(NamedTuple):
    name: str
    size: float


BYTES = (Scale("GB", 1e9), Scale("MB", 1e6), Scale("kB", 1e3))
SECONDS = (Scale("ms", 1e-3), Scale("µs", 1e-6))


def show(
    console: Console,
    options: Options,
    model: Model,
    setting: Setting,
    rows: Sequence[Row],
    says: str,
) -> None:
    share = options.utilisation or UTILISATION
    rate = "given" if options.flops else f"{options.device} × {share:g}, assumed"
    network = setting.network
    fits = [f"{name}: {terms(machine)}" for name, machine in network.fitted.items()]
    shares = f"; the {network.cores} cores that compute move the bytes, so nothing is hidden"
    hides = "" if network.beside(setting.ranks) else shares
    for line in (
        f"{model.name}: {model.elements:,} parameters in {counted(model.units, 'unit')}, "
        f"{options.precision}",
        f"{counted(setting.ranks, 'rank')}, {setting.tokens:,} tokens each; "
        f"{setting.flops / 1e12:.4g} Tflop/s ({rate}); memory {setting.memory / 1e9:.4g} GB",
        f"{setting.algorithm}; {network.source}{hides}",
        *(fits or [terms(network.machine)]),
        *_parts(setting),
    ):
        say(console, line)
    of_bytes = _scale(BYTES, max(r.total for r in rows))
    of_sent = _scale(BYTES, max(r.sent for r in rows))
    of_times = _scale(SECONDS, max(r.step.total for r in rows))
    heading = f"\nHeld by a rank beside activations, {of_bytes.name}; "
    say(console, heading + "parameters of the largest model that fits")
    categories = ("params", "gathered", "grads", "buckets", "optimizer")
    held = table("stage", *categories, "total", "fits", "largest")
    for r in rows:
        cells = [f"{b / of_bytes.size:,.3f}" for b in (*r.memory, r.total)]
        held.add_row(str(r.stage), *cells, "yes" if r.fits else "no", _largest(r.largest))
    show_table(console, held)
    say(console, f"One step of a rank: {of_sent.name} sent, {of_times.name} predicted")
    times = table("stage", "sent", "compute", "wire", "hidden", "exposed", "optimizer", "step", "")
    for r in rows:
        s = r.step
        parts = (s.compute, s.communication, s.hidden, s.exposed, s.optimizer, s.total)
        label = "*" if r.extrapolated else ""
        cells = [f"{x / of_times.size:,.2f}" for x in parts]
        times.add_row(str(r.stage), f"{r.sent / of_sent.size:,.3f}", *cells, label)
    show_table(console, times)
    for reasons in dict.fromkeys("; ".join(r.extrapolated) for r in rows if r.extrapolated):
        say(console, f"* Extrapolated: {reasons}.")
    say(console, LEFT_OUT)
    say(console, f"Recommended: {says}.")


def _parts(setting: Setting) -> Iterator[str]:
    if setting.replicas > 1:
        yield (
            f"in stages 1 to 3 {counted(setting.replicas, 'replica')}, each of "
            f"{counted(setting.ranks // setting.replicas, 'rank')}: {setting.within.source}"
        )
        yield terms(setting.within.machine)
    if setting.nearby and (setting.near or 1) > 1:
        yield (
            f"in stage 3 each {setting.near} ranks gather a unit for its backward: "
            f"{setting.nearby.source}"
        )
        yield terms(setting.nearby.machine)


def terms(machine: Machine) -> str:
    """The terms of the cost model, as text."""
    *each, caches = machine
    units = ("s", "s/B", "s/B", "s/B", "s")
    named = zip(("α", "β", "γ", "bus", "call"), each, units, strict=True)
    found = [f"{name} {x:.3g} {unit}" for name, x, unit in named if x]
    found += [f"bus +{more:.3g} s/B past {end / 1e6:.3g} MB" for end, more in caches]
    return ", ".join(found)


def _scale(scales: Sequence[Scale], most: float) -> Scale:
    """The largest scale on which `most` is at least 1, or the last."""
    return next((scale for scale in scales if most >= scale.size), scales[-1])


def _largest(elements: int) -> str:
    if elements >= 10_000_000:
        return f"{elements / 1e9:,.2f}e9"
    return f"{elements:,}" if elements else "none"


def show_published(console: Console) -> int:
    """Print published figures, each beside both formulas."""
    for source, group in groupby(figures(), key=lambda f: f.source):
        made = table("stage", "published", "their formula", "ringdp, bf16")
        for f in group:
            figures_of = (f"{f.published:g}", f"{f.theirs:.2f}", f"{f.engine:.2f}")
            made.add_row(str(f.stage), *figures_of)
        say(console, f"\n{source}")
        show_table(console, made)
    say(
        console,
        "ZeRO's formula is the engine's for 2-byte parameters with 12 bytes of state an element. "
        "In bf16 the engine holds gradients for its optimizer in float32, and in stage 1 the "
        "whole ones in bf16 too. DeepSpeed's stage 2 counts every gradient whole, the engine's "
        "two buckets; in stage 3 both hold 18 bytes an element over n, DeepSpeed and one layer, "
        "the engine and two units gathered, two buckets. ZeRO's rows leave these out.",
    )
    return 0
