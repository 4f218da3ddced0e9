"""The options of `ringdp train`, and their checks before any rank starts.

The fields are the command's options as typed, and the class's docstring is the command's help.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import BadParameter, Option

from ringdp.cli.checks import between, check_writable, given, names, written
from ringdp.comm.rendezvous import TRANSPORTS
from ringdp.errors import UsageError

STAGES = (0, 1, 2, 3)
MODES = ("naive", "parameter-server", "async", "ddp")
MOST_RANKS = 64  # all ranks are processes of this machine
LEAST_BATCH = 16  # the default global batch is the least multiple of the ranks from here on


def _path(given: str) -> Path:
    """An empty path, as of a shell's variable that is not set, is not the current folder."""
    if not given:
        raise BadParameter("a path is empty; allowed: . for the current folder")
    return Path(given)


@dataclass(frozen=True)
class Options:
    """Train a byte-level GPT with every stage and compare them, with one another and with one
    process alone: losses, bytes held, bytes sent."""

    ranks: Annotated[int, Option(help="processes that train together")] = 2
    stage: Annotated[
        str | None, Option(help="all (if not given), or some of 0,1,2,3: DDP and ZeRO's three")
    ] = None
    mode: Annotated[
        str | None, Option(help=f"instead of stages: all, or some of {','.join(MODES)}")
    ] = None
    transport: Annotated[
        str, Option(help=f"how the ranks of a stage exchange bytes: {', '.join(TRANSPORTS)}")
    ] = "shm"
    steps: Annotated[int, Option(help="optimizer steps of each run")] = 120
    seed: Annotated[int, Option(help="fixes the model and the batches")] = 0
    batch: Annotated[
        int | None,
        Option(
            help=f"rows of a global batch, a multiple of ranks; at least {LEAST_BATCH} if not given"
        ),
    ] = None
    context: Annotated[int, Option(help="bytes of a row")] = 64
    learning_rate: Annotated[float, Option(help="learning rate of AdamW")] = 1e-3
    text: Annotated[
        Path | None,
        Option(
            parser=_path,
            metavar="<path>",
            help="file or directory to learn; by default the standard library's sources",
        ),
    ] = None
    json: Annotated[Path | None, written("write the results here")] = None
    trace: Annotated[
        Path | None, written("write a trace of all ranks here, for `ringdp report`")
    ] = None
    reference: Annotated[bool, Option(help="also train in one process and compare")] = True
    sample: Annotated[bool, Option(help="let the trained model write a line")] = True

    @property
    def stages(self) -> tuple[int, ...]:
        """Empty if modes are asked for instead."""
        if self.stage is None:
            return STAGES if self.mode is None else ()
        return parse_stages(self.stage)

    @property
    def modes(self) -> tuple[str, ...]:
        return () if self.mode is None else _some_of("--mode", self.mode, MODES, "async,ddp")

    @property
    def global_batch(self) -> int:
        """The number of rows that all ranks learn in a step."""
        if self.batch is not None:
            return self.batch
        return -(-LEAST_BATCH // self.ranks) * self.ranks

    def rows(self, worker: int) -> slice:
        """The rows of the global batch that one of `ranks` workers learns."""
        share = self.global_batch // self.ranks
        return slice(worker * share, (worker + 1) * share)


def parse_stages(stages: str) -> tuple[int, ...]:
    return tuple(map(int, _some_of("--stage", stages, tuple(map(str, STAGES)), "0,3")))


def _some_of(option: str, value: str, among: tuple[str, ...], example: str) -> tuple[str, ...]:
    """Parse `all`, or a list with commas."""
    if value.strip() == "all":
        return among
    words = names(value)
    if not words or not set(words) <= set(among):
        allowed = f"all, {', '.join(among)}, or some as in {example}"
        raise UsageError(f"{option} is {value!r}; allowed: {allowed}")
    return words


def check(options: Options) -> None:
    """Raise UsageError for the first number or path that cannot work."""
    if options.stages and options.modes:
        raise UsageError("train takes either --stage or --mode")
    between("--ranks", options.ranks, 1, MOST_RANKS)
    between("--steps", options.steps, 1, 1_000_000)
    between("--seed", options.seed, 0, 2**63 - 1)
    between("--batch", options.global_batch, 1, 65_536)
    between("--context", options.context, 1, 65_536)
    if options.global_batch % options.ranks:
        raise UsageError(
            f"--batch is {options.batch}; allowed: a multiple of --ranks, which is {options.ranks}"
        )
    between("--learning-rate", options.learning_rate, math.ulp(0), 1, "above 0, at most 1")
    check_writable(options.json)
    for option in ("transport", "trace"):
        if options.modes and option in given(options):
            raise UsageError(f"--{option} is given with --mode; allowed: with --stage")
    check_writable(options.trace, "--trace", trace=True)
    if options.json and options.trace and options.json.resolve() == options.trace.resolve():
        raise UsageError(f"--json and --trace are both {options.trace}; allowed: two files")
