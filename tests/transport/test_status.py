"""Status boards over a torch.distributed group: each rank's state, from which errors draw their
table."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore, Store

import ringdp
from ringdp import Communicator
from ringdp.comm.table import missing, table
from ringdp.transport.records import (
    CALLS,
    CLOSED,
    ELSEWHERE,
    SILENT,
    SITE_BYTES,
    Call,
    RankRecord,
    format_call,
    parse_call,
)
from ringdp.transport.store import status
from ringdp.transport.store.processes import introduce, process_state
from ringdp.transport.store.status import LAST, State, StatusBoard, read, written
from tests.comm.failing import catch, duplicates, row_of
from tests.forks import CALL_TIMEOUT, Forks, Report, meet, store
from tests.ranks import on_ranks
from tests.waiting import wait_until

CALLED = [(k, 1 << 4, 10 * k, b"train.py:40".ljust(SITE_BYTES, b"\0")) for k in range(CALLS + 5)]
RECORD = RankRecord(77, 5, 4, 2, 1, 0.25)
STATE = State(RECORD, CALLED[9], {4: CALLED[4], 3: CALLED[3]})


def test_a_state_is_read_back_as_written():
    assert read(written(3, STATE), 3, 77, 2) == STATE
    closed = State(RECORD._replace(pid=CLOSED))
    assert read(written(LAST, closed), LAST, 77, 2) == closed


def test_a_full_state_fits_and_does_not_answer_a_later_question():
    state = STATE._replace(calls={call[0]: call for call in CALLED[:CALLS]})
    text = written(3, state._replace(record=RECORD._replace(begun=CALLS, finished=CALLS)))
    assert len(read(text, 3, 77, 2).calls) == CALLS
    assert read(text, 4, 77, 2) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n" * 100,
        "9 0 5 4 2 1",
        "9 0 5 4 2 1 x",
        "9 0 5 6 2 1 0",
        "9 0 -5 -6 2 1 0",
        "9 0 5 4 2 2 0",
        "9 0 5 4 -2 1 0",
        f"9 0 {1 << 62} 4 2 1 0",
        f"9 0 5 4 {1 << 40} 1 0",
        "9 0 5 4 2 1 -1",
        f"9 0 5 4 2 1 -1{'0' * 5000}",
        "9 0 5 4 2 1 0" + "\n" * status.LONGEST,
    ],
)
def test_malformed_states_are_ignored(text: str):
    assert read(text, 3, 77, 2) is None


def test_malformed_calls_in_a_state_are_left_out():
    lines = written(3, STATE).split("\n")
    lines[2:] = ["4 1 1 00", "x", *lines[3:], "999 16 70 " + b"later".ljust(SITE_BYTES).hex()]
    assert read("\n".join(lines), 3, 77, 2) == STATE._replace(calls={3: CALLED[3]})


def test_a_call_comes_back_from_the_store():
    assert parse_call(format_call(CALLED[3])) == CALLED[3]


@pytest.mark.parametrize(
    "text", ["", "1 2 3", "1 2 x 00", "1 2 3 00", f"-1 2 3 {'00' * SITE_BYTES}"]
)
def test_what_makes_no_sense_is_no_call(text: str):
    assert parse_call(text) is None


def begin(board: StatusBoard, call: Call) -> None:
    """Records the start of a call, as a transport does."""
    board.calls[call[0]] = call, time.monotonic()
    board.begun = call[0] + 1


def test_a_rank_is_in_the_first_unfinished_call(store_client):
    board = StatusBoard(store_client(HashStore()), 0, 1)
    for call in CALLED:
        begin(board, call)
    record, _, calls = board.state()
    assert (record.begun, record.finished, list(calls)) == (1, 0, list(range(1 + status.AHEAD)))
    for call in CALLED[:-1]:
        board.end(call[0])
    record, _, calls = board.state()
    assert (record.begun, record.finished) == (len(CALLED), len(CALLED) - 1)
    assert calls == {call[0]: call for call in CALLED[-CALLS:]}
    assert len(board.calls) <= CALLS + 2  # calls that ended longer ago are dropped


def test_the_time_in_a_call_counts_from_its_start(store_client):
    board = StatusBoard(store_client(HashStore()), 0, 1)
    time.sleep(0.02)
    before = time.monotonic()
    begin(board, CALLED[0])
    time.sleep(0.02)
    begin(board, CALLED[1])  # waits behind it
    board.waits(2, 0)
    assert 0.02 <= board.state().record.seconds <= time.monotonic() - before
    time.sleep(0.02)
    before = time.monotonic()
    board.end(0)
    record, _, _ = board.state()
    assert record.seconds <= time.monotonic() - before
    assert (record.round, record.waits_for) == (-1, -1)  # of the ended call, not of the next one


def test_a_call_is_in_progress_although_a_later_one_has_ended(store_client):
    """Over NCCL a collective of the host and one of the device can be in progress at once."""
    board = StatusBoard(store_client(HashStore()), 0, 1)
    for k in range(3):
        begin(board, CALLED[k])
    board.end(2)
    record, _, _ = board.state()
    assert (record.begun, record.finished) == (1, 0)
    board.end(0)
    record, _, calls = board.state()
    assert (record.begun, record.finished, max(calls)) == (2, 1, 2)


def test_a_rank_answers_each_request_once(store_client):
    place = HashStore()
    board = StatusBoard(store_client(place), 0, 1)
    for asks in (False, True, False, True):
        if asks:
            place.add("asked", 1)
        board.answer()
        assert place.delete_key("state/0") == asks


def test_an_answer_counts_although_the_reader_was_stopped_until_its_patience_was_over(
    store_client, monkeypatch
):
    now, texts = [0.0], status._texts

    def is_stopped_after(ranks: Iterable[int], place: Store) -> dict[int, str]:
        found = texts(ranks, place)
        now[0] += 2 * status.PATIENCE
        place.set("state/1", written(1, STATE))
        return found

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: None)
    monkeypatch.setattr(status, "time", clock)
    monkeypatch.setattr(status, "_texts", is_stopped_after)
    survey = StatusBoard(store_client(HashStore()), 0, 2).survey(failed=False)
    assert survey.record(1).begun == RECORD.begun


def test_a_silent_rank_is_described_by_its_process(store_client, monkeypatch):
    monkeypatch.setattr(status, "PATIENCE", 0.01)
    place = HashStore()
    ranks = [StatusBoard(store_client(place), rank, 4) for rank in range(4)]
    for rank in range(4):
        introduce(place, rank)
    ended = os.spawnlp(os.P_NOWAIT, "true", "true")
    os.waitpid(ended, 0)
    place.set("place/1", place.get("place/1").decode().replace(str(os.getpid()), str(ended)))
    place.set("place/2", "1 another host")
    place.set("place/3", "x")
    ranks[1].publish_last(closed=True)
    seen = ranks[0].survey(failed=False)
    assert seen.record(1).pid == CLOSED
    assert [seen.record(r)[:3] for r in (2, 3)] == [(ELSEWHERE, SILENT, SILENT)] * 2
    assert "2     gives no answer\n3     gives no answer" in table(seen)
    place.delete_key("state/1")
    seen = ranks[0].survey(failed=True)
    assert f"gives no answer; process {ended} has ended" in table(seen)
    assert f"rank 1 gives no answer (process {ended} has ended); rank 2 " in missing(seen, 0)


def test_without_the_store_a_rank_knows_of_itself_alone(store_client):
    client = store_client(HashStore())
    client.end()
    seen = StatusBoard(client, 0, 2).survey(failed=False)
    assert seen.record(0).pid == os.getpid()
    assert seen.record(1) == RankRecord(ELSEWHERE, SILENT, SILENT, -1, -1, 0.0)


def stalls(comm: Communicator, report: Report, how: str) -> None:
    """Rank 2 has called only collective 0; the others are in the next one."""
    status.PATIENCE = 0.5 if how == "stopped" else CALL_TIMEOUT
    (c,), victim = duplicates(comm, "c10d", 1), 2
    pid = comm._transport.record(victim).pid
    if comm.rank == victim:
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        store().wait(["done/0", "done/1"])
        report(catch(c, c.barrier))
    else:
        if how == "stopped":
            wait_until(lambda: "stopped" in process_state(pid), CALL_TIMEOUT)
        work = c.all_reduce(torch.ones(10), tag=7, async_op=True)
        while c._transport.record(c.rank).waits_for < 0:
            time.sleep(0.01)
        meet(comm, "came", without=victim)
        report(catch(c, lambda: work.wait(0.3)))
        meet(comm, "done", without=victim)
        os.kill(pid, signal.SIGCONT)
    comm.barrier()


@pytest.mark.process
@pytest.mark.parametrize("how", ["sleeping", "stopped"])
def test_the_table_shows_all_ranks_without_shared_memory(forks: Forks, how: str):
    for rank, (code, (h,)) in enumerate(forks(3, stalls, how)):
        assert code == 0
        assert h.error == h.again == "CollectiveTimeout", h
        if rank == 2:
            continue
        first, row = h.text.splitlines()[0], row_of(2, h.text)
        assert re.search(r" of 10 elements, tag 7, at .*/test_status.py:", first), h
        here = row_of(rank, h.text)
        assert re.match(rf"{rank}     all_reduce #1 \(float32, sum\) of 10 +7 +\d  ", here), h
        assert "/test_status.py:" in here
        if how == "stopped":
            assert re.search(r"rank 2 gives no answer \(process \d+ is stopped\)", first), h
            assert re.match(r"2     gives no answer; process \d+ is stopped$", row), h
        else:
            assert "rank 2 has not called it" in first
            assert "user code" in row
            assert re.search(r"barrier #0 at .*/failing.py:", row), h
            other = row_of(1 - rank, h.text)
            assert re.match(rf"{1 - rank}     all_reduce #1 \(float32, sum\) of 10 ", other), h


@pytest.mark.process
@on_ranks(2, pool="forked")
def test_a_thread_that_waits_at_the_store_does_not_block_others(comm: Communicator) -> None:
    """A thread of rank 0 waits at the store for rank 1, which waits for another thread of rank
    0."""
    one = ringdp.init(transport="c10d", timeout=CALL_TIMEOUT / 3)
    other = one.duplicate()
    other.barrier()
    made: list[Communicator] = []
    meet = Thread(target=lambda: made.append(one.duplicate()))
    if comm.rank == 0:
        meet.start()
    time.sleep(0.3)  # long enough for the wait at the store to begin
    other.all_reduce(torch.ones(3))
    if comm.rank == 1:
        meet.start()
    meet.join()
    made[0].barrier()
    comm.barrier()
