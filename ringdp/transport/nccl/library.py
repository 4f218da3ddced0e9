"""Selects the NCCL library of a process, and imports CuPy's binding to it.

CuPy's extension links to `libnccl.so.2` and takes whichever library of that name is already loaded:
torch's CUDA builds have loaded theirs by then. So the two share one library. A process must have
only one: two would be two NCCLs, each with its own state of the GPUs.

The host library is csrc's NCCL over host memory. It has the same name, so a process that has loaded
it cannot have the real one. It is loaded only for `host=True`.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, cast

from ringdp import _core
from ringdp.errors import CommunicationError, UsageError
from ringdp.transport.device.streams import advice_to_install
from ringdp.transport.store.handshake import Handshake

MAPS = Path("/proc/self/maps")
HOST = Path(_core.__file__).with_name("libhostnccl.so")
INVALID_USAGE = 5  # ncclResult_t


class Comm(Protocol):
    """CuPy's NcclCommunicator. Buffers and streams are addresses; counts are in elements."""

    def send(self, buffer: int, count: int, dtype: int, peer: int, stream: int, /) -> None: ...
    def recv(self, buffer: int, count: int, dtype: int, peer: int, stream: int, /) -> None: ...
    def allReduce(  # noqa: N802
        self, source: int, target: int, count: int, dtype: int, op: int, stream: int, /
    ) -> None: ...
    def reduce(
        self, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: int, /
    ) -> None: ...
    def broadcast(
        self, source: int, target: int, count: int, dtype: int, root: int, stream: int, /
    ) -> None: ...
    def reduceScatter(  # noqa: N802
        self, source: int, target: int, count: int, dtype: int, op: int, stream: int, /
    ) -> None: ...
    def allGather(  # noqa: N802
        self, source: int, target: int, count: int, dtype: int, stream: int, /
    ) -> None: ...
    def check_async_error(self) -> None: ...
    def abort(self) -> None: ...
    def destroy(self) -> None: ...


class Binding(Protocol):
    """cupy_backends.cuda.libs.nccl."""

    NcclError: type[Exception]  # with a `status`

    def NcclCommunicator(self, ranks: int, unique: bytes, rank: int, /) -> Comm: ...  # noqa: N802
    def get_unique_id(self) -> bytes: ...
    def groupStart(self) -> None: ...  # noqa: N802
    def groupEnd(self) -> None: ...  # noqa: N802


@cache
def binding(*, host: bool) -> Binding:
    """CuPy's binding to NCCL, or to the host library.

    Raises UsageError if CuPy or a library is missing, or if the process has loaded another one.
    """
    if not loaded():
        (_load_host if host else _load_nccl)()
    try:
        found = import_module("cupy_backends.cuda.libs.nccl")
    except ImportError as e:
        install = "pip install 'ringdp[nccl]'" if host else advice_to_install()
        raise UsageError(f"the NCCL transport needs CuPy ({e}): {install}") from e
    check_loaded(loaded(), host)
    return cast(Binding, found)


def loaded() -> list[str]:
    """The paths of the NCCL libraries that this process has loaded."""
    lines = os.fsdecode(MAPS.read_bytes()).split("\n")
    names = {line.split(maxsplit=5)[5] for line in lines if "/" in line}
    return sorted(n for n in names if re.fullmatch(r"lib(host)?nccl\.so[.\d]*", Path(n).name))


def check_loaded(paths: list[str], host: bool) -> None:
    """Raises UsageError unless `paths` is exactly one library, of the requested kind."""
    if len(paths) != 1:
        found = ", ".join(paths) or "none"
        raise UsageError(f"a process has one NCCL library; this one has loaded {found}")
    if (paths[0] == str(HOST)) != host:
        asked = "the host library, which needs a torch without CUDA" if host else "NCCL"
        raise UsageError(f"asked for {asked}; this process has already loaded {paths[0]}")


def _load_host() -> None:
    try:
        ctypes.CDLL(str(HOST), ctypes.RTLD_GLOBAL)
    except OSError as e:
        raise UsageError(f"this build of ringdp has no host NCCL: {e}") from e


def _load_nccl() -> None:
    """Load NCCL if torch has not: NVIDIA's package if there is one, else the system's."""
    places = ["libnccl.so.2"]
    with suppress(ImportError):
        spec = find_spec("nvidia.nccl")
        roots = spec.submodule_search_locations if spec else None
        places = [*(f"{root}/lib/libnccl.so.2" for root in roots or ()), *places]
    for place in places:
        with suppress(OSError):
            ctypes.CDLL(place, ctypes.RTLD_GLOBAL)
            return
    raise UsageError(f"no libnccl.so.2 on this machine: {advice_to_install()}")


@contextmanager
def grouped(nccl: Binding) -> Iterator[None]:
    """One NCCL group. If a call in it fails, the group is ended and that call's error is raised."""
    nccl.groupStart()
    try:
        yield
    except BaseException:
        with suppress(nccl.NcclError):
            nccl.groupEnd()
        raise
    nccl.groupEnd()


def communicator(nccl: Binding, ranks: int, unique: bytes, rank: int) -> Comm:
    """Make this rank's communicator. Collective. Raises CommunicationError if NCCL fails."""
    try:
        return nccl.NcclCommunicator(ranks, unique, rank)
    except nccl.NcclError as e:
        raise CommunicationError(f"rank {rank} of {ranks} cannot join NCCL: {e}") from e
    except KeyError as e:  # CuPy has no name for ncclInProgress
        raise CommunicationError(
            f"rank {rank} of {ranks} cannot join NCCL, which answered {e} as if its calls did not "
            "block; set NCCL_COMM_BLOCKING=1 in the environment or in nccl.conf"
        ) from e


def shared_id(handshake: Handshake, nccl: Binding) -> bytes:
    """The id of a new NCCL communicator, from rank 0 through the store.

    Raises CommunicationError if it is malformed.
    """
    if handshake.rank == 0:
        handshake.publish("nccl", bytes(nccl.get_unique_id()).hex())
    value = handshake.read("nccl", 0)
    try:
        return bytes.fromhex(value.decode())
    except ValueError as e:
        raise CommunicationError(f"NCCL's id from rank 0 cannot be {value!r}") from e
