"""User-defined algorithms: a function n -> Schedule, proved before it is used.

An algorithm is given by its name, as `FILE.py:function`, or as the function itself; `proved` takes
all three. A function's result is first checked to be a schedule over n ranks (else UsageError), and
then proved (else ScheduleError). A file is run from source each time, without module search: it can
import packages, but not the files beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import index
from pathlib import Path
from traceback import extract_tb
from types import FunctionType, ModuleType

from ringdp.errors import ScheduleError, UsageError
from ringdp.schedule.algorithms import Collective, check_collective, rooted, schedule
from ringdp.schedule.contracts import contract
from ringdp.schedule.ir import Schedule, Transfer, short
from ringdp.schedule.verify import verify

Builder = Callable[[int], Schedule]
MOST_CHUNKS = 1 << 20  # a proof visits every slot: over 2 ranks, 10 s


def proved(algorithm: str | Builder, collective: Collective, n: int, root: int = 0) -> Schedule:
    """Return the algorithm's schedule for n ranks, proved to meet the contract of `collective`.

    A function builds the schedule for root 0; for another `root` the ranks are renamed.

    Raises UsageError if the algorithm is unknown, or if a function or its file is missing, raises,
    or returns something other than a schedule over n ranks. Raises ScheduleError, which names the
    faulty transfer, if the schedule is wrong.
    """
    if isinstance(algorithm, str) and not _is_file(algorithm):
        plan = schedule(collective, algorithm, n, root)
    else:
        check_collective(collective, n)
        builder = load(algorithm) if isinstance(algorithm, str) else algorithm
        plan = rooted(_build(builder, name_of(algorithm), n), root)
    try:
        verify(plan, contract(collective, n, plan.chunks, root))
    except ScheduleError as error:
        raise ScheduleError(
            f"{name_of(algorithm)} is no {collective} on {n} ranks: {error}"
        ) from None
    return plan


def load(where: str) -> Builder:
    """Return the function that `FILE.py:function` names. Raises UsageError if there is none."""
    file, _, name = where.rpartition(":")
    if not file:
        raise UsageError(f"{where} names no function; allowed: {where}:function")
    try:
        source = Path(file).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    module = ModuleType(f"ringdp_own_{Path(file).stem}")
    module.__file__ = file
    sys.modules[module.__name__] = module  # dataclasses look up their module there
    try:
        exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{file} raised {said(error, file)}") from error
    found = getattr(module, name, None)
    if not callable(found):
        here = [k for k, v in vars(module).items() if _is_function_of(module, v)]
        raise UsageError(f"{file} has no function {name!r}; it has {', '.join(here) or 'none'}")
    builder: Builder = found
    return builder


def _is_file(algorithm: str) -> bool:
    return algorithm.endswith(".py") or algorithm.rpartition(":")[0].endswith(".py")


def _is_function_of(module: ModuleType, value: object) -> bool:
    return isinstance(value, FunctionType) and value.__module__ == module.__name__


def name_of(algorithm: str | Builder) -> str:
    """Return the algorithm's name; for a callable without one, such as a partial, its repr."""
    if isinstance(algorithm, str):
        return algorithm
    return getattr(algorithm, "__qualname__", repr(algorithm))


def _build(builder: Builder, name: str, n: int) -> Schedule:
    """Return builder(n), checked, with all its numbers converted to int."""
    call = f"{name}({n})"
    try:
        plan = builder(n)
    except (Exception, SystemExit) as error:
        file = getattr(getattr(builder, "__code__", None), "co_filename", "")
        raise UsageError(f"{call} raised {said(error, file)}") from error
    if not isinstance(plan, Schedule):
        raise UsageError(f"{call} returned {short(plan)}; allowed: a ringdp.schedule.Schedule")
    if plan.ranks != n:
        raise UsageError(f"{call} returned a schedule over {plan.ranks} ranks; allowed: {n}")
    if not isinstance(plan.chunks, int) or not 1 <= plan.chunks <= MOST_CHUNKS:
        raise UsageError(
            f"{call} returned a schedule of {short(plan.chunks)} chunks; allowed: a whole number "
            f"from 1 to {MOST_CHUNKS} (a chunk is a part of any buffer, not a number of bytes)"
        )
    rounds = [tuple(_transfer(t, call, r) for t in ts) for r, ts in enumerate(plan.rounds)]
    plan = Schedule(n, plan.chunks, tuple(rounds))
    if plan.chunks + plan.scratch > MOST_CHUNKS:
        raise UsageError(
            f"{call} returned a schedule of {plan.chunks + plan.scratch} chunks, scratch included; "
            f"allowed: at most {MOST_CHUNKS}, the highest index in a transfer plus 1"
        )
    return plan


def _transfer(t: Transfer, call: str, r: int) -> Transfer:
    try:
        src, dst, read, write = (index(number) for number in t[:4])
    except TypeError:
        raise UsageError(
            f"{call} returned {short(t)} in round {r}; "
            "allowed: Transfer(src, dst, read, write, reduce) of whole numbers"
        ) from None
    return Transfer(src, dst, read, write, bool(t.reduce))


def said(error: BaseException, file: str) -> str:
    """Describe an error: its type, its first line, and the last line of `file` in its traceback."""
    text = (str(error).splitlines() or [""])[0]
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == file]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"
