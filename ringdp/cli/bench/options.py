"""The options of `ringdp bench`, and their checks before any process starts.

The fields are the command's options as typed, and the class's docstring is the command's help.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ringdp.cli import gpus
from ringdp.cli.bench import peers
from ringdp.cli.bench.cases import CASES, DTYPES, FOLDS, elements
from ringdp.cli.bench.rows import LIBRARYS, priced
from ringdp.cli.checks import between, check_writable, given, names, one_of, parse_bytes, written
from ringdp.cli.options import MOST_RANKS
from ringdp.comm.rendezvous import TRANSPORTS
from ringdp.errors import UsageError

MOST_BYTES = 4 << 30
KERNELS, ERROR = "kernels", "error"  # what can be measured instead of a collective
MEASURED = (*CASES, KERNELS, ERROR)


@dataclass(frozen=True)
class Options:
    """Time a collective beside other libraries, the cost model's prediction and the physical bound,
    with every result checked; or `kernels` beside torch's ways and a plain copy. `error` counts how
    far the sums of each algorithm are from float64's. Where a collective's name ends in _v, rank
    r's part is r + 1 times as large as rank 0's. In `send` a message goes round all ranks, and its
    time is 1/n of the lap: with 2 ranks, half the round trip. Neither has a prediction."""

    collective: Annotated[str, Argument(help=", ".join(MEASURED))]
    ranks: Annotated[int, Option(help="processes of each contender")] = 2
    min: Annotated[str, Option(help="smallest buffer in bytes, as in 1K")] = "1K"
    max: Annotated[str, Option(help="largest buffer")] = "64M"
    factor: Annotated[int, Option(help="ratio of one size to the one before")] = 4
    dtype: Annotated[str, Option(help=", ".join(DTYPES))] = "float32"
    op: Annotated[str, Option(help=", ".join(FOLDS))] = "sum"
    algorithm: Annotated[
        str,
        Option(
            help="auto (what a call that names none runs: direct), names of `ringdp show --list`, "
            "or FILE.py:function; with commas"
        ),
    ] = "auto"
    transport: Annotated[
        str, Option(help=f"how ringdp exchanges bytes: {', '.join(TRANSPORTS)}; with commas")
    ] = "shm"
    registered: Annotated[
        bool | None,  # None: both kinds of buffers
        Option("--registered", help="ringdp's inputs lie in shared memory (comm.empty)"),
    ] = False
    peer: Annotated[
        str, Option(help=f"also time some of {','.join((*peers.PEERS, gpus.TORCHS))}")
    ] = ""
    rounds: Annotated[int, Option(help="rounds of each contender, interleaved")] = 10
    pin: Annotated[
        bool,
        Option(
            "--pin/--no-pin",
            help="keep every rank on one core, which gloo's ranks share with threads of their own",
        ),
    ] = True
    json: Annotated[Path | None, written("write the results here")] = None

    @property
    def least(self) -> int:
        """The smallest buffer, in bytes."""
        return parse_bytes("--min", self.min)

    @property
    def most(self) -> int:
        return parse_bytes("--max", self.max)

    @property
    def sizes(self) -> list[int]:
        """The sizes to measure, in bytes."""
        found = [self.least]
        while found[-1] * self.factor <= self.most:
            found.append(found[-1] * self.factor)
        return found

    @property
    def algorithms(self) -> tuple[str, ...]:
        return _some("--algorithm", self.algorithm, "auto, names, FILE.py:function")

    @property
    def transports(self) -> tuple[str, ...]:
        """ringdp's transports to measure."""
        return _some("--transport", self.transport, f"{', '.join(TRANSPORTS)}, between commas")

    @property
    def peers(self) -> tuple[str, ...]:
        return names(self.peer)

    @property
    def memories(self) -> tuple[bool, ...]:
        """For each kind of buffer to measure, whether it is registered."""
        return (False, True) if self.registered is None else (self.registered,)


def _some(option: str, given: str, allowed: str) -> tuple[str, ...]:
    """The names between commas. Raises UsageError if there are none."""
    if not (found := names(given)):
        raise UsageError(f"{option} is empty; allowed: {allowed}")
    return found


def has_own(transport: str) -> bool:
    """Whether the transport has collectives of its own, which the algorithm LIBRARYS asks for."""
    return transport.startswith(LIBRARYS)


def check(options: Options) -> None:
    """Raise UsageError for the first thing that cannot work, or ScheduleError for a wrong algorithm
    of the user's."""
    one_of("COLLECTIVE", options.collective, MEASURED)
    one_of("--dtype", options.dtype, DTYPES)
    one_of("--op", options.op, FOLDS)
    for transport in options.transports:
        gpus.check_transport(transport)
    if any(options.memories) and options.transports != ("shm",):
        raise UsageError("--registered is for memory that ranks share; allowed: --transport shm")
    between("--ranks", options.ranks, 2, MOST_RANKS)
    check_sizes(options, least=1)
    case = CASES[options.collective]
    if options.op != Options.op and not case.reduces:
        adding = ", ".join(name for name in CASES if CASES[name].reduces)
        raise UsageError(f"--op is for what is reduced: {adding}; {options.collective} only moves")
    if elements(case, options.dtype, options.sizes[0], options.ranks) == 0:
        raise UsageError(
            f"--min is {options.min}; allowed: at least {case.units(options.ranks)} "
            f"{options.dtype}, as {options.ranks} ranks share them"
        )
    without = options.collective in ("all_to_all_v", "send")
    if without and options.algorithm != Options.algorithm:
        raise UsageError(f"--algorithm: {options.collective} takes none; allowed: auto")
    for algorithm in () if without else options.algorithms:
        if algorithm != LIBRARYS or not any(map(has_own, options.transports)):
            priced(options.collective.removesuffix("_v"), algorithm, options.ranks)
    for peer in options.peers:
        peers.check(peer, options.dtype, options.collective)
    check_writable(options.json)


def check_sizes(options: Options, *, least: int) -> None:
    """Check the sizes, at least `least` bytes, and the number of rounds."""
    between("--min", options.least, least, MOST_BYTES)
    allowed = f"from --min, which is {options.min}, to {MOST_BYTES >> 30}G"
    between("--max", options.most, options.least, MOST_BYTES, allowed)
    between("--factor", options.factor, 2, 1 << 20)
    between("--rounds", options.rounds, 1, 10_000)


def only(options: Options, taken: Collection[str], says: str) -> None:
    """Raise UsageError for the first option given that is not in `taken`."""
    for name in given(options):
        if name not in ("collective", *taken):
            raise UsageError(f"--{name} is {says}")
