"""A store that does not answer for a while must not block or fail its clients."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from threading import Event, Thread
from typing import NoReturn

import pytest
from torch.distributed import DistStoreError, HashStore

from ringdp.comm.store import generation, meeting
from ringdp.errors import CollectiveTimeout, CommunicationError
from ringdp.transport import threads
from ringdp.transport.base import FailureKind
from ringdp.transport.c10d.shutdown import watch_for_end
from ringdp.transport.store.client import PATIENCE, StoreClient, StoreSilent, limited
from ringdp.transport.store.failures import Failed, Failures
from ringdp.transport.store.handshake import Handshake, Places
from ringdp.transport.store.processes import pid_of
from tests.forks import CALL_TIMEOUT

SHORT = 0.05  # seconds


class Stopped(HashStore):
    """A store whose server stops answering until `goes_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on, self.asked = Event(), Event()

    def check(self, keys: list[str]) -> bool:
        self.asked.set()
        self.goes_on.wait()
        return super().check(keys)

    def add(self, key: str, amount: int) -> int:
        self.goes_on.wait()
        return super().add(key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.goes_on.wait()
        return super().compare_set(key, expected, desired)


@pytest.fixture
def stopped() -> Iterator[Stopped]:
    store = Stopped()
    yield store
    store.goes_on.set()


def test_a_request_times_out_and_requests_behind_it_fail_at_once(store_client, stopped: Stopped):
    ask = store_client(stopped).ask
    while not stopped.asked.is_set():  # a request that the thread does not start in time is dropped
        with pytest.raises(StoreSilent, match="has given no answer for"):
            ask(lambda store: store.check(["a"]), SHORT)
    done: list[str] = []
    with pytest.raises(StoreSilent):
        ask(lambda store: done.append("dropped"), SHORT)
    with pytest.raises(StoreSilent):
        ask(lambda store: done.append("later"), SHORT, later=True)
    assert done == []
    stopped.goes_on.set()
    while not done:
        time.sleep(0.001)
    assert not ask(lambda store: store.check(["a"]))
    assert done == ["later"]


def test_all_methods_of_a_limited_store_time_out(stopped: Stopped):
    store = limited(stopped, SHORT)
    assert store._client in threads._endings  # or the process would end a second later
    store.set("a", "b")
    assert store.get("a") == b"b"
    with pytest.raises(StoreSilent, match="has given no answer for"):
        store.check(["a"])


def test_looking_for_rank_0s_process_times_out(stopped: Stopped):
    with pytest.raises(CommunicationError, match="has given no answer for"):
        meeting(HashStore(), 1, 2, SHORT, places=Places(stopped, range(2)))


def test_errors_are_passed_on_and_connecting_is_retried():
    found: list[Callable[[], HashStore]] = [HashStore]

    def reach() -> HashStore:
        if found:
            raise DistStoreError(f"no {found.pop().__name__} yet")
        return HashStore()

    with StoreClient(reach) as store:
        with pytest.raises(DistStoreError, match="no HashStore yet"):
            store.ask(lambda s: s.set("a", "b"))
        store.ask(lambda s: s.set("a", "b"))
        with pytest.raises(ZeroDivisionError):
            store.ask(lambda s: 1 // 0)
        assert store.ask(lambda s: s.get("a")) == b"b"


def test_without_a_thread_the_caller_asks_the_store_itself(monkeypatch):
    def start(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Thread, "start", start)
    there = HashStore()
    with StoreClient(lambda: there) as store:
        for value in ("a", "b"):
            store.ask(lambda s, value=value: s.set("key", value))
            assert store.ask(lambda s: s.get("key")) == value.encode()
        with pytest.raises(ZeroDivisionError):
            store.ask(lambda s: 1 // 0)


def test_a_failure_is_published_once_a_silent_store_answers(store_client, stopped: Stopped):
    failures = Failures(store_client(stopped), 1, 2, lambda: True)
    failures.poll()
    assert failures.failure is None
    failures.fail(Failed(FailureKind.TIMEOUT, 1))
    assert failures.failure is not None
    assert failures.failure.kind is FailureKind.TIMEOUT
    stopped.goes_on.set()
    other = Failures(store_client(stopped), 0, 2, lambda: True)
    while other.failure is None:
        other.poll()
    assert other.failure == failures.failure


class Cut:
    """A group whose connection to the other rank is cut."""

    def recv(self, *_: object) -> NoReturn:
        raise RuntimeError("Connection closed by peer")


def test_a_lost_rank_is_reported_although_the_store_was_silent(store_client, stopped: Stopped):
    failures = Failures(store_client(stopped), 0, 2, lambda: True)
    sees = Thread(target=watch_for_end, args=(Cut(), failures, 1))
    sees.start()
    sees.join(1.5 * PATIENCE)
    stopped.goes_on.set()
    sees.join()
    assert failures.failure is not None
    assert failures.failure[:2] == (FailureKind.LOST, 1)


class Busy(HashStore):
    """A store that at first answers later than is allowed afterwards."""

    def set(self, key: str, value: str) -> None:
        time.sleep(1.5 * PATIENCE)
        super().set(key, value)


def test_joining_waits_for_a_busy_store_up_to_the_timeout():
    store = Busy()
    with Handshake(store, 0, 1, CALL_TIMEOUT).session():
        assert pid_of(store, 0) == os.getpid()


def test_making_a_communicator_over_a_silent_store_times_out(stopped: Stopped):
    handshake = Handshake(stopped, 0, 2, SHORT)
    with (
        pytest.raises(
            CollectiveTimeout,
            match="rank 0 of 2 waited to make a communicator; the store has given no answer",
        ),
        handshake.session(),
    ):
        handshake.barrier("here")


def test_meeting_through_a_silent_store_times_out_on_rank_0_too(stopped: Stopped):
    with pytest.raises(CommunicationError, match="rank 0 did not meet the others: the store has"):
        generation(stopped, 0, SHORT)
    stopped.goes_on.set()
    assert generation(stopped, 1, CALL_TIMEOUT) == 1  # which rank 0 has opened since


def test_joining_a_library_that_waits_for_a_late_rank_times_out():
    """Such as NCCL, which waits for ever."""
    others_come = Event()
    handshake = Handshake(HashStore(), 0, 2, SHORT)
    with (
        pytest.raises(CollectiveTimeout, match=f"until the timeout of {SHORT} s"),
        handshake.session(),
    ):
        handshake.run(others_come.wait)
    others_come.set()
