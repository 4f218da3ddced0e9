"""A user's algorithm is proved before it is used; one that is wrong is refused with a clear
error."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringdp.errors import ScheduleError, UsageError
from ringdp.schedule import Schedule, Transfer, schedule
from ringdp.schedule.custom import load, proved

STAR = """
from __future__ import annotations
from dataclasses import dataclass
from ringdp.schedule import Schedule, Transfer

@dataclass
class Root:
    rank: int = 0

def star(n: int) -> Schedule:
    up = Schedule(n, 1, (tuple(Transfer(r, Root().rank, 0, 0, reduce=True) for r in range(1, n)),))
    return up.then(up.transpose())

def lists(n):
    return Schedule(n, 1, [list(r) for r in star(n).rounds])

def silent(n):
    return Schedule(n, 1, ())

def raises(n):
    return 1 // (n - n)

ends = lambda n: exit()
number = 3

def nested(n):
    return raises(n)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(STAR, encoding="utf-8")
    return path


def star(n: int) -> Schedule:
    up = Schedule(n, 1, (tuple(Transfer(r, 0, 0, 0, reduce=True) for r in range(1, n)),))
    return up.then(up.transpose())


@pytest.mark.parametrize("n", [1, 2, 5])
def test_proved_takes_a_name_a_file_or_a_function(file: Path, n: int):
    assert proved("ring", "all_reduce", n) == schedule("all_reduce", "ring", n)
    assert proved(f"{file}:star", "all_reduce", n) == star(n)
    assert proved(f"{file}:lists", "all_reduce", n) == star(n)
    assert proved(star, "all_reduce", n) == star(n)
    assert hash(proved(f"{file}:lists", "all_reduce", n)) == hash(star(n))
    assert not list(file.parent.glob("__pycache__"))


def test_files_do_not_inherit_future_imports(tmp_path: Path):
    """The `from __future__` imports of ringdp's own modules must not apply to it."""
    path = tmp_path / "mine.py"
    path.write_text("def f(n: int): ...", encoding="utf-8")
    assert load(f"{path}:f").__annotations__ == {"n": int}


@pytest.mark.parametrize("algorithm", ["direct", lambda n: schedule("broadcast", "direct", n)])
def test_ranks_are_renamed_for_another_root(algorithm):
    assert proved(algorithm, "broadcast", 3, root=2) == schedule("broadcast", "direct", 3, 2)


def test_a_wrong_schedule_is_refused_with_the_failing_transfer(file: Path):
    message = r"mine.py:silent is no all_reduce on 2 ranks: at the end rank 0 chunk 0 holds 0\.0"
    with pytest.raises(ScheduleError, match=message):
        proved(f"{file}:silent", "all_reduce", 2)
    with pytest.raises(ScheduleError, match=r"(?s)round 2, transfer 1.0 \+> 0.0: .*  <-- here"):
        proved(lambda n: star(n).then(Schedule(n, 1, star(n).rounds[:1])), "all_reduce", 2)
    with pytest.raises(
        ScheduleError, match=r"star is no all_gather .* multiple of 2 chunks, not 1"
    ):
        proved(star, "all_gather", 2)


@pytest.mark.parametrize("reduce", [False, True])
def test_an_out_of_range_chunk_is_reported_as_scratch(reduce: bool):
    one = Transfer(0, 1, 0 if reduce else 1, 1, reduce)
    with pytest.raises(ScheduleError, match=r"rank [01] chunk 1 \(scratch\), which holds nothing"):
        proved(lambda n: Schedule(n, 1, ((one,),)), "all_reduce", 2)


ADDS = Transfer(0, 1, 0, 0, reduce=True)


def transfers(*given: object):
    return lambda n: Schedule(n, 1, (given,))  # type: ignore[arg-type]


FUNCTIONS = {
    "raises": (lambda n: {}[n], r"raised KeyError: 2 \(line \d+\)"),
    "nothing": (lambda n: None, r"\(2\) returned None; allowed: a ringdp.schedule.Schedule"),
    "the class": (lambda n: Schedule, "returned <class"),
    "other ranks": (lambda n: star(n + 1), "a schedule over 3 ranks; allowed: 2"),
    "no chunks": (lambda n: Schedule(n, 0, ()), "of 0 chunks; allowed: a whole number"),
    "half a chunk": (lambda n: Schedule(n, 1.5, ()), "of 1.5 chunks; allowed: a whole number"),
    "bytes as chunks": (lambda n: Schedule(n, 1 << 30, ()), r"of 1073741824 chunks; .* to 1048576"),
    "no rounds": (lambda n: Schedule(n, 1, None), r"Schedule\(rounds=None\): allowed: a tuple of"),
    "rounds of one": (lambda n: Schedule(n, 1, ADDS), r"Schedule\(rounds=Transfer\(src=0, .*"),
    "flat rounds": (lambda n: Schedule(n, 1, (3,)), "round 0 is 3; allowed: a tuple of Transfers"),
    "one transfer deep": (
        lambda n: Schedule(n, 1, ((ADDS,), ADDS)).transpose(),
        r"round 1 is Transfer\(src=0, .*reduce=True\); allowed: .* as \(Transfer.* \(line \d+\)",
    ),
    "tuples": (transfers((0, 1, 0, 0, True)), r"round 0 is \(\(0, 1, 0, 0, True\),\)"),
    "bytes as scratch": (
        lambda n: star(n).then(transfers(Transfer(0, 1, 0, 1 << 31, reduce=False))(n)),
        "of 2147483649 chunks, scratch included; allowed: at most 1048576",
    ),
    "half a rank": (transfers(Transfer(0.5, 1, 0, 0, reduce=True)), "of whole numbers"),
}


@pytest.mark.parametrize(("function", "message"), FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_malformed_schedules_are_refused_in_one_line(function, message: str):
    with pytest.raises(UsageError, match=message) as error:
        proved(function, "all_reduce", 2)
    assert "\n" not in str(error.value)


FILES = {
    "missing": ("{dir}/none.py:star", "cannot read .*none.py: No such file or directory"),
    "a directory": ("{dir}/dir.py:star", "cannot read .*dir.py: Is a directory"),
    "no function": ("{file}", "names no function; allowed: .*mine.py:function"),
    "empty name": ("{file}:", "no function ''; it has star, lists, silent, raises, ends"),
    "unknown name": ("{file}:ring", "mine.py has no function 'ring'; it has star, lists"),
    "no callable": ("{file}:number", "has no function 'number'"),
    "raises": ("{file}:raises", r"mine.py:raises\(2\) raised ZeroDivisionError: .* \(line 21\)"),
    "raises further in": ("{file}:nested", r"raised ZeroDivisionError: .* \(line 21\)"),
    "exits": ("{file}:ends", r"ends\(2\) raised SystemExit"),
    "broken": ("{dir}/broken.py:star", "broken.py raised SyntaxError: .*line 1"),
    "raises at once": ("{dir}/at_once.py:star", r"at_once.py raised ValueError: one \(line 2\)"),
    "exits at once": ("{dir}/exits.py:star", r"exits.py raised SystemExit: 3 \(line 1\)"),
    "zero bytes": ("{dir}/zero.py:star", "zero.py raised (SyntaxError|ValueError)"),
}


@pytest.mark.parametrize(("where", "message"), FILES.values(), ids=FILES.keys())
def test_unusable_files_are_refused_in_one_line(file: Path, where: str, message: str):
    (file.parent / "dir.py").mkdir()
    (file.parent / "exits.py").write_text("raise SystemExit(3)", encoding="utf-8")
    (file.parent / "broken.py").write_text("def star(n:\n", encoding="utf-8")
    (file.parent / "at_once.py").write_text("\nraise ValueError('one\\ntwo')\n", encoding="utf-8")
    (file.parent / "zero.py").write_bytes(b"x\0y")
    with pytest.raises(UsageError, match=message) as error:
        proved(where.format(file=file, dir=file.parent), "all_reduce", 2)
    assert "\n" not in str(error.value)


def test_collective_and_ranks_are_checked_before_the_file_runs(file: Path):
    with pytest.raises(UsageError, match="at least 1 rank, got 0"):
        proved(f"{file}:raises", "all_reduce", 0)
    with pytest.raises(UsageError, match="no collective 'sum'"):
        proved(f"{file}:raises", "sum", 2)  # type: ignore[arg-type]


def test_a_changed_file_is_reloaded(file: Path):
    assert load(f"{file}:silent")(2).rounds == ()
    file.write_text(STAR.replace("Schedule(n, 1, ())", "Schedule(n, 1, ((),))"), encoding="utf-8")
    assert load(f"{file}:silent")(2).rounds == ((),)
