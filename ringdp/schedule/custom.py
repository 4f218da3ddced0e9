"""A user's own algorithm: a function n -> Schedule, in hand or in a file, proved before it is used.

An algorithm is asked for by its name, by `FILE.py:function`, or as the function itself; `proved`
takes all three. What a function returns is checked for its form first (UsageError: it is no
schedule over n ranks) and then proved (ScheduleError: it is one, and wrong). A file is run from its
source each time, with no module search: it may import packages, not the files beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import index
from pathlib import Path
from traceback import extract_tb
from types import FunctionType, ModuleType

from ringdp.errors import ScheduleError, UsageError
from ringdp.schedule.algorithms import Collective, check_asked, rooted, schedule
from ringdp.schedule.contracts import contract
from ringdp.schedule.ir import Schedule, Transfer, short
from ringdp.schedule.verify import verify

Builder = Callable[[int], Schedule]


def proved(algorithm: str | Builder, collective: Collective, n: int, root: int = 0) -> Schedule:
    """The algorithm's schedule for n ranks, which keeps the contract of `collective`.

    A function says what happens with root 0; for another `root` the ranks are renamed.

    Raises UsageError where there is no such algorithm, or where a function or its file is missing,
    raises, or makes something else than a schedule over n ranks. Raises ScheduleError, with the
    transfer at fault, where the schedule is wrong.
    """
    if isinstance(algorithm, str) and not _is_file(algorithm):
        made = schedule(collective, algorithm, n, root)
    else:
        check_asked(collective, n)
        builder = load(algorithm) if isinstance(algorithm, str) else algorithm
        made = _made(builder, name_of(algorithm), n)
        made = rooted(made, root)
    try:
        verify(made, contract(collective, n, made.chunks, root))
    except ScheduleError as error:
        raise ScheduleError(
            f"{name_of(algorithm)} is no {collective} on {n} ranks: {error}"
        ) from None
    return made


def load(where: str) -> Builder:
    """The function that `FILE.py:function` names. Raises UsageError where there is none."""
    file, _, name = where.rpartition(":")
    if not file:
        raise UsageError(f"{where} names no function; allowed: {where}:function")
    try:
        source = Path(file).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    module = ModuleType(f"ringdp_own_{Path(file).stem}")
    module.__file__ = file
    sys.modules[module.__name__] = module  # dataclasses look their module up there
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
    """A `functools.partial`, for one, has no name, and is called by its repr."""
    if isinstance(algorithm, str):
        return algorithm
    return getattr(algorithm, "__qualname__", repr(algorithm))


def _made(builder: Builder, name: str, n: int) -> Schedule:
    """builder(n), with whatever it used for whole numbers made ints."""
    try:
        made = builder(n)
    except (Exception, SystemExit) as error:
        file = getattr(getattr(builder, "__code__", None), "co_filename", "")
        raise UsageError(f"{name}({n}) raised {said(error, file)}") from error
    if not isinstance(made, Schedule):
        raise UsageError(f"{name}({n}) returned {short(made)}; allowed: a ringdp.schedule.Schedule")
    if made.ranks != n:
        raise UsageError(f"{name}({n}) returned a schedule over {made.ranks} ranks; allowed: {n}")
    if not isinstance(made.chunks, int) or made.chunks < 1:
        raise UsageError(
            f"{name}({n}) returned a schedule of {short(made.chunks)} chunks; allowed: at least 1"
        )
    return Schedule(
        n,
        made.chunks,
        tuple(
            tuple(_transfer(t, f"{name}({n})", r) for t in ts) for r, ts in enumerate(made.rounds)
        ),
    )


def _transfer(t: Transfer, what: str, r: int) -> Transfer:
    try:
        src, dst, read, write = (index(number) for number in t[:4])
    except TypeError:
        raise UsageError(
            f"{what} returned {short(t)} in round {r}; "
            "allowed: Transfer(src, dst, read, write, reduce) of whole numbers"
        ) from None
    return Transfer(src, dst, read, write, bool(t.reduce))


def said(error: BaseException, file: str) -> str:
    """Its type, its first line, and the last line of `file` that it came through."""
    text = (str(error).splitlines() or [""])[0]
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == file]
    where = f" (line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}"
