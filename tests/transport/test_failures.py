"""Failures published through a store: the first one stays, malformed ones count as failures."""

from __future__ import annotations

import pytest
from torch.distributed import DistNetworkError, HashStore

from ringdp.transport.base import Failure, FailureKind
from ringdp.transport.store import failures
from ringdp.transport.store.failures import Failed, Failures


def busy() -> bool:
    return True


def test_the_first_failure_is_what_all_ranks_see(store_client):
    store = HashStore()
    one, other = (
        Failures(store_client(store), 0, 3, busy),
        Failures(store_client(store), 1, 3, busy),
    )
    one.fail(Failed(FailureKind.MISMATCH, 2, (5, 6, 7), (8, 9, 10)))
    other.fail(Failed(FailureKind.LOST, 0))
    one.fail(Failed(FailureKind.TIMEOUT, 0))
    assert one.failure == other.failure
    assert one.failure is not None
    assert one.failure[:3] == (FailureKind.MISMATCH, 2, 0)
    assert one.failure.found == (8, 9, 10)


class ShownFailures(HashStore):
    """A store that notes which failure a rank shows while it asks which was the first."""

    def __init__(self) -> None:
        super().__init__()
        self.shown, self.ranks = list[Failure | None](), list[Failures]()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.shown.append(self.ranks[-1].failure)
        return super().compare_set(key, expected, desired)


def test_a_failure_is_shown_only_once_it_is_known_to_be_the_first(store_client):
    """Otherwise a waiting thread could raise the other one."""
    store = ShownFailures()
    for rank, kind in enumerate((FailureKind.TIMEOUT, FailureKind.MISMATCH)):
        store.ranks.append(Failures(store_client(store), rank, 2, busy))
        store.ranks[rank].fail(Failed(kind, 0))
    assert store.shown == [None, None]
    first, second = (one.failure for one in store.ranks)
    assert first == second
    assert first is not None
    assert first[:3] == (FailureKind.TIMEOUT, 0, 0)  # not another rank: rank 0 was late itself


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1 1",
        "2 1 0 0 0 0 0 0 x",
        "99 1 0 0 0 0 0 0 0",
        "1 7 0 0 0 0 0 0 0",
        "1 0 -1" + " 0" * 6,
    ],
)
def test_a_malformed_record_is_a_failure(store_client, text: str):
    store = HashStore()
    store.set("failed", text)
    here = Failures(store_client(store), 0, 2, busy)
    here.poll()
    assert here.failure is not None
    assert here.failure.kind is FailureKind.DAMAGED


def test_a_closed_ranks_last_data_may_arrive_late(store_client):
    store = HashStore()
    store.set("closed/1", "1")
    here = Failures(store_client(store), 0, 2, busy)
    for _ in range(2):
        with here.waits_for(1):
            for _ in range(failures.LAST_LOOKS):
                here.poll()
    assert here.failure is None
    with here.waits_for(1):
        for _ in range(failures.LAST_LOOKS + 1):
            here.poll()
    assert here.failure is not None
    assert here.failure[:2] == (FailureKind.LOST, 1)


def test_a_rank_that_closed_before_this_ranks_collective_is_lost(store_client):
    store = HashStore()
    here, other = (Failures(store_client(store), rank, 3, busy) for rank in range(2))
    store.set("closed/2", "9" * 5000)  # malformed
    other.close(7)
    other.fail(Failed(FailureKind.LOST, 0))  # of what was in flight: no failure of the others
    assert other.failure is not None
    assert other.failure.kind is FailureKind.STOPPED
    for collective in (6, 6, 7, None, 7, 8):
        for _ in range(failures.LAST_LOOKS):
            here.poll(collective)
    assert here.failure is None
    for _ in range(failures.LAST_LOOKS + 1):
        here.poll(7)
    assert here.failure is not None
    assert here.failure[:2] == (FailureKind.LOST, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wait_for_any_rank_loses_another_one_once_all_have_closed(store_client, rank: int):
    store = HashStore()
    here = Failures(store_client(store), rank, 3, busy)
    others = {0, 1, 2} - {rank}
    with here.waits_for(-1):
        for other in others:
            for _ in range(failures.LAST_LOOKS + 1):
                here.poll()
            assert here.failure is None
            store.set(f"closed/{other}", "1")
        for _ in range(failures.LAST_LOOKS + 1):
            here.poll()
    assert here.failure is not None
    assert here.failure.kind is FailureKind.LOST
    assert here.failure.rank in others


class EndedStore(HashStore):
    """A store whose server has ended."""

    def check(self, keys: list[str]) -> bool:
        raise DistNetworkError("Connection reset by peer")

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        raise DistNetworkError("Broken pipe")


@pytest.mark.parametrize("busy", [False, True])
def test_an_ended_store_is_a_failure_only_during_a_collective(store_client, busy: bool):
    here = Failures(store_client(EndedStore()), 1, 2, lambda: busy)
    here.poll()
    assert (here.failure is not None) == busy
    if here.failure:
        assert here.failure[:2] == (FailureKind.LOST, 0)
