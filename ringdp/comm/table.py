"""The table of what each rank is doing and did last, as errors and `ringdp doctor` print it.

It is read from the ranks' records, so it also shows a rank that is stopped or stuck elsewhere. The
state of its process, stopped or ended, is read from the operating system.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringdp.comm.call import counted, named, other_end, place, tag_of
from ringdp.transport.records import SILENT, Call, Observed, RankRecord
from ringdp.transport.store.processes import process_state

HEADINGS = ("rank", "is in", "tag", "round", "waits for", "for", "at", "last finished")


def table(observed: Observed, duplicates: Sequence[Observed] = (), this_rank: int = 0) -> str:
    """Return the table as text with aligned columns. See `cells`."""
    lines = cells(observed, duplicates, this_rank)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def cells(
    observed: Observed, duplicates: Sequence[Observed] = (), this_rank: int = 0
) -> list[tuple[str, ...]]:
    """Return the headings and a row for each rank, without columns that are empty for all.

    `duplicates` are other communicators over the same ranks: there a rank may be waiting for
    `this_rank`.
    """
    rows: list[tuple[str, ...]] = [HEADINGS]
    for r in range(observed.ranks):
        elsewhere = [call for other in duplicates if (call := _awaited(other, r, this_rank))]
        rows.append(row(observed, r, elsewhere))
    columns = [c for c in zip(*rows, strict=True) if any(c[1:])]
    return list(zip(*columns, strict=True))


def row(observed: Observed, rank: int, elsewhere: Sequence[Call] = ()) -> tuple[str, ...]:
    """Return the cells of one rank. `elsewhere`: other communicators' calls that it may be in."""
    record, nothing = observed.record(rank), [""] * (len(HEADINGS) - 2)
    if record is None:
        return (str(rank), "cannot be seen from here", *nothing)
    if record.pid == 0:
        return (str(rank), "has not attached", *nothing)
    state = process_state(record.pid)
    suffix = f"; {state}" * bool(state)
    if record.begun == SILENT:
        return (str(rank), f"gives no answer{suffix}", *nothing)
    doing, call = "user code", None
    tag = round_ = waits = at = ""
    if record.begun > record.finished:
        call = observed.call(rank, record.begun - 1)
        doing = counted(call) if call else f"#{record.begun - 1}, called too long ago"
        round_ = str(record.round) if record.round >= 0 else ""
        waits = f"rank {record.waits_for}" if record.waits_for >= 0 else ""
    elif call := observed.message(rank):
        doing, waits = counted(call), other_end(call[1])
    elif elsewhere:
        call = elsewhere[0]
        doing += f", or {counted(call)} of another communicator"
    if call:
        tag, at = str(tag_of(call[1]) or ""), place(call[3])
    since = f"{record.seconds:.1f} s" if record.begun else ""
    return (str(rank), doing + suffix, tag, round_, waits, since, at, _last(observed, rank, record))


def missing(observed: Observed, number: int, this_rank: int | None = None) -> str:
    """Say which ranks block a collective: not called, stopped or ended in it, or no answer."""
    late, stuck, silent = [], [], []
    for r in range(observed.ranks):
        record = observed.record(r)
        if record is None or record.finished > number:
            continue
        state = "this rank" if r == this_rank else process_state(record.pid)
        if record.begun == SILENT:
            silent.append(f"rank {r} gives no answer" + f" ({state})" * bool(state))
        elif record.begun <= number:
            late.append(f"rank {r}" + f" ({state})" * bool(state))
        elif state and r != this_rank:
            stuck.append(f"rank {r} is in it, but {state}")
    if late:
        stuck.insert(0, f"{', '.join(late)} {'has' if len(late) == 1 else 'have'} not called it")
    return "; ".join(stuck + silent) or "every rank has called it"


def _awaited(observed: Observed, rank: int, by: int) -> Call | None:
    """Return the collective that `rank` is in and rank `by` has not called, or None."""
    record, other = observed.record(rank), observed.record(by)
    if record is None or other is None or not other.begun < record.begun > record.finished:
        return None
    return observed.call(rank, record.begun - 1)


def _last(observed: Observed, rank: int, record: RankRecord) -> str:
    if not record.finished:
        return "none"
    last = observed.call(rank, record.finished - 1)
    if last is None:
        return f"#{record.finished - 1}"
    number, kind, _, site = last
    return f"{named(number, kind)} at {place(site)}"
