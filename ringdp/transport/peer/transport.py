"""The transport over peer memory: a collective is one kernel, which writes to its peers' GPUs.

A rank's part of it is a job, a table in its GPU's memory that the kernel reads. It is made at the
first call of that length and kept for later ones, on whatever buffer. Beside the windows, the
kernel needs room for scratch chunks and for sums of 16-bit floats, which all collectives share.

All channels run in every collective, because both ends of a channel must cut a chunk alike, and
ranks need not know the length of each other's buffers. Every message carries a number that
identifies its collective, and the first one carries nothing else (see `jobs.greeted`). So no rank
accepts another collective's data, or waits in one that others have not called. Leaves out: several
hosts.
"""

from __future__ import annotations

import re
import threading
import time
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import DistError

from ringdp.errors import CommunicationError
from ringdp.transport.base import Exchange, FailureKind, Prepared, Run, Stamped
from ringdp.transport.device import in_flight
from ringdp.transport.device.in_flight import Given
from ringdp.transport.device.streams import device_of
from ringdp.transport.device.transport import DeviceTransport
from ringdp.transport.peer import jobs
from ringdp.transport.peer.jobs import SLAB, Fault, Shape, kernel_name
from ringdp.transport.peer.kernels import Launch, kernels_on, resident
from ringdp.transport.peer.windows import windows
from ringdp.transport.store.failures import Failed
from ringdp.transport.store.handshake import FIRST_PAUSE, LONGEST_PAUSE, Handshake

DEPTH = 4  # FIFO slots of a channel: the fused ring needs 2
# Blocks of a rank, at most. All communicators' blocks spin together, one on a multiprocessor. 16,
# 32 and 64 move 187, 333 and 462 GB/s [busbw of 2 ranks in one H200's memory; NVLink has 450 each
# way].
CHANNELS = {"cuda": 16, "cpu": 2}
BESIDE = 4  # communicators whose blocks fit a GPU together; if it is small, each has fewer
# Bytes of all slots of a window: with 8 ranks, slabs still have SLAB bytes.
MOST = 64 << 20
KEPT = 512  # jobs: those used last
FAULTS = {
    Fault.TIMEOUT: FailureKind.TIMEOUT,
    Fault.MISMATCH: FailureKind.MISMATCH,
    Fault.STOPPED: FailureKind.ABORTED,
}


_of_replays: list[object] = []  # memory that graph replays may use, kept until the process ends


class _Made(NamedTuple):
    job: Tensor  # int64[1, fields of Job], on the device
    tables: Tensor  # the bounds and rows that it points to
    shared: int


class PeerTransport(DeviceTransport):
    """One rank's end. See `Transport`."""

    depth = DEPTH

    def __init__(self, given: Given, *, host: bool) -> None:
        """Make a DeviceTransport on the current device. `host` runs the kernels' source as threads
        over host memory. Raises UsageError if the kernels are not available."""
        where = device_of("peer", host=host)
        self._kernels = kernels_on(where)
        self._shape = shape(given.handshake.ranks, agreed(channels_on(where), given.handshake))
        self._last_words = given.store
        self._exits = threading.Event()
        self._made = lru_cache(maxsize=KEPT)(self._make)
        self._windows = windows(where, given.handshake, self._shape.window)
        super().__init__(given, where)

    def _join(self) -> None:
        self._counts = self._streams.sent(
            torch.zeros(self._shape.counts, dtype=torch.int64, device="cpu")
        )
        self._table = self._streams.sent(torch.tensor(self._windows.addresses, device="cpu"))
        # Kernel and host both write and poll it, so on a GPU it is pinned host memory: a copy to
        # the GPU might wait for the very kernel that it has to end.
        self._failure = torch.zeros(1, dtype=torch.int64, device="cpu")
        if self.device.type == "cuda":
            self._failure = self._failure.pin_memory()
        self._streams.drain()

    def prepare(self, what: Run | Exchange) -> Prepared:
        """See `Transport`. Raises UsageError if a program does not fit a block's shared memory."""
        if isinstance(what, Run):
            jobs.shared_bytes(jobs.greeted(what.program))
        return super().prepare(what)

    def sent_bytes(self) -> int:
        """Bytes sent. Waits for the collectives under way, as the device counts them."""
        with self._streams.current():
            counts = self._streams.fetched(self._counts)
            self._streams.drain()
        return super().sent_bytes() + int(counts[:, :, 2].sum())

    def end(self) -> None:
        """See `Ending`."""
        # Do not wait for the others either: their windows' mappings here go with the process.
        self._exits.set()
        super().end()

    # --- on the issuing thread

    def _execute(self, ours: Stamped, run: Run, buffer: Tensor) -> int:
        made = self._made(run._replace(kind=0), self.timeout)  # a job serves every tag
        if self._streams.capturing():
            self._captured |= {made.job, made.tables}
        channels = self._shape.channels
        room = self._room(jobs.room_bytes(run.program, self._shape, channels, run.dtype)).data_ptr()
        name, at, number = kernel_name(run.dtype), buffer.data_ptr(), ours.digest + 1  # not 0
        self._kernels.launch(Launch(name, (channels, 1), made.job, made.shared, at, room, number))
        return 0  # the device counts the bytes

    def _make(self, run: Run, timeout: float) -> _Made:
        if self._streams.capturing():
            raise self._uncapturable("a table for its kernel")
        program = jobs.greeted(run.program)
        tables = self._streams.sent(jobs.tables_of(program, run.bounds))
        job = jobs.job_of(  # the launch sets number, buffer and room
            program,
            tables,
            self._shape,
            run.op,
            active=self._shape.channels,
            timeout=timeout,
            counts=self._counts,
            failure=self._failure,
            windows=self._table,
        )
        shared = jobs.shared_bytes(program)
        return _Made(self._streams.sent(torch.tensor([job], device="cpu")), tables, shared)

    # --- on the watchdog thread

    def _check_health(self) -> None:
        if not (word := int(self._failure)):
            return
        found = jobs.decoded(word)
        if found.fault is Fault.STOPPED:  # wait for the rank that stopped us to report why
            self._failures.wait(in_flight.PATIENCE)
        raise Failed(FAULTS[found.fault], self.rank if found.fault is Fault.TIMEOUT else found.peer)

    def _leave_device(self, *, hangs: bool) -> None:
        replays = bool(self._captured)  # graphs may replay, and nothing here sees their end
        if hangs or replays:
            self._failure[0] = jobs.stopped(self.rank)
        with self._launching:
            pass  # a launch under way is over, and on the host its kernel; later ones are refused
        self._streams.drain()
        del self._made  # and the cycle through it
        if replays:  # a replay may still write to windows, and to its counts when it ends
            held = self._counts, self._table, self._failure, self._windows
            _of_replays.append((*self._captured, *held))
            return
        self._windows.close()
        # Well before `_leave` considers this hung.
        if self._all_part(in_flight.PATIENCE / 2 if hangs else in_flight.PATIENCE):
            self._windows.free()  # else kept until the process ends: a peer may still write there

    def _all_part(self, seconds: float) -> bool:
        """Whether all ranks unmap each other's windows within `seconds`."""
        until, pause = time.monotonic() + seconds, FIRST_PAUSE
        with suppress(DistError):
            self._last_words.set(f"parted/{self.rank}", "")
            parted = [f"parted/{rank}" for rank in range(self.ranks)]
            while time.monotonic() < until and not self._exits.wait(pause):
                if self._last_words.check(parted):
                    return True
                pause = min(2 * pause, LONGEST_PAUSE)
        return False


def channels_on(device: torch.device) -> int:
    """The blocks of a rank that has this device."""
    most = CHANNELS[device.type]
    return most if device.type == "cpu" else max(1, min(most, resident(device) // BESIDE))


def agreed(channels: int, handshake: Handshake) -> int:
    """The least of all ranks' channels, since both ends must have as many. Collective.

    Raises CommunicationError if a rank's are malformed.
    """
    handshake.publish(f"channels/{handshake.rank}", str(channels))
    least = channels
    for rank in range(handshake.ranks):
        text = handshake.read(f"channels/{rank}", rank)
        if not re.fullmatch(rb"[1-9]\d?", text):
            raise CommunicationError(f"rank {rank} cannot have {text!r} channels")
        least = min(least, int(text))
    return least


def shape(ranks: int, channels: int) -> Shape:
    """The shape of windows with the largest slab, at most SLAB and at least a line, for which a
    window's slots hold at most MOST bytes."""
    slab = SLAB
    while slab > jobs.LINE and ranks * channels * DEPTH * slab > MOST:
        slab //= 2
    return Shape(ranks, channels, DEPTH, slab)
