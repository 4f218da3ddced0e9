"""Memory and messages that another process may have damaged: refused with a clear error, or read
safely."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import re
import struct
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

import ringdp
from ringdp import CommunicationError, Communicator
from ringdp.comm.call import named, place
from ringdp.comm.table import table
from ringdp.transport.arena import arena_bytes
from ringdp.transport.shm.files import SEALS, Address
from ringdp.transport.shm.watch import Watched, segments
from tests.comm.failing import COLLECTIVES, catch, connect, leaves_nothing, until_failed
from tests.comm.test_late import TIMEOUT
from tests.forks import CALL_TIMEOUT, Forks, Report, store
from tests.ranks import on_ranks

pytestmark = pytest.mark.process

# offsets in csrc/segment.hpp's Header: magic, token, total bytes, ranks, record bytes, ..., failed
MAGIC, TOKEN, BYTES, RANKS, RECORD, FAILED = 0, 8, 16, 24, 28, 48


@pytest.fixture
def segment():
    """The bytes of an intact segment of one rank."""
    with ringdp.init():
        path = segments([os.getpid()])[-1]
        assert Watched(path).ranks == 1
        return path.read_bytes()


def memfd(data: bytes, *, sealed: bool = True) -> int:
    fd = os.memfd_create("damaged", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


def replace_field(data: bytes, at: int, form: str, value: int) -> bytes:
    size = struct.calcsize(form)
    return data[:at] + struct.pack(form, value) + data[at + size :]


DAMAGES = {
    "empty": (lambda s: b"", "its 0 bytes hold no header"),
    "header cut": (lambda s: s[:40], "its 40 bytes hold no header"),
    "cut": (lambda s: s[:-4096], "its header says"),
    "longer": (lambda s: s + bytes(4096), "its header says"),
    "magic": (
        lambda s: replace_field(s, MAGIC, "Q", 7),
        "another version of ringdp, or not ringdp's",
    ),
    "record": (lambda s: replace_field(s, RECORD, "I", 64), "its records have 64 bytes"),
    "no ranks": (lambda s: replace_field(s, RANKS, "I", 0), "its header says 0 ranks"),
    "ranks": (
        lambda s: replace_field(s, RANKS, "I", 2**32 - 1),
        "its header says 4294967295 ranks",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_doctor_refuses_a_damaged_segment(segment, damage):
    change, message = DAMAGES[damage]
    fd = memfd(change(segment))
    with pytest.raises(CommunicationError, match=re.escape(message)):
        Watched(Path(f"/proc/self/fd/{fd}"))
    os.close(fd)


def test_the_doctor_refuses_a_segment_that_could_shrink(segment):
    fd = memfd(segment, sealed=False)
    with pytest.raises(CommunicationError, match="not sealed"):
        Watched(Path(f"/proc/self/fd/{fd}"))
    os.close(fd)


def store_with_address(address: str) -> HashStore:
    """A store in which rank 0 has published this address of its memory."""
    store = HashStore()
    store.set("segment", address)
    return store


def address(pid: object, fd: object, token: object) -> str:
    files = [str(fd)] * (len(Address._fields) - 2)
    return " ".join([str(pid), str(token), *files])


JOINED = {
    "cut": (lambda s: s[:-4096], "bytes instead of"),
    "magic": (lambda s: replace_field(s, MAGIC, "Q", 7), "belongs to another job or version"),
    "token": (lambda s: replace_field(s, TOKEN, "Q", 7), "belongs to another job or version"),
    "ranks": (lambda s: replace_field(s, RANKS, "I", 3), "belongs to another job or version"),
}


def report_segment(comm: Communicator, report: Report) -> None:
    if comm.rank == 0:
        (path,) = segments([os.getpid()])
        report(path.read_bytes())
    comm.barrier()


@pytest.fixture(scope="module")
def shared(forks: Forks) -> bytes:
    """The bytes of an intact segment of two ranks."""
    (_, (data,)), _ = forks(2, report_segment)
    return data


@pytest.mark.parametrize("damage", JOINED)
def test_a_rank_refuses_a_damaged_segment(shared, damage):
    change, message = JOINED[damage]
    token = struct.unpack_from("Q", shared, TOKEN)[0]
    fd = memfd(change(shared))
    store = store_with_address(address(os.getpid(), fd, token))
    with ringdp.init() as comm, pytest.raises(CommunicationError, match=message):
        connect(store, 1, 2, arena=comm._transport.arena)
    os.close(fd)


@pytest.mark.parametrize(
    ("address_text", "message"),
    [
        ("", "published a malformed address"),
        ("1", "published a malformed address"),
        (address(1, 2, 3) + " 4", "published a malformed address"),
        (address("here", 2, 3), "published a malformed address"),
        (address(1, 2, -1), "published a malformed address"),
        (address(1, 2, 1 << 64), "published a malformed address"),
        (address(os.getpid(), 99999, 7), "cannot open"),
        (address(os.getpid(), 0, 7), "is not the shared memory of a rank 0"),
    ],
    ids=["nothing", "a number", "five numbers", "a word", "below 0", "65 bits", "no file", "other"],
)
def test_a_rank_refuses_a_malformed_address(address_text, message):
    with pytest.raises(CommunicationError, match=message):
        connect(store_with_address(address_text), 1, 2)


def test_a_malformed_failure_in_the_store_is_an_error():
    store = store_with_address(address(1, 2, 3))
    store.set("failed", "1 7")
    with pytest.raises(
        CommunicationError, match="; what the ranks tell one another is damaged"
    ) as error:
        connect(store, 1, 2)
    assert error.type is CommunicationError


def damage_shared_memory(comm: Communicator, report: Report, what: str, seed: int) -> None:
    talk = store()
    comm.barrier()
    if comm.rank == 0:
        (path,) = segments([os.getpid()])
        with path.open("r+b") as file:
            view = mmap.mmap(file.fileno(), 0)
        records = 64 + 2 * struct.unpack_from("I", view, RECORD)[0]  # where the records end
        noise = random.Random(seed).randbytes
        if what == "failure":
            struct.pack_into("Q", view, FAILED, 77 << 32 | 0xFFFFFFFF)
        elif what == "records":
            view[64:records] = noise(records - 64)
        else:
            view[records:] = noise(len(view) - records)
        talk.set("damaged", "")
    talk.wait(["damaged"])
    report(table(comm._transport))
    ring = partial(comm.all_reduce, torch.ones(9), algorithm="ring", async_op=True)
    report(catch(comm, lambda: ring().wait(TIMEOUT)))


# Elements of a message that ranks lay out whole, and the post that announces it: its fields, in
# 8-byte words, are csrc/segment.hpp's Post.
WHOLE, POST = 20011, 8
COUNT, ELEMENTS, OFFSET, PLACE = 0, 3, 6, 7
BYTES_SENT, ARENA, ROOM = 4 * WHOLE, arena_bytes(2), 1 << 20

FORGED = {
    "no place": ("all_reduce", {PLACE: -1}),
    "a place below 0": ("all_reduce", {PLACE: -(2**62)}),
    "a place past the room": ("all_reduce", {PLACE: ROOM + 4}),
    "too late a place": ("all_reduce", {PLACE: ROOM - BYTES_SENT + 4}),
    "too late in the arena": ("all_reduce", {OFFSET: ARENA - BYTES_SENT + 4}),
    "past the arena": ("all_reduce", {OFFSET: ARENA + 4}),
    # there lies the first message, whose numbers decline
    "bounds that decline": ("all_to_all_v", {PLACE: 32 << 10}),
    "bounds past the room": ("all_to_all_v", {PLACE: ROOM - 20}),
    # only its bounds would fit there, which are never left in the arena
    "parts in the arena": ("all_to_all_v", {OFFSET: ARENA - 32}),
}


@pytest.mark.parametrize("forged", FORGED)
@on_ranks(2)
@leaves_nothing
def test_a_forged_post_is_damage(comm: Communicator, forged: str) -> None:
    """A rank reads nothing outside the memory that it shares with the rank that posted."""
    collective, changes = FORGED[forged]
    call, x, before = COLLECTIVES[collective], torch.linspace(2, 1, WHOLE), segments([os.getpid()])
    with comm.duplicate() as other:
        (path,) = set(segments([os.getpid()])) - set(before)
        other.all_reduce(x)
        call(other, x)  # leaves in place what the forged post announces
        other.all_reduce(x)
        comm.barrier()
        with path.open("r+b") as file:
            words = np.frombuffer(mmap.mmap(file.fileno(), 0), np.int64)
        found = np.flatnonzero(words == WHOLE) - ELEMENTS
        ours, theirs = found[words[found + COUNT] == 3] + POST  # two posts take turns
        comm.barrier()
        if comm.rank == 0:
            while words[theirs + COUNT] != 4:
                assert other._transport.failure() is None
                time.sleep(0.001)
            post = words[theirs : theirs + POST].copy()
            for field, value in changes.items():
                post[field] = value
            words[ours + 1 : ours + POST] = post[1:]
            words[ours + COUNT] = post[COUNT]
            until_failed(other)
        caught = catch(other, lambda: call(other, x))
        assert caught is not None
        assert caught.error == caught.again == "CommunicationError"
        assert "; what the ranks tell one another is damaged\n" in caught.text


def test_an_unknown_kind_of_failure_is_damage(forks: Forks):
    for code, (_, caught) in forks(2, damage_shared_memory, "failure", 0):
        assert code == 0
        assert caught.error == caught.again == "CommunicationError"
        assert "; what the ranks tell one another is damaged\n" in caught.text


@on_ranks(2, pool="forked")
def test_an_unknown_kind_of_failure_is_damage_over_gloo(comm: Communicator) -> None:
    comm = ringdp.init(transport="c10d", timeout=CALL_TIMEOUT)
    comm.barrier()
    if comm.rank == 0:
        comm._transport._store.ask(lambda own: own.set("failed", "77 0 1"))
    caught = catch(comm, lambda: comm.recv(torch.ones(1), 1 - comm.rank))
    assert caught.error == caught.again == "CommunicationError"
    assert "; what the ranks tell one another is damaged\n" in caught.text


@pytest.mark.parametrize("seed", range(4))
def test_random_message_bytes_are_an_error_on_every_rank(forks: Forks, seed):
    """A mismatch where it looks like a message, a timeout where it does not."""
    for code, (_, caught) in forks(2, damage_shared_memory, "messages", seed):
        assert code == 0
        assert caught.error == caught.again


@pytest.mark.parametrize("seed", range(4))
def test_random_record_bytes_are_shown_in_the_table(forks: Forks, seed):
    for code, (shown, _) in forks(2, damage_shared_memory, "records", seed):
        assert code == 0
        assert shown.replace("\n", "").isprintable()
        assert [line[0] for line in shown.splitlines()] == ["r", "0", "1"]


def test_control_characters_of_another_process_are_not_shown():
    assert place(b"\x1b[2Jtrain.py:7\n\xff\0\0") == "?[2Jtrain.py:7?\N{REPLACEMENT CHARACTER}"
    assert place(b"") == "an unknown line"
    assert named(3, 2**55 - 1) == "unknown 31 #3 (unknown 31)"
    assert named(3, 100 << 55 | 2**55 - 1) == "unknown 31 #3 (unknown 31, by unknown 100)"
