"""Stand-ins for the device's streams and for NCCL's communicator, for tests on the host."""

from __future__ import annotations

import threading
from typing import Any

from ringdp import Communicator
from ringdp.transport.device.streams import End, Streams


class Later:
    def __init__(self, passed: threading.Event) -> None:
        self._passed, self._asked = passed, False

    def query(self) -> bool:
        """False at the first query, as on a device."""
        asked, self._asked = self._asked, True
        return asked and self._passed.is_set()


class BehindStreams(Streams):
    """A device that exchanges stamps at once, and ends collectives when `ended` is set."""

    def __init__(self) -> None:
        self.ended, self.met = threading.Event(), threading.Event()
        self.met.set()
        self.watched, self.captures, self._ends = False, False, 0

    def end(self) -> End:
        self._ends += 1  # ends of stamps and of collectives alternate
        return Later(self.met if self._ends % 2 else self.ended)

    def capturing(self) -> bool:
        return self.captures


def put_behind(comm: Communicator) -> BehindStreams:
    streams = comm._transport._streams = BehindStreams()
    return streams


class SpiedComm:
    """Wraps NCCL's communicator: records the calls, and whether it was aborted."""

    def __init__(self, comm: Communicator) -> None:
        nccl = comm._transport._nccl
        self.calls, self.aborted, self._comm = list[str](), threading.Event(), nccl.comm
        comm._transport._nccl = nccl._replace(comm=self)

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self._comm, name)

    def abort(self) -> None:
        self.aborted.set()
        self._comm.abort()
