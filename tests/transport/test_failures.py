"""Failures that ranks tell one another through a store: the first stays, nonsense is one too."""

from __future__ import annotations

import pytest
from torch.distributed import DistNetworkError, HashStore

from ringdp.transport.base import FailureKind
from ringdp.transport.store import failures
from ringdp.transport.store.failures import Failures


def busy() -> bool:
    return True


def test_the_first_failure_stays_and_is_the_same_for_all(store_client):
    store = HashStore()
    one, other = (
        Failures(store_client(store), 0, 3, busy),
        Failures(store_client(store), 1, 3, busy),
    )
    one.fail(FailureKind.MISMATCH, 2, ((5, 6, 7), (8, 9, 10)))
    other.fail(FailureKind.LOST, 0)
    one.fail(FailureKind.TIMEOUT, 0)
    assert one.failure == other.failure
    assert one.failure is not None
    assert one.failure[:3] == (FailureKind.MISMATCH, 2, 0)
    assert one.failure.found == (8, 9, 10)


@pytest.mark.parametrize(
    "said",
    [
        "",
        "1 1",
        "2 1 0 0 0 0 0 0 x",
        "99 1 0 0 0 0 0 0 0",
        "1 7 0 0 0 0 0 0 0",
        "1 0 -1" + " 0" * 6,
    ],
)
def test_what_makes_no_sense_is_a_failure_too(store_client, said: str):
    store = HashStore()
    store.set("failed", said)
    here = Failures(store_client(store), 0, 2, busy)
    here.poll()
    assert here.failure is not None
    assert here.failure.kind is FailureKind.DAMAGED


def test_what_a_closed_rank_sent_last_may_come_late(store_client):
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


def test_who_closed_before_a_collective_that_this_rank_is_in_is_lost(store_client):
    store = HashStore()
    here, other = (Failures(store_client(store), rank, 3, busy) for rank in range(2))
    store.set("closed/2", "9" * 5000)  # which makes no sense
    other.close(7)
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


class Gone(HashStore):
    """Whoever served it has ended."""

    def check(self, keys: list[str]) -> bool:
        raise DistNetworkError("Connection reset by peer")


@pytest.mark.parametrize("busy", [False, True])
def test_a_store_that_has_gone_is_a_loss_to_who_is_in_something(store_client, busy: bool):
    here = Failures(store_client(Gone()), 1, 2, lambda: busy)
    here.poll()
    assert (here.failure is not None) == busy
    if here.failure:
        assert here.failure[:2] == (FailureKind.LOST, 0)
