"""The transport over peer memory: a collective is one kernel, which writes to its peers' GPUs.

A rank's part in each is a job, a table in its GPU's memory that the kernel reads: made at the first
call of that length, and kept for those after it, on whatever buffer. Beside the windows the kernel
needs room, which all share, for scratch chunks and for sums of 16-bit floats.

All channels run in every collective: both ends of one must cut a chunk alike, and ranks need not
know how long each other's buffers are. All messages carry a number that says which collective they
are of, and the first one holds nothing else (see `jobs.greeted`): no rank takes what it gets for
another collective's, or waits in one that others are not in. Leaves out: ranks of several hosts.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import DistError

from ringdp.schedule.program import Program
from ringdp.transport.base import REDUCE_OPS, Exchange, FailureKind, Prepared, ReduceOp, Run
from ringdp.transport.c10d.transport import GOLDEN, Failed
from ringdp.transport.device import in_flight
from ringdp.transport.device.in_flight import Given
from ringdp.transport.device.stamp import Stamped
from ringdp.transport.device.streams import device_of
from ringdp.transport.device.transport import DeviceTransport
from ringdp.transport.peer import jobs
from ringdp.transport.peer.jobs import LONGEST, SLAB, Fault, Job, Shape, kernel_name
from ringdp.transport.peer.kernels import Launch, kernels_on
from ringdp.transport.peer.windows import windows
from ringdp.transport.store.handshake import FIRST_PAUSE, LONGEST_PAUSE

DEPTH = 4  # slots of a channel: the fused ring needs 2
CHANNELS = {"cuda": 16, "cpu": 2}  # not measured: NCCL takes as many blocks within a host
MOST = 64 << 20  # bytes that a window's slots hold: those of 8 ranks are as large as can be
KEPT = 512  # jobs
LARGEST = 1 << 62  # of numbers
FAULTS = {
    Fault.TIMEOUT: FailureKind.TIMEOUT,
    Fault.MISMATCH: FailureKind.MISMATCH,
    Fault.STOPPED: FailureKind.ABORTED,
}


_of_replays: list[object] = []  # until the process ends


class _Asked(NamedTuple):
    """What makes a job another one."""

    program: Program
    bounds: tuple[int, ...]
    op: ReduceOp
    dtype: torch.dtype
    timeout: float


class _Made(NamedTuple):
    job: Tensor  # int64[1, fields of Job], on the device
    tables: Tensor  # which it points to
    shared: int


class PeerTransport(DeviceTransport):
    """One rank's end. See `Transport`."""

    depth = DEPTH

    def __init__(self, given: Given, *, host: bool) -> None:
        """As a DeviceTransport, on the current device. `host`: the kernels' source as threads, over
        host memory. Raises UsageError where they cannot be had."""
        where = device_of("peer", host=host)
        self._kernels = kernels_on(where)
        self._shape = shape(given.handshake.ranks, CHANNELS[where.type])
        self._last_words = given.store
        self._launching, self._left, self._exits = threading.Lock(), False, threading.Event()
        self._jobs_made: OrderedDict[_Asked, _Made] = OrderedDict()
        self._windows = windows(where, given.handshake, self._shape.window)
        super().__init__(given, where)

    def _join(self) -> None:
        self._counts = self._put(torch.zeros(self._shape.counts, dtype=torch.int64))
        self._table = self._put(torch.tensor(self._windows.addresses))
        # Where the kernel writes and the host looks, on a GPU as well.
        self._failure = torch.zeros(1, dtype=torch.int64)
        if self.device.type == "cuda":
            self._failure = self._failure.pin_memory()
        self._streams.drain()

    def _put(self, data: Tensor) -> Tensor:
        return self._streams.sent(data)

    def prepare(self, what: Run | Exchange) -> Prepared:
        """Raises UsageError for a program that a block's memory does not hold."""
        if isinstance(what, Run):
            jobs.shared_bytes([jobs.greeted(what.program)])
        return super().prepare(what)

    def sent_bytes(self) -> int:
        """Waits for what is under way on the device: there it is counted."""
        with self._streams.current():
            counts = self._streams.fetched(self._counts)
            self._streams.drain()
        return super().sent_bytes() + int(counts[:, :, 2].sum())

    def end(self) -> None:
        """See `Ending`."""
        self._exits.set()  # nor for the others: their windows of this rank's go with the process
        super().end()

    # --- on the thread that issues

    def _execute(self, ours: Stamped, run: Run, buffer: Tensor) -> int:
        made, channels = self._made(run), self._shape.channels
        room = self._room(jobs.room_bytes(run.program, self._shape, channels, run.dtype)).data_ptr()
        name, at, number = kernel_name(run.dtype), buffer.data_ptr(), self._agreed(ours)
        with self._launching:
            if self._left:  # and with it the windows
                raise Failed(FailureKind.STOPPED, self.rank)
            self._kernels.launch(
                Launch(name, (channels, 1), made.job, made.shared, at, room, number)
            )
        return 0  # they are counted on the device

    def _agreed(self, ours: Stamped) -> int:
        """What all messages of a collective carry, not 0: what its ranks must agree upon."""
        number, kind, elements, site = ours.call
        uneven = not self._differ(ours.call, (number, kind, elements + 1, site))
        return (ours.digest + (0 if uneven else elements) * GOLDEN) % LARGEST + 1

    def _made(self, run: Run) -> _Made:
        asked = _Asked(run.program, run.bounds, run.op, run.dtype, self.timeout)
        if asked in self._jobs_made:
            self._jobs_made.move_to_end(asked)
            made = self._jobs_made[asked]
        else:
            if self._streams.capturing():
                raise self._uncapturable("a table for its kernel")
            program = jobs.greeted(run.program)
            shared = jobs.shared_bytes([program])
            rows = jobs.rows_of(program).flatten().view(torch.int64)  # 6 of 4 bytes each
            tables = self._put(torch.cat([torch.tensor(run.bounds), rows]))
            job = Job(
                self.rank,
                *self._shape,
                active=self._shape.channels,
                number=0,  # this, buffer and room are the launch's
                timeout=int(min(self.timeout * 1e9, LONGEST)),
                op=REDUCE_OPS.index(run.op),
                rows=tables.data_ptr() + 8 * len(run.bounds),
                length=len(program.rows),
                bounds=tables.data_ptr(),
                chunks=program.chunks,
                scratch=program.scratch,
                buffer=0,
                room=0,
                counts=self._counts.data_ptr(),
                failure=self._failure.data_ptr(),
                windows=self._table.data_ptr(),
            )
            made = _Made(self._put(torch.tensor([job])), tables, shared)
            self._jobs_made[asked] = made
            if len(self._jobs_made) > KEPT:
                self._jobs_made.popitem(last=False)
        if self._streams.capturing():
            self._captured |= {made.job, made.tables}
        return made

    # --- on the thread that watches

    def _check_health(self) -> None:
        if not (word := int(self._failure)):
            return
        found = jobs.failed(word)
        if found.fault is Fault.STOPPED:  # whoever has stopped it tells why, and first
            self._failures.changed.wait_for(lambda: self._failures.failure, in_flight.PATIENCE)
        raise Failed(FAULTS[found.fault], self.rank if found.fault is Fault.TIMEOUT else found.peer)

    def _leave_device(self, *, hangs: bool) -> None:
        replays = bool(self._captured)  # of graphs: of these nobody here knows the end
        if hangs or replays:
            self._windows.stop(self.rank + 1)
        with self._launching:  # on the host until the kernel has ended
            self._left = True
        self._streams.drain()
        self._jobs_made.clear()
        if replays:  # which may yet write to windows, and to their counts as they end
            held = self._counts, self._table, self._failure, self._windows
            _of_replays.append((*self._captured, *held))
            return
        self._windows.close()
        # Well before `_leave` takes this for an end that hangs.
        if self._all_part(in_flight.PATIENCE / 2 if hangs else in_flight.PATIENCE):
            self._windows.free()  # else it stays until the process ends: a peer may yet write there

    def _all_part(self, seconds: float) -> bool:
        """Whether all ranks have let go of each other's windows, which may take them a while."""
        until, pause = time.monotonic() + seconds, FIRST_PAUSE
        with suppress(DistError):
            self._last_words.set(f"parted/{self.rank}", "")
            parted = [f"parted/{rank}" for rank in range(self.ranks)]
            while time.monotonic() < until and not self._exits.wait(pause):
                if self._last_words.check(parted):
                    return True
                pause = min(2 * pause, LONGEST_PAUSE)
        return False


def shape(ranks: int, channels: int) -> Shape:
    """Of windows whose slots hold MOST bytes at the most, if none need be less than a line."""
    slab = SLAB
    while slab > jobs.LINE and ranks * channels * DEPTH * slab > MOST:
        slab //= 2
    return Shape(ranks, channels, DEPTH, slab)
