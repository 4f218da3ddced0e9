"""`ringdp bench error`: how far sums are from float64's, by algorithm, dtype and number of ranks.

The simulator runs the schedules. It adds in the same order as every other transport, so a row holds
for real runs too. Errors are counted in ulps of the exact sum, the distance between neighbours of
the dtype at that value; a sum that is rounded once is at most half an ulp off. There are two kinds
of inputs:

    positive   uniform in [1, 2): nothing cancels, so at most n - 1 additions, and as many roundings
               of partial sums that are sent on, leave an error of at most 2 (n - 1) ulps
    normal     like gradients: if a sum nearly cancels, its ulps are small and its error is many of
               them; an exact sum of zero has no ulp, and is left out of mean and maximum
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from torch import Tensor

from ringdp.cli.bench.cases import torch_dtype
from ringdp.cli.bench.options import Options, only
from ringdp.cli.bench.rows import named
from ringdp.cli.checks import check_writable
from ringdp.cli.console import finish, say, show_table, table
from ringdp.comm.programs import program
from ringdp.schedule import ALGORITHMS
from ringdp.transport.simulator import simulate

RANKS = (2, 3, 4, 8, 16, 64)
DTYPES = ("float32", "float16", "bfloat16")
KEYS = ("dtype", "algorithm")  # columns
ELEMENTS = 8192  # of a buffer: enough for a mean over each of the 64 chunks of a ring of 64
INPUTS: dict[str, Callable[[torch.Generator], Tensor]] = {
    "positive": lambda g: 1 + torch.rand(ELEMENTS, generator=g),
    "normal": lambda g: torch.randn(ELEMENTS, generator=g),
}


@dataclass(frozen=True)
class Row:
    """Errors in ulps, over all elements whose exact sum is not zero."""

    algorithm: str
    dtype: str
    ranks: int
    inputs: str
    mean: float
    max: float
    rounded_right: float  # share of elements as near to the exact sum as the dtype allows
    same_on_all_ranks: bool


def check(options: Options) -> tuple[str, ...]:
    """Return the algorithms. Raises UsageError for options that do not apply here."""
    only(
        options,
        ("algorithm", "json"),
        "for what is timed; bench error takes --algorithm and --json, and goes through "
        f"{', '.join(DTYPES)} on {', '.join(map(str, RANKS))} ranks",
    )
    check_writable(options.json)
    if options.algorithm == Options.algorithm:
        return tuple(a.name for a in ALGORITHMS if a.collective == "all_reduce")
    algorithms = tuple(dict.fromkeys(map(named, options.algorithms)))
    for name in algorithms:  # raises for an algorithm that does not exist or is wrong
        program("all_reduce", name, RANKS[0], 0, 0, None)
    return algorithms


def bench(options: Options, console: Console) -> int:
    algorithms = check(options)
    rows: list[Row] = []
    for algorithm in algorithms:
        say(console, f"adding by {algorithm}")
        rows += [row for n in RANKS for row in measure(algorithm, n)]
    finish(console, options.json, rows, lambda: show(rows, console))
    return 0


def measure(algorithm: str, n: int) -> list[Row]:
    """A row for each dtype and kind of input. Raises ScheduleError if it is wrong for n."""
    programs = [program("all_reduce", algorithm, n, rank, 0, None) for rank in range(n)]
    rows = []
    for dtype in DTYPES:
        for inputs, make in INPUTS.items():
            g = torch.Generator().manual_seed(n)
            buffers = [make(g).to(torch_dtype(dtype)) for _ in range(n)]
            exact = torch.stack(buffers).double().sum(0)
            simulate(programs, buffers)
            found = ulps(buffers[0], exact)
            best = ulps(exact.to(torch_dtype(dtype)), exact)
            counted = found[exact != 0]
            rows.append(
                Row(
                    algorithm=algorithm,
                    dtype=dtype,
                    ranks=n,
                    inputs=inputs,
                    mean=round(counted.mean().item(), 4),
                    max=round(counted.max().item(), 4),
                    rounded_right=round((found <= best).double().mean().item(), 4),
                    same_on_all_ranks=all(torch.equal(b, buffers[0]) for b in buffers),
                )
            )
    return rows


def ulps(found: Tensor, exact: Tensor) -> Tensor:
    """|found - exact| in units in the last place of found's dtype; both finite, exact in float64.

    An ulp is 2^(e - p) if 2^(e-1) <= |exact| < 2^e and the dtype has p bits. For 0 and subnormal
    values it is the dtype's smallest.
    """
    limits = torch.finfo(found.dtype)
    unit = torch.ldexp(torch.full_like(exact, limits.eps / 2), torch.frexp(exact).exponent)
    least = limits.smallest_normal * limits.eps
    unit = torch.where(exact == 0, least, unit.clamp(min=least))
    return (found.double() - exact).abs() / unit


def show(rows: Sequence[Row], console: Console) -> None:
    says = f"Errors of all_reduce against float64 in ulps: mean and greatest of {ELEMENTS:,} sums"
    for inputs in INPUTS:
        made = table(*KEYS, *(f"{n} ranks" for n in RANKS), left=KEYS)
        for dtype in DTYPES:
            of_dtype = [r for r in rows if (r.dtype, r.inputs) == (dtype, inputs)]
            for algorithm in dict.fromkeys(r.algorithm for r in of_dtype):
                found = [r for r in of_dtype if r.algorithm == algorithm]
                cells = [f"{_number(r.mean)} {_number(r.max)}" for r in found]
                made.add_row(dtype, algorithm, *cells)
            made.add_section()
        say(console, f"\n{says} of {inputs} inputs.")
        show_table(console, made, len(KEYS))


def _number(x: float) -> str:
    return f"{x:.2f}" if x < 1000 else f"{x:,.0f}" if x < 1e6 else f"{x:.0e}"
