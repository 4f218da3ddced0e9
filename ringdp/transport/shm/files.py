"""The anonymous files that the ranks of one host share, and how they come to them.

Rank 0 makes them (memfd) and says through the store where their descriptors are; the others open
them by way of /proc, which lets in the same user only. They never have a name, so nothing is left
in shared memory after any exit, kill -9 included. A process forked from a rank has the arena alone,
for tensors of its parent's may lie there, and keeps that for as long as it lives.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import ExitStack
from typing import NamedTuple

from ringdp.errors import CommunicationError
from ringdp.transport.store.handshake import Handshake

# Nobody may cut a file short that others have mapped: they would die of a SIGBUS.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

ONE_HOST = ". The ranks must run on one host, as one user, and see each other's processes"


class Address(NamedTuple):
    """Where rank 0's files are, as sent through the store."""

    pid: int
    token: int
    segment: int
    mail: int
    arena: int = -1  # there is one already


def create(name: str, size: int, *, reserve: bool) -> int:
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with ExitStack() as until_whole:
            until_whole.callback(os.close, fd)
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, size)
            if reserve:  # out of memory is an error here, not a SIGBUS later
                os.posix_fallocate(fd, 0, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            until_whole.pop_all()
            return fd
    except OSError as e:
        raise CommunicationError(
            f"no shared memory: {size >> 20} MiB asked for, {e}{advice(e)}"
        ) from e


def advice(error: Exception, otherwise: str = "") -> str:
    """What to do where descriptors are short."""
    if os.strerror(errno.EMFILE) not in str(error):
        return otherwise
    return (
        ". A communicator holds one for each of its ranks, and two more: close those that are done "
        "with, or raise `ulimit -n`"
    )


def open_other(pid: int, fd: int, rank: int = 0) -> int:
    """That file of `rank`. Raises CommunicationError."""
    path = f"/proc/{pid}/fd/{fd}"
    try:
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as e:
        raise CommunicationError(
            f"cannot open rank {rank}'s shared memory at {path} ({e.strerror}){advice(e, ONE_HOST)}"
        ) from e
    # A store that others can write to may name a file that is not that rank's.
    try:
        seals = fcntl.fcntl(opened, fcntl.F_GET_SEALS)
    except OSError:  # not a memfd
        seals = 0
    if os.fstat(opened).st_uid != os.geteuid() or seals != SEALS:
        os.close(opened)
        raise CommunicationError(f"{path} is not the shared memory of a rank {rank} of this user")
    return opened


def ask(handshake: Handshake) -> Address:
    said = handshake.heard("segment", 0)
    try:
        address = Address(*map(int, said.split()))
        address.token.to_bytes(8)  # of which csrc makes a number
        return address
    except (TypeError, ValueError, OverflowError) as e:
        raise CommunicationError(f"rank 0's shared memory cannot be at {said!r}") from e


def answer(handshake: Handshake, address: Address) -> None:
    handshake.say("segment", " ".join(map(str, address)))
