"""What `ringdp train` is asked to do, checked before a rank starts.

Every refusal is a UsageError of one line: the option, what was given, what is allowed.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from ringdp.cli.checks import between, check_writable
from ringdp.comm.tracing import unwritable
from ringdp.errors import UsageError

STAGES = (0, 1, 2, 3)
MODES = ("naive", "parameter-server", "async", "ddp")
MOST_RANKS = 64  # all ranks are processes of this machine
LEAST_BATCH = 16  # the default global batch is the least multiple of the ranks from here on


@dataclass(frozen=True)
class Options:
    """One run of the command. `batch` counts the rows of all ranks together."""

    ranks: int = 2
    stages: tuple[int, ...] = STAGES
    modes: tuple[str, ...] = ()  # instead of the stages, where there are any
    transport: str = "shm"  # of the stages
    steps: int = 120
    seed: int = 0
    batch: int = LEAST_BATCH
    context: int = 64
    learning_rate: float = 1e-3
    text: Path | None = None
    json: Path | None = None
    trace: Path | None = None
    reference: bool = True
    sample: bool = True


def default_batch(ranks: int) -> int:
    return -(-LEAST_BATCH // max(ranks, 1)) * max(ranks, 1)


def parse_stages(given: str) -> tuple[int, ...]:
    return tuple(map(int, _some_of("--stage", given, tuple(map(str, STAGES)), "0,3")))


def parse_modes(given: str) -> tuple[str, ...]:
    return _some_of("--mode", given, MODES, "async,ddp")


def _some_of(option: str, given: str, among: tuple[str, ...], example: str) -> tuple[str, ...]:
    """`all`, or some between commas, each once and in the order given."""
    if given.strip() == "all":
        return among
    words = [word.strip() for word in given.split(",")]
    if not set(words) <= set(among):
        allowed = f"all, {', '.join(among)}, or some as in {example}"
        raise UsageError(f"{option} is {given!r}; allowed: {allowed}")
    return tuple(dict.fromkeys(words))


def check(options: Options) -> None:
    """Raise UsageError for the first number or path that cannot work."""
    between("--ranks", options.ranks, 1, MOST_RANKS)
    between("--steps", options.steps, 1, 1_000_000)
    between("--seed", options.seed, 0, 2**63 - 1)
    between("--batch", options.batch, 1, 65_536)
    between("--context", options.context, 1, 65_536)
    if options.batch % options.ranks:
        raise UsageError(
            f"--batch is {options.batch}; allowed: a multiple of --ranks, which is {options.ranks}"
        )
    if not (math.isfinite(options.learning_rate) and 0 < options.learning_rate <= 1):
        raise UsageError(f"--learning-rate is {options.learning_rate}; allowed: above 0, at most 1")
    check_writable(options.json)
    for option in ("transport", "trace") if options.modes else ():
        if getattr(options, option) != getattr(Options, option):
            raise UsageError(f"--{option} is given with --mode; allowed: with --stage")
    if options.trace is not None:
        if complaint := unwritable("--trace", options.trace):
            raise UsageError(complaint)
        if options.json is not None and options.json.resolve() == options.trace.resolve():
            raise UsageError(f"--json and --trace are both {options.trace}; allowed: two files")
