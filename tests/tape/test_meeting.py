"""Traces of several hosts: clocks are compared within the stated error, and parts go through the
store."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path
from time import monotonic, monotonic_ns

import pytest
from torch.distributed import HashStore, PrefixStore

from ringdp.errors import CommunicationError, PeerLost, UsageError
from ringdp.tape import meeting
from ringdp.tape.chrome import Shift
from ringdp.tape.meeting import PIECE, Meeting
from ringdp.transport.store.processes import has_ended

AHEAD = 5_000_000_000  # nanoseconds that the other host's clock is ahead of rank 0's


def open_meetings(
    hosts: list[str], complaint: str | None = None
) -> tuple[list[Meeting], list[object]]:
    """Opens a meeting for each rank on a thread; returns the meetings, and each result or error."""
    store = PrefixStore("trace", HashStore())
    meetings = [
        Meeting(
            store,
            rank,
            len(hosts),
            host,
            has_ended,
            (lambda: monotonic_ns() + AHEAD) if host != hosts[0] else monotonic_ns,
        )
        for rank, host in enumerate(hosts)
    ]
    results: list[object] = [None] * len(hosts)

    def open_(rank: int) -> None:
        try:
            results[rank] = meetings[rank].open(complaint if rank == 0 else None, f"run{rank}.json")
        except (UsageError, CommunicationError) as e:
            results[rank] = e

    run_on_threads(open_, len(hosts))
    return meetings, results


def run_on_threads(act, ranks: int) -> None:
    threads = [threading.Thread(target=act, args=(r,), daemon=True) for r in range(ranks)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
        assert not t.is_alive()


def test_another_hosts_clock_is_corrected_within_the_stated_error():
    meetings, results = open_meetings(["a", "b", "a"])
    assert len(set(results)) == 1
    assert results[0].path == "run0.json"
    assert [len(m.guesses) for m in meetings] == [0, 1, 0]
    run_on_threads(lambda r: meetings[r].compare_clocks("last", 10.0), 3)
    assert [len(m.guesses) for m in meetings] == [0, 2, 0]
    first, last = meetings[1].guesses
    assert abs(first.offset + AHEAD) <= first.error
    assert abs(last.offset + AHEAD) <= last.error
    between = (first.at + last.at) // 2
    off = meetings[1].shift(between) - (between - AHEAD)
    assert abs(off) <= max(first.error, last.error)
    assert meetings[0].shift(between) == between


def test_a_clock_is_interpolated_between_two_comparisons():
    shift = Shift(first=100, at=1_000, then=300, later=2_000)
    assert [shift(t) for t in (1_000, 1_500, 2_000)] == [1_100, 1_700, 2_300]
    assert Shift()(7) == 7


def test_another_hosts_part_is_sent_through_the_store(tmp_path: Path):
    meetings, _ = open_meetings(["a", "b"])
    there, here = tmp_path / "there", tmp_path / "here"
    text = "x" * (PIECE + 3) + "\n"
    there.write_text(text, encoding="utf-8")
    meetings[1].hand_in(there, beside=False)
    assert meetings[0].collect(1, here, monotonic() + 10) is None
    assert here.read_text(encoding="utf-8") == text
    assert not there.exists()


def test_a_rank_that_never_came_is_named_before_rank_0_which_ended_because_of_it():
    store = HashStore()
    store.set("here/0", "")
    with pytest.raises(PeerLost, match=r"^rank 2 of 3 waited to trace; rank 1 has ended$"):
        Meeting(store, 2, 3, "a", lambda pid: pid < 2, pid_of=int).open(None, "run.json")


def test_the_part_of_an_ended_rank_is_not_waited_for(tmp_path: Path):
    meetings, _ = open_meetings(["a", "a"])
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    meetings[0].members[1] = meetings[0].members[1]._replace(pid=child)
    why = meetings[0].collect(1, tmp_path / "part", monotonic() + 1000)
    assert why == f"rank 1 (process {child}) ended before it wrote its part of the trace"


def test_a_late_part_is_waited_for_until_the_deadline(tmp_path: Path):
    meetings, _ = open_meetings(["a", "a"])
    why = meetings[0].collect(1, tmp_path / "part", monotonic())
    assert why == "rank 1 did not write its part of the trace in time"


def test_the_reason_for_a_missing_part_is_passed_on(tmp_path: Path):
    meetings, _ = open_meetings(["a", "b"])
    meetings[1].excuse("it cannot write there: No space left on device")
    why = meetings[0].collect(1, tmp_path / "part", monotonic() + 1000)
    assert why == (
        "rank 1 has no part of the trace: it cannot write there: No space left on device"
    )


def test_only_the_path_of_a_part_that_came_too_late_is_logged(tmp_path: Path, caplog):
    meetings, _ = open_meetings(["a", "a", "a"])
    assert meetings[0].collect(1, tmp_path / "part", monotonic()) is not None
    meetings[2].hand_in(tmp_path / "part", beside=True)
    assert not caplog.text
    meetings[1].hand_in(tmp_path / "part", beside=True)
    assert f"rank 0 did not wait for rank 1's part of the trace: {tmp_path}" in caplog.text


def test_the_rank_that_is_waited_for_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(meeting, "WARN_AFTER", 0.0)
    store = PrefixStore("trace", HashStore())
    store.set_timeout(timedelta(seconds=0.02))
    with pytest.raises(CommunicationError, match="every rank must start the trace"):
        Meeting(store, 1, 2, "a", has_ended).open(None, "run.json")
    assert caplog.text.count("rank 1 waits for rank 0 to start the trace") == 1


def test_an_error_of_rank_0_is_raised_on_all_ranks():
    _, results = open_meetings(["a", "b"], "cannot write")
    assert [(type(c), str(c)) for c in results] == [(UsageError, "cannot write")] * 2


MEMBERS = '[["a", 1], ["a", 2]]'


@pytest.mark.parametrize(
    "opened",
    [
        '[1, "ab", "run.json", null, [["a"]]]',
        '[1, "ab", "run.json", null, [["a", 1]]]',
        f'[Infinity, "ab", "run.json", null, {MEMBERS}]',
        f'[-1, "ab", "run.json", null, {MEMBERS}]',
        f'[1, "/../../x", "run.json", null, {MEMBERS}]',
        f'[1, 7, "run.json", null, {MEMBERS}]',
    ],
    ids=["a member", "too few", "no end", "below 0", "a path", "a number"],
)
def test_malformed_data_in_the_store_is_an_error(opened):
    store = PrefixStore("trace", HashStore())
    store.set("opened", opened)
    with pytest.raises(CommunicationError, match="rank 1 of 2 did not meet the others to trace"):
        Meeting(store, 1, 2, "a", has_ended).open(None, "run.json")
