"""The anonymous files that the ranks of one host share, and how each rank opens them.

Rank 0 creates them (memfd) and publishes their descriptors through the store; the others open them
through /proc, which admits only the same user. The files never have a name, so no exit, not even
kill -9, leaves anything in shared memory. A process forked from a rank keeps only the arena, where
tensors of its parent may lie, for as long as it lives.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import ExitStack
from typing import NamedTuple

from ringdp.errors import CommunicationError
from ringdp.transport.store.handshake import Handshake

# Truncating a file that others have mapped would kill them with SIGBUS.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

ONE_HOST = ". The ranks must run on one host, as one user, and see each other's processes"


class Address(NamedTuple):
    """Rank 0's process and the descriptors of its files, as published through the store."""

    pid: int
    token: int
    segment: int
    mail: int
    arena: int = -1  # -1: the ranks share an arena already


def create(name: str, size: int, *, reserve: bool) -> int:
    """Return a new sealed file of `size` bytes; `reserve` commits its memory.

    Raises CommunicationError if memory or descriptors are short.
    """
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with ExitStack() as until_whole:
            until_whole.callback(os.close, fd)
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, size)
            if reserve:  # so that out of memory is an error here and not a SIGBUS later
                os.posix_fallocate(fd, 0, size)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            until_whole.pop_all()
            return fd
    except OSError as e:
        raise CommunicationError(
            f"no shared memory: {size >> 20} MiB asked for, {e}{advice(e)}"
        ) from e


def advice(error: Exception, otherwise: str = "") -> str:
    """Return what to do if `error` says that descriptors are short, `otherwise` if not."""
    if os.strerror(errno.EMFILE) not in str(error):
        return otherwise
    return (
        ". A communicator holds one descriptor per rank and two more: close unused communicators, "
        "or raise `ulimit -n`"
    )


def open_other(pid: int, fd: int, rank: int = 0) -> int:
    """Open that descriptor of `rank`'s process. Raises CommunicationError if it cannot be opened
    or is not a file of ours."""
    path = f"/proc/{pid}/fd/{fd}"
    try:
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as e:
        raise CommunicationError(
            f"cannot open rank {rank}'s shared memory at {path} ({e.strerror}){advice(e, ONE_HOST)}"
        ) from e
    # Others may be able to write to the store, and may have named a file that is not that rank's.
    try:
        seals = fcntl.fcntl(opened, fcntl.F_GET_SEALS)
    except OSError:  # not a memfd
        seals = 0
    if os.fstat(opened).st_uid != os.geteuid() or seals != SEALS:
        os.close(opened)
        raise CommunicationError(f"{path} is not the shared memory of a rank {rank} of this user")
    return opened


def read_address(handshake: Handshake) -> Address:
    """Return the address that rank 0 publishes. Raises CommunicationError if it is malformed."""
    text = handshake.read("segment", 0)
    try:
        address = Address(*map(int, text.split()))
        address.token.to_bytes(8)  # it must fit csrc's uint64
        return address
    except (TypeError, ValueError, OverflowError) as e:
        raise CommunicationError(f"rank 0 published a malformed address: {text!r}") from e


def publish_address(handshake: Handshake, address: Address) -> None:
    handshake.publish("segment", " ".join(map(str, address)))
