"""The transport over NCCL: our schedules as groups of sends and receives, or NCCL's collectives."""

from __future__ import annotations

import ctypes
from functools import partial
from math import prod

import torch
from torch import Tensor

from ringdp.transport.base import STAMP_BYTES, Exchange, FailureKind, Issued, Prepared, Run, Stamped
from ringdp.transport.device.in_flight import Given, Met
from ringdp.transport.device.streams import device_of
from ringdp.transport.device.transport import DeviceTransport
from ringdp.transport.nccl import native
from ringdp.transport.nccl.execute import BYTES, Nccl, execute, warm_up
from ringdp.transport.nccl.library import INVALID_USAGE, binding, communicator, grouped, shared_id
from ringdp.transport.nccl.plan import plan
from ringdp.transport.nccl.tiles import Tiles, slab_of, staging_shape
from ringdp.transport.records import Call
from ringdp.transport.store.failures import Failed

LAUNCH = 0.1  # s that `_leave_device` waits for a launch, which can be stuck, before it aborts NCCL


class NcclTransport(DeviceTransport):
    """One rank's end of an NCCL communicator. See `Transport`."""

    depth = None  # it runs whole rounds
    own = "nccl"

    def __init__(self, given: Given, *, host: bool) -> None:
        """Make a DeviceTransport on the current device. `host` selects csrc's NCCL over host memory
        instead of the real one. Raises UsageError if NCCL is not available."""
        device = device_of("nccl", host=host)
        self._binding = binding(host=host)
        self._unique = shared_id(given.handshake, self._binding)
        super().__init__(given, device)

    def _join(self) -> None:
        comm = communicator(self._binding, self.ranks, self._unique, self.rank)
        self._nccl = Nccl(self._binding, comm, self._streams)
        warm_up(self._nccl, self.rank, self.ranks)

    def prepare(self, what: Run | Exchange) -> Prepared:
        if isinstance(what, Run):
            return super().prepare(what)
        native.check(what)
        return Issued(self, what, partial(self._start_own, what))

    def _start_own(
        self, what: Exchange, call: Call, whole: Tensor | None, part: Tensor | None
    ) -> int:
        """Start one of NCCL's own collectives on device buffers. Returns its ticket."""
        all_of_it, piece = (0 if b is None else b.data_ptr() for b in (whole, part))
        act = partial(native.run, what, self._nccl, all_of_it, piece, self.rank, self.ranks)
        return self._issue(self._stamped(call), act, (whole, part))

    def _exchange(self, ours: Stamped) -> Met | None:
        if self.ranks == 1:
            return None
        comm, streams = self._nccl.comm, self._streams
        sent = streams.sent(torch.tensor(ours.stamp, device="cpu"))
        theirs = streams.empty(STAMP_BYTES)
        behind, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        with grouped(self._binding):
            comm.send(sent.data_ptr(), STAMP_BYTES, BYTES, behind, streams.handle)
            comm.recv(theirs.data_ptr(), STAMP_BYTES, BYTES, before, streams.handle)
        return streams.fetched(theirs), streams.end()

    def _execute(self, ours: Stamped, run: Run, buffer: Tensor) -> int:
        made, bounds, size = plan(run.program), run.bounds, buffer.element_size()
        slab = slab_of(run.program, bounds, self._streams.room // size)
        staging = self._room(prod(staging_shape(made, bounds, slab)) * size)
        tiles = Tiles(made, buffer, bounds, staging.view(buffer.dtype), slab)
        return execute(self._nccl, {self.rank: tiles}, run.op)

    def _check_health(self) -> None:
        self._nccl.comm.check_async_error()

    def _leave_device(self, *, hangs: bool) -> None:
        through = self._launching.acquire(timeout=LAUNCH)
        (self._nccl.comm.abort if hangs else self._nccl.comm.destroy)()
        if through:
            self._launching.release()

    def _leave_to_exit(self) -> None:
        """Leak a reference, so that Python does not destroy the communicator: NCCL would wait for
        graphs that still exist."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._nccl.comm))

    def _failed(self, error: RuntimeError, ours: Stamped | None) -> Failed:
        if not isinstance(error, self._binding.NcclError):
            return super()._failed(error, ours)
        if getattr(error, "status", None) == INVALID_USAGE and ours is not None:
            before = (self.rank - 1) % self.ranks
            return Failed(FailureKind.MISMATCH, before, ours.stamp, ours.stamp)
        return Failed(FailureKind.ABORTED, self.rank, why=f"NCCL: {error}")
