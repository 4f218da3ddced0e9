"""Proves that a schedule meets a contract, by running it on sets instead of numbers.

The rules are checked in every round, so an error names the transfer at fault:
- A transfer reads a defined slot, and a reduce adds to a defined slot.
- In a round no slot is both read and written, copied to twice, or both copied to and reduced into.
- A reduce joins disjoint sets: no input is counted twice.
- At the end every slot holds what the contract says. If one does not, the error names the last
  transfer that wrote to it.

A proof holds for one n, and for all data, sizes and dtypes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from ringdp.errors import ScheduleError
from ringdp.schedule.algorithms import Collective
from ringdp.schedule.contracts import Contract, Slot, State, Value, contract
from ringdp.schedule.draw import grid
from ringdp.schedule.ir import Schedule, Transfer


def verify(schedule: Schedule, promise: Contract | Collective) -> None:
    """Raises ScheduleError, which names the faulty transfer, unless `schedule` meets `promise`."""
    if isinstance(promise, str):
        promise = contract(promise, schedule.ranks, schedule.chunks)
    (state,) = deque(states(schedule, promise.before), maxlen=1)  # the last
    for slot, wanted in promise.after.items():
        if state.get(slot) != wanted:
            here, last = _last_write(schedule, slot)
            raise ScheduleError(
                f"at the end rank {slot[0]} chunk {slot[1]} holds "
                f"{_text(state.get(slot))}, the contract asks for {_text(wanted)}; {last}\n"
                f"{grid(schedule, here=here)}"
            )


def states(schedule: Schedule, before: State) -> Iterator[State]:
    """Yield `before`, then the state after each round.

    Raises ScheduleError at the first transfer that breaks a rule.
    """
    state = dict(before)
    yield state
    for r, transfers in enumerate(schedule.rounds):
        state = _round(schedule, r, transfers, state)
        yield state


def _round(schedule: Schedule, r: int, transfers: tuple[Transfer, ...], state: State) -> State:
    reads = {(t.src, t.read) for t in transfers}
    after = dict(state)
    written: dict[Slot, bool] = {}  # slot -> whether by a reduce
    for t in transfers:
        source, target = (t.src, t.read), (t.dst, t.write)

        def fail(why: str, t: Transfer = t) -> ScheduleError:
            return ScheduleError(f"round {r}, transfer {t}: {why}\n{grid(schedule, here=(r, t))}")

        if not (0 <= t.src < schedule.ranks and 0 <= t.dst < schedule.ranks):
            raise fail(f"ranks are 0..{schedule.ranks - 1}")
        if t.read < 0 or t.write < 0:
            raise fail("chunk indices start at 0")
        if source not in state:
            raise fail(f"reads {_place(schedule, source)}, which holds nothing yet")
        if target in reads:
            raise fail(f"writes rank {t.dst} chunk {t.write}, which is read in the same round")
        if target in written and not (t.reduce and written[target]):
            raise fail(f"rank {t.dst} chunk {t.write} is written twice in one round")
        written[target] = t.reduce
        if not t.reduce:
            after[target] = state[source]
            continue
        if target not in after:
            raise fail(f"adds to {_place(schedule, target)}, which holds nothing yet")
        if twice := after[target] & state[source]:
            raise fail(f"counts {_text(twice)} twice in rank {t.dst} chunk {t.write}")
        after[target] = state[source] | after[target]  # copies the first, mostly the larger
    return after


def _last_write(schedule: Schedule, slot: Slot) -> tuple[tuple[int, Transfer] | None, str]:
    """Return the last (round, transfer) that wrote to `slot`, or None, and a description of it."""
    writes = [
        (r, t) for r, ts in enumerate(schedule.rounds) for t in ts if (t.dst, t.write) == slot
    ]
    if not writes:
        return None, "nothing wrote there"
    r, t = writes[-1]
    return (r, t), f"round {r}, transfer {t}, wrote there last"


def _place(schedule: Schedule, slot: Slot) -> str:
    rank, chunk = slot
    return f"rank {rank} chunk {chunk}{' (scratch)' if chunk >= schedule.chunks else ''}"


def _text(value: Value | None) -> str:
    """Format a value: `1.0+2.0` is the inputs of ranks 1 and 2 in chunk 0."""
    if not value:
        return "nothing"
    return "+".join(f"{rank}.{chunk}" for rank, chunk in sorted(value))
