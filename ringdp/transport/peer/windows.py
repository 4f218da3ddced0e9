"""The windows of all ranks, in this process: each rank makes its own and maps those of the others.

On a GPU they are CUDA allocations, mapped through CUDA IPC; on the host they are anonymous files.
The ranks exchange their locations through the store: a CUDA IPC handle, or a file descriptor, which
only the same user can open. A rank that maps a window checks its size; on a GPU, also its rank.
"""

from __future__ import annotations

import mmap
import os
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor

from ringdp.errors import CommunicationError
from ringdp.transport.peer.kernels import on
from ringdp.transport.shm.files import create, open_other
from ringdp.transport.store.handshake import Handshake

HANDLE_BYTES = 64  # CUDA_IPC_HANDLE_SIZE
LAZILY = 1  # cudaIpcMemLazyEnablePeerAccess
TO_DEVICE, TO_HOST = 1, 2  # cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost
MARK = 8  # offset in a window of its size and rank (int64 each), behind the stop word
ALIKE = "peer memory is for GPUs of one host that reach each other's memory, by NVLink or PCIe"


class HostWindows:
    """Windows in anonymous files, each freed once all that have mapped it have ended or closed."""

    def __init__(self, handshake: Handshake, size: int) -> None:
        """Collective. Raises CommunicationError."""
        rank = handshake.rank
        fd = create(f"ringdp-window-{rank}", size, reserve=True)
        try:
            handshake.publish(f"window/{rank}", f"{os.getpid()} {fd}")
            self._mapped = {
                r: _mapped(fd if r == rank else _opened(handshake, r), size, r == rank)
                for r in range(handshake.ranks)
            }
            handshake.barrier("windows")
        finally:
            os.close(fd)
        self._rank = rank
        self.addresses = [m.data_ptr() for m in self._mapped.values()]

    def close(self) -> None:
        """Unmap the others' windows."""
        self._mapped = {self._rank: self._mapped[self._rank]}

    def free(self) -> None:
        """Free the rank's own window. No other rank may still have it mapped."""
        self._mapped.clear()


def _opened(handshake: Handshake, rank: int) -> int:
    text = handshake.read(f"window/{rank}", rank)
    try:
        pid, fd = map(int, text.split())
    except ValueError as e:
        raise CommunicationError(f"rank {rank}'s window cannot be at {text!r}") from e
    return open_other(pid, fd, rank)


def _mapped(fd: int, size: int, keep: bool) -> Tensor:
    """The window as uint8[size], mapped for the tensor's lifetime. Forked processes do not inherit
    it. Closes `fd` unless `keep`."""
    try:
        if os.fstat(fd).st_size != size:
            raise CommunicationError(
                f"a window of {os.fstat(fd).st_size} bytes; this rank's has {size}"
            )
        memory = mmap.mmap(fd, size)
        memory.madvise(mmap.MADV_DONTFORK)
        return torch.frombuffer(memory, dtype=torch.uint8)
    except OSError as e:
        raise CommunicationError(f"no memory for a window of {size} bytes: {e}") from e
    finally:
        if not keep:
            os.close(fd)


class CudaWindows:
    """Windows on a GPU, through CuPy's binding to the CUDA runtime."""

    def __init__(self, device: torch.device, handshake: Handshake, size: int) -> None:
        """Collective. Raises CommunicationError if a GPU cannot access another's memory."""
        import cupy

        rank, ranks = handshake.rank, handshake.ranks
        self._device, self._rank = device, rank
        self._cupy: Any = cupy
        self._cuda = cupy.cuda.runtime
        self._mapped = dict[int, int]()
        try:
            with self._on():
                self._mapped[rank] = own = self._cuda.malloc(size)
                self._cuda.memset(own, 0, size)
                mark = torch.tensor([size, rank], device="cpu")
                self._cuda.memcpy(own + MARK, mark.data_ptr(), mark.nbytes, TO_DEVICE)
                self._cuda.deviceSynchronize()
                handshake.publish(f"window/{rank}", self._cuda.ipcGetMemHandle(own).hex())
                for r in set(range(ranks)) - {rank}:
                    self._mapped[r] = self._open(handshake, r)
                    self._check(r, size)
            handshake.barrier("windows")
        except BaseException as e:
            self.close()
            self.free()
            if isinstance(e, self._cuda.CUDARuntimeError):
                raise CommunicationError(
                    f"rank {rank} cannot have and map windows of {size} bytes: {e}; {ALIKE}"
                ) from e
            raise
        self.addresses = [self._mapped[r] for r in range(ranks)]

    def _on(self) -> AbstractContextManager[None]:
        return on(self._cupy, self._device)

    def _open(self, handshake: Handshake, rank: int) -> int:
        text = handshake.read(f"window/{rank}", rank)
        try:
            handle = bytes.fromhex(text.decode())
        except ValueError:
            handle = b""
        if len(handle) != HANDLE_BYTES:
            raise CommunicationError(f"rank {rank}'s window cannot be at {text!r}")
        return int(self._cuda.ipcOpenMemHandle(handle, LAZILY))

    def _check(self, rank: int, size: int) -> None:
        """Raises CommunicationError if the handle was of another allocation."""
        found = torch.zeros(2, dtype=torch.int64, device="cpu")
        self._cuda.memcpy(found.data_ptr(), self._mapped[rank] + MARK, found.nbytes, TO_HOST)
        if found.tolist() != [size, rank]:
            raise CommunicationError(
                f"what rank {rank} has shared begins with {found.tolist()}: it is no window of "
                f"{size} bytes of rank {rank}"
            )

    def close(self) -> None:
        with self._on():
            for rank in self._mapped.keys() - {self._rank}:
                with suppress(self._cuda.CUDARuntimeError):  # its owner may have exited
                    self._cuda.ipcCloseMemHandle(self._mapped.pop(rank))

    def free(self) -> None:
        with self._on():
            while self._mapped:
                self._cuda.free(self._mapped.popitem()[1])


def windows(device: torch.device, handshake: Handshake, size: int) -> HostWindows | CudaWindows:
    """Collective. `addresses` are those of all ranks' windows in this rank's address space."""
    if device.type == "cpu":
        return HostWindows(handshake, size)
    return CudaWindows(device, handshake, size)
