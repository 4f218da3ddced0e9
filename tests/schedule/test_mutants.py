"""Thousands of mutated schedules: the verdict of `verify` must agree with a numeric run.

The numeric run knows no sets: it moves random integers and compares the sums at the end.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from ringdp.errors import ScheduleError
from ringdp.schedule import ALGORITHMS, Schedule, Transfer, contract, schedule, verify

MUTANTS = 4000
Numbers = dict[tuple[int, int], int]

# Races, which `verify` refuses even if the numbers happen to come out right.
RACES = ("which is read in the same round", "is written twice in one round")
# Errors that `verify` reports at once, even if a later copy would overwrite them.
EARLY = ("twice in rank", "which holds nothing yet")


def run(plan: Schedule, before: Numbers) -> Numbers | None:
    """Every slot's number at the end; None if an undefined slot was read or added to."""
    state = dict(before)
    for transfers in plan.rounds:
        after = dict(state)
        for t in transfers:
            if (t.src, t.read) not in state or (t.reduce and (t.dst, t.write) not in after):
                return None
            old = after[t.dst, t.write] if t.reduce else 0
            after[t.dst, t.write] = old + state[t.src, t.read]
        state = after
    return state


def numbers_are_right(plan: Schedule, collective: str, rng: random.Random) -> bool:
    before, after = contract(collective, plan.ranks, plan.chunks)
    inputs = {slot: rng.getrandbits(60) for slot in before}
    end = run(plan, inputs)
    return end is not None and all(
        end.get(slot) == sum(inputs[i] for i in wanted) for slot, wanted in after.items()
    )


def mutate(plan: Schedule, rng: random.Random) -> Schedule:
    """Drops, doubles or moves one transfer, or changes one of its fields."""
    rounds = [list(r) for r in plan.rounds]
    r = rng.choice([i for i, transfers in enumerate(rounds) if transfers])
    i = rng.randrange(len(rounds[r]))
    t = rounds[r][i]
    slots = plan.chunks + plan.scratch
    match rng.choice(["drop", "double", "move", "src", "dst", "read", "write", "reduce"]):
        case "drop":
            del rounds[r][i]
        case "double":
            rng.choice(rounds).append(t)
        case "move":
            del rounds[r][i]
            rng.choice(rounds).append(t)
        case "src":
            rounds[r][i] = t._replace(src=rng.randrange(plan.ranks))
        case "dst":
            rounds[r][i] = t._replace(dst=rng.randrange(plan.ranks))
        case "read":
            rounds[r][i] = t._replace(read=rng.randrange(slots))
        case "write":
            rounds[r][i] = t._replace(write=rng.randrange(slots))
        case "reduce":
            rounds[r][i] = t._replace(reduce=not t.reduce)
    return Schedule(plan.ranks, plan.chunks, tuple(map(tuple, rounds)))


def refused(plan: Schedule, collective: str) -> str | None:
    try:
        verify(plan, collective)
    except ScheduleError as error:
        return str(error)
    return None


def test_verify_agrees_with_numbers_on_mutants():
    rng = random.Random(0)
    plans = [
        (a.collective, plan)
        for a in ALGORITHMS
        for n in range(2, 8)
        if any((plan := schedule(a.collective, a.name, n)).rounds)
    ]
    seen: Counter[str] = Counter()
    while sum(seen.values()) < MUTANTS:
        collective, plan = rng.choice(plans)
        mutant = mutate(plan, rng)
        right = numbers_are_right(mutant, collective, rng)
        refusal = refused(mutant, collective)
        if refusal is None:
            assert right, f"accepted, but the numbers are wrong: {mutant}"
            seen["harmless"] += 1
        elif any(race in refusal for race in RACES):
            seen["race"] += 1
        elif any(early in refusal for early in EARLY):
            seen["hidden by a later copy" if right else "wrong"] += 1
        else:
            assert not right, f"refused, but the numbers are right: {refusal}"
            seen["wrong"] += 1
    # Every branch above was taken often enough to mean something.
    assert seen["wrong"] > MUTANTS / 3
    assert min(seen["race"], seen["harmless"]) > MUTANTS / 100
    assert seen["hidden by a later copy"] < MUTANTS / 20


def test_the_error_shows_the_failing_transfer():
    plan = schedule("all_reduce", "ring", 3)
    repeated = Schedule(3, 3, (plan.rounds[0], *plan.rounds))
    t = plan.rounds[0][0]
    with pytest.raises(ScheduleError) as error:
        verify(repeated, "all_reduce")
    text = str(error.value)
    assert f"round 1, transfer {t}: counts 0.2 twice in rank 1 chunk 2" in text
    assert f"{t}  <-- here" in text


def copy(src: int, dst: int, read: int = 0, write: int = 0) -> Transfer:
    return Transfer(src, dst, read, write, reduce=False)


def add(src: int, dst: int) -> Transfer:
    return Transfer(src, dst, 0, 0, reduce=True)


@pytest.mark.parametrize(
    ("transfers", "message"),
    [
        ([copy(-1, 1)], r"ranks are 0\.\.2"),
        ([copy(3, 1)], r"ranks are 0\.\.2"),
        ([copy(0, -1)], r"ranks are 0\.\.2"),
        ([copy(0, 3)], r"ranks are 0\.\.2"),
        ([copy(0, 1, -1, 0)], "chunk indices start at 0"),
        ([copy(0, 1, 0, -1)], "chunk indices start at 0"),
        ([copy(0, 1), copy(1, 0)], "writes rank 1 chunk 0, which is read in the same round"),
        ([add(0, 1), add(1, 2)], "writes rank 1 chunk 0, which is read in the same round"),
        ([copy(0, 1), copy(2, 1)], "rank 1 chunk 0 is written twice in one round"),
        ([copy(0, 1), add(2, 1)], "rank 1 chunk 0 is written twice in one round"),
        ([add(0, 1), copy(2, 1)], "rank 1 chunk 0 is written twice in one round"),
    ],
)
def test_invalid_rounds_are_refused(transfers, message):
    with pytest.raises(ScheduleError, match=message):
        verify(Schedule(3, 1, (tuple(transfers),)), "all_reduce")


def test_a_wrong_final_value_is_blamed_on_the_last_write():
    plan = schedule("all_reduce", "ring", 3)
    first, second, *others = plan.rounds
    swapped = Schedule(3, 3, (second, first, *others))
    with pytest.raises(ScheduleError) as error:
        verify(swapped, "all_reduce")
    text = str(error.value)
    assert "rank 0 chunk 0 holds 0.0+2.0, the contract asks for 0.0+1.0+2.0" in text
    assert "; round 0, transfer 2.0 +> 0.0, wrote there last" in text
    assert "2.0 +> 0.0  <-- here" in text
    twice = Schedule(2, 1, ((add(1, 0),), (copy(1, 0),)))
    with pytest.raises(ScheduleError, match=r"; round 1, transfer 1\.0 -> 0\.0, wrote there last"):
        verify(twice, "all_reduce")
    with pytest.raises(ScheduleError, match="; nothing wrote there"):
        verify(Schedule(2, 1, ()), "all_reduce")
