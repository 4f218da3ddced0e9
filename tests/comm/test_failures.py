"""Communicators that end while others use them, in processes that continue; nothing is leaked."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import ringdp
from ringdp import CommunicationError, Communicator, PeerLost
from tests.comm.failing import catch, fallible, held, leaves_nothing
from tests.ranks import TIMEOUT, on_ranks
from tests.transport.over import init_over

pytestmark = pytest.mark.process

ALLOWED = TIMEOUT / 3  # seconds; takes 0.01 s on an idle machine, but must not be a timeout


@pytest.mark.parametrize("transport", ["shm", "c10d"])
@on_ranks(3)
def test_a_rank_that_closes_is_lost_to_the_others(comm: Communicator, transport: str) -> None:
    c = init_over(comm, transport)
    c.barrier()
    comm.barrier()  # otherwise a rank still in that barrier could notice the end there
    if comm.rank == 1:
        c.close()
        c.close()
        with pytest.raises(CommunicationError, match="closed"):
            c.barrier()
    else:
        caught = catch(c, c.barrier)
        assert caught.error == caught.again == "PeerLost"
        assert "rank 1 has ended" in caught.text
        assert caught.seconds < ALLOWED
    comm.barrier()  # a rank that leaves earlier would itself be reported lost
    c.close()


@on_ranks(2)
@fallible
def test_a_queued_call_names_the_call_it_waits_behind(comm: Communicator) -> None:
    other = comm.duplicate()
    if comm.rank == 1:
        other.barrier()
        comm.close()
        return
    works = [comm.all_reduce(torch.ones(10), async_op=True) for _ in range(2)]
    other.barrier()
    with pytest.raises(PeerLost) as raised:
        works[1].wait()
    line = str(raised.value).splitlines()[0]
    assert re.search(r"test_failures.py:\d+ \(queued behind #\d\); rank 1 has ended", line), line


@on_ranks(2)
@leaves_nothing
def test_close_ends_pending_calls(comm: Communicator) -> None:
    start = time.monotonic()
    with comm.duplicate() as other:
        if comm.rank == 0:
            works = [other.all_reduce(torch.ones(10), async_op=True) for _ in range(3)]
            other.close()
            # the first one is in progress, the others are queued; none may keep waiting
            for work in works:
                with pytest.raises(CommunicationError, match="closed"):
                    work.wait()
                assert work.is_completed()
                assert isinstance(work.exception(), CommunicationError)
        comm.barrier()  # if rank 1 closed earlier, the pending calls would raise PeerLost
    assert time.monotonic() - start < ALLOWED


@on_ranks(2)
@leaves_nothing
def test_a_timed_out_buffer_is_not_freed_under_the_thread(comm: Communicator) -> None:
    """The tensor of a collective that timed out is not reused while the progress thread may write
    to it."""
    with comm.duplicate() as other:
        for call in range(20):
            if (call, comm.rank) == (0, 1):
                comm.barrier()  # rank 0 has given up
            with pytest.raises(CommunicationError):
                other.all_reduce(torch.ones(100_000), async_op=True).wait(timeout=0.001)
            x = torch.full((100_000,), 3.0)
            if (call, comm.rank) == (0, 0):
                comm.barrier()
            time.sleep(0.001)
            assert torch.all(x == 3.0)


@contextmanager
def interrupted_once(waits: Callable[[], object]) -> Iterator[None]:
    """Sends SIGINT to a call inside the block once it waits."""

    def interrupt() -> None:
        while not waits():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    # A background job of a shell without job control starts with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        yield


def interrupted_in(comm: Communicator) -> AbstractContextManager[None]:
    """Once rank 0 has begun its second collective."""
    return interrupted_once(lambda: comm._transport.record(0).begun >= 2)


@on_ranks(2)
@leaves_nothing
def test_ctrl_c_ends_a_wait(comm: Communicator) -> None:
    start = time.monotonic()
    with comm.duplicate() as other:
        other.barrier()
        if comm.rank == 0:
            with interrupted_in(other):
                other.barrier()  # rank 1 does not call it
            other.close()  # before rank 1, which would otherwise see it lost
        comm.barrier()
    assert time.monotonic() - start < ALLOWED


@on_ranks(2)
def test_after_ctrl_c_the_table_shows_no_wait_for_a_message(comm: Communicator) -> None:
    with comm.duplicate() as other:
        if comm.rank == 0:
            with interrupted_once(lambda: other._transport.message(0)):
                other.recv(torch.ones(3), 1)
            assert other._transport.message(0) is None
            other.close()  # before rank 1, as above
        comm.barrier()


@on_ranks(2)
@leaves_nothing
def test_ctrl_c_in_a_first_call_keeps_its_buffers_alive(comm: Communicator) -> None:
    """In a call that is not a repeated one; until it has completed."""
    with comm.duplicate() as other:
        other.barrier()
        if comm.rank == 0:
            with interrupted_in(other):
                other.broadcast(torch.zeros(200_000), root=1)
            assert len(other._transport.kept) == 1
        # would get the buffer's memory if it had been freed
        others = [torch.full((200_000,), 7.0) for _ in range(4)]
        comm.barrier()
        if comm.rank == 1:
            other.broadcast(torch.ones(200_000), root=1)
        other.barrier()
        assert all(bool((x == 7).all()) for x in others)
        assert not other._transport.kept


class InterruptedCore:
    """Wraps an object of csrc: calls raise KeyboardInterrupt when they return."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._core, name)

        def call(*arguments: Any) -> None:
            method(*arguments)
            raise KeyboardInterrupt

        return call if name in ("start", "send", "receive") else method


@on_ranks(2)
@leaves_nothing
def test_ctrl_c_as_a_call_returns_keeps_its_buffers_alive(comm: Communicator) -> None:
    other = comm.duplicate()
    transport: Any = other._transport
    x = torch.ones(100_000)
    sizes = [len(x)] * comm.size  # calls with sizes are not repeated ones
    calls = (
        lambda: other.all_gather_v(x.repeat(comm.size), x, sizes, algorithm="ring", async_op=True),
        lambda: other.isend(x, 1 - comm.rank),
        lambda: other.irecv(x, 1 - comm.rank),
    )
    prepare = transport.prepare
    transport.prepare = lambda what: InterruptedCore(prepare(what))
    transport._mail = InterruptedCore(transport._mail)
    for begun, call in enumerate(calls, 1):
        comm.barrier()  # the other rank has not begun the call, so it cannot complete early
        if comm.rank == 0:
            with pytest.raises(KeyboardInterrupt):
                call()
            assert len(transport.kept) + len(transport.messages) == begun
    comm.barrier()
    other.abort()


class Held:
    pass


@pytest.mark.parametrize("later", [False, True])
@on_ranks(2)
@fallible
def test_an_error_does_not_keep_its_callers_locals(comm: Communicator, later: bool) -> None:
    """They are freed although the error was raised again."""
    comm.barrier()
    if comm.rank == 1:
        comm.close()
        return
    works, seen = [], []

    def caller() -> None:
        held = Held()
        seen.append(weakref.ref(held))
        if works:
            works[0].wait()
        works.append(comm.all_reduce(torch.ones(8), async_op=later))

    gc.disable()
    try:
        for _ in range(3):
            with suppress(PeerLost):
                caller()
    finally:
        gc.enable()
    assert not any(ref() for ref in seen)


@on_ranks(2)
@fallible
def test_a_forked_child_cannot_communicate(comm: Communicator) -> None:
    """A forked child, such as a data loader's, is refused, and its exit does no harm. It inherits
    the arena, where its own tensors may lie, but no mapping or descriptor of other ranks."""
    closed = comm.duplicate()
    closed.close()
    message = comm.irecv(torch.ones(3), 1 - comm.rank)
    for _ in range(2):  # the second call is a repeated one
        comm.barrier()
    calls = (comm.barrier, lambda: comm.empty(3), message.wait, comm.abort)
    pid = os.fork()
    if pid == 0:
        has = held()
        try:
            for name in ("memfd:ringdp", "memfd:ringdp-mail"):
                assert has[name] == has[f"/{name} (deleted)"] == 0
            assert has["anon_inode:[pidfd]"] == 0
            with comm.group():
                pass
            for call in calls:
                with pytest.raises(ringdp.UsageError, match="forked"):
                    call()
            comm.close()
        except BaseException:
            os._exit(2)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    comm.send(torch.ones(3), 1 - comm.rank)
    message.wait()
    comm.barrier()
    del closed
    assert status == 0
    assert "memfd:ringdp " in Path("/proc/self/maps").read_text(encoding="utf-8")


def mapped() -> set[int]:
    """The addresses of mapped segments and message files."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return {int(at, 16) for at in re.findall(r"(\w+)-.*memfd:ringdp(?:-mail)? ", maps)}


@on_ranks(2)
@leaves_nothing
def test_a_closed_communicator_unmaps_nothing_in_a_child(comm: Communicator) -> None:
    """In a child, freeing a communicator that was closed before the fork must not unmap what is
    there now."""
    before = mapped()
    other = comm.duplicate()
    x = torch.ones(1)
    other.send(x, 1 - comm.rank)
    other.recv(x, 1 - comm.rank)
    places = mapped() - before
    other.close()
    pid = os.fork()
    if pid == 0:
        take = ctypes.CDLL(None).mmap
        take.argtypes, take.restype = [*[ctypes.c_size_t] * 2, *[ctypes.c_int] * 4], ctypes.c_size_t
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
        taken = [take(at, 1, mmap.PROT_READ, flags, -1, 0) for at in places]
        ended = weakref.ref(other._transport)
        del other
        gc.collect()
        read = [ctypes.c_char.from_address(at).value for at in places]
        os._exit(0 if set(taken) == places and read == [b"\0"] * 2 and ended() is None else 2)
    assert len(places) == 2
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("n", [2, 3])
@on_ranks()
def test_a_rank_may_close_right_after_its_last_collective(comm: Communicator) -> None:
    """A rank closes right after its last collective, while others may still be reading its data."""
    before = held()
    for i in range(150):
        with comm.duplicate() as other:
            x = torch.ones(1 if i % 3 else 300_000)
            other.all_reduce(x, algorithm="ring" if i % 2 else "direct")
            assert torch.all(x == comm.size)
    del other
    assert not held() - before
