"""`ringdp show`: proves a schedule, and shows it as text, drawings, and one rank's program.

Text has at most 80 columns. S is the size of a rank's whole buffer, all chunks together.
"""

import inspect
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from sys import float_info
from typing import Annotated, cast

from rich.console import Console
from typer import Argument, Option

from ringdp.cli.checks import between, check_writable, given, one_of, written
from ringdp.cli.console import counted, say_written
from ringdp.cli.files import write
from ringdp.errors import UsageError
from ringdp.schedule.algorithms import ALGORITHMS, COLLECTIVES, Collective
from ringdp.schedule.contracts import contract
from ringdp.schedule.cost import Machine, price, seconds
from ringdp.schedule.custom import proved
from ringdp.schedule.draw import WIDTH, grid, svg
from ringdp.schedule.ir import Schedule
from ringdp.schedule.liveness import fifo_depth
from ringdp.schedule.program import NONE, Program, fuse, project
from ringdp.schedule.replay import html

SIZES = [1 << p for p in range(10, 31, 4)]  # bytes, 1 KiB to 1 GiB
MOST_RANKS = 256  # a proof for more takes longer than anyone waits for a drawing


@dataclass(frozen=True)
class Options:
    """Prove an algorithm and draw it: who sends which chunk to whom in every round."""

    algorithm: Annotated[
        str, Argument(help="a name that --list lists, or FILE.py:function", show_default=False)
    ] = ""
    collective: Annotated[str, Option(help=f"what it must do: {', '.join(COLLECTIVES)}")] = (
        "all_reduce"
    )
    ranks: Annotated[int, Option(help="ranks that take part")] = 4
    svg: Annotated[Path | None, written("write a drawing of all rounds here")] = None
    html: Annotated[Path | None, written("write a page that replays it here")] = None
    program: Annotated[
        int | None, Option(help="also print this rank's program, plain and fused")
    ] = None
    cost: Annotated[bool, Option("--cost", help="also print what it costs")] = False
    alpha: Annotated[float, Option(help="for --cost: s per message")] = 1e-5
    beta: Annotated[float, Option(help="for --cost: s per byte moved")] = 1e-10
    gamma: Annotated[float, Option(help="for --cost: s per byte added")] = 2.5e-11
    bus: Annotated[float, Option(help="for --cost: s per byte through memory that all share")] = 0.0
    everything: Annotated[bool, Option("--list", help="list the algorithms")] = False

    @property
    def title(self) -> str:
        return f"{self.algorithm} {self.collective} on {counted(self.ranks, 'rank')}"

    @property
    def terms(self) -> dict[str, float]:
        """The parameters of the cost model."""
        return {term: getattr(self, term) for term in ("alpha", "beta", "gamma", "bus")}


def listing() -> str:
    """All algorithms by collective, each with the first paragraph of its docstring."""
    indent = max(len(a.name) for a in ALGORITHMS) + 4
    lines: list[str] = []
    for collective in COLLECTIVES:
        lines.append(collective)
        for a in ALGORITHMS:
            if a.collective == collective:
                says = (inspect.getdoc(a.build) or "").partition("\n\n")[0]
                head = f"  {a.name}".ljust(indent)
                lines += textwrap.wrap(
                    head + " ".join(says.split()),
                    WIDTH,
                    subsequent_indent=" " * indent,
                    break_on_hyphens=False,
                )
    return "\n".join(
        [
            *lines,
            "",
            "hierarchical:4 puts four ranks on a node. FILE.py:function is your own, a",
            "function n -> Schedule. S is the whole buffer of a rank.",
        ]
    )


def show(options: Options, console: Console) -> int:
    """Write the drawings that are asked for, then print. Returns the exit code, 0.

    Raises UsageError for bad input, and ScheduleError for an algorithm that does not do what
    `collective` asks.
    """
    if given(options) == ["everything"]:
        print(listing())
        return 0
    check(options)
    collective = cast(Collective, options.collective)
    schedule = proved(options.algorithm, collective, options.ranks)
    page = html(schedule, collective, title=options.title) if options.html else ""
    if options.svg:
        write(options.svg, svg(schedule))
    if options.html:
        write(options.html, page)
    print(text(options, schedule))
    if options.svg or options.html:
        print()
    say_written(console, options.svg)
    say_written(console, options.html)
    return 0


def check(options: Options) -> None:
    """Raise UsageError for the first thing that cannot work."""
    if options.everything or not options.algorithm:
        raise UsageError("show takes either an ALGORITHM, such as ring, or --list alone")
    ranks = options.ranks
    between("--ranks", ranks, 1, MOST_RANKS)
    between("--program", options.program, 0, ranks - 1, f"a rank from 0 to {ranks - 1}")
    for term, value in options.terms.items():
        if not options.cost and term in given(options):
            raise UsageError(f"--{term} changes what --cost prints; allowed: with --cost")
        between(f"--{term}", value, 0, float_info.max, "a finite time, at least 0 s")
    one_of("--collective", options.collective, COLLECTIVES)
    check_writable(options.svg, "--svg")
    check_writable(options.html, "--html")
    if options.svg and options.html and options.svg.resolve() == options.html.resolve():
        raise UsageError(f"--svg and --html are both {options.html}; allowed: two files")


def text(options: Options, schedule: Schedule) -> str:
    """The printed description of a proved schedule."""
    scratch = f"; chunks from {schedule.chunks} on are scratch" if schedule.scratch else ""
    lines = [
        f"{options.title}, proved",
        f"{counted(len(schedule.rounds), 'round')}, {counted(schedule.chunks, 'chunk')}, "
        f"{counted(schedule.scratch, 'scratch chunk')}, {sent(schedule)} sent per rank",
        "rank.chunk +> rank.chunk adds, -> replaces" + scratch,
        "",
        grid(schedule, whole=True) or "nothing moves",
    ]
    if options.program is not None:
        lines += _programs(schedule, cast(Collective, options.collective), options.program)
    if options.cost:
        lines += _cost(schedule, options)
    return "\n".join(lines)


def sent(schedule: Schedule) -> str:
    """Bytes sent per rank, such as `3/2 S`, or `0 to 2 S` if ranks differ."""
    counts = Counter(t.src for transfers in schedule.rounds for t in transfers if t.src != t.dst)
    each = [Fraction(counts[rank], schedule.chunks) for rank in range(schedule.ranks)]
    least, most = min(each), max(each)
    return f"{most} S" if least == most else f"{least} to {most} S"


def _programs(schedule: Schedule, collective: Collective, rank: int) -> Iterator[str]:
    """The rows of one rank's program, as projected and as fused."""
    promise = contract(collective, schedule.ranks, schedule.chunks)
    plain = [project(schedule, r) for r in range(schedule.ranks)]
    fused = [fuse(p, promise.kept(p.rank)) for p in plain]  # as in the communicator
    for name, programs in (("plain", plain), ("fused", fused)):
        rows = counted(len(programs[rank].rows), "row")
        yield f"\nrank {rank}, {name}: {rows}, least FIFO depth {fifo_depth(programs)}"
        yield from _table(programs[rank])


def _cost(schedule: Schedule, options: Options) -> Iterator[str]:
    """The schedule's price, and the times that it predicts for some sizes."""
    counts = price(schedule)
    machine = Machine(options.alpha, options.beta, options.gamma, options.bus)
    yield ""
    yield (
        f"{counts.messages} α + S ({counts.moved} β + {counts.reduced} γ + {counts.crossing} bus), "
        "by the slowest rank of each round"
    )
    terms = options.terms.items()
    yield "   ".join(f"{k} {x:.3g} {'s' if k == 'alpha' else 's/B'}" for k, x in terms)
    yield f"{'bytes':>13} {'predicted µs':>14}"
    for size in SIZES:
        yield f"{size:>13,} {seconds(counts, machine, size) * 1e6:>14,.1f}"


def _table(program: Program) -> Iterator[str]:
    yield f"{'round':>5}  {'name':<21} {'recv':>5} {'send':>5} {'src':>5} {'dst':>5}"
    for row in program:
        numbers = (row.recv_peer, row.send_peer, row.src_chunk, row.dst_chunk)
        cells = " ".join(f"{'-' if x == NONE else x:>5}" for x in numbers)
        yield f"{row.round:>5}  {row.name:<21} {cells}"
