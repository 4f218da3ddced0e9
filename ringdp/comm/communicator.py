"""The communicator: what a user holds.

Its collectives are in `reductions` and `moves`, and issued by `job`; here are its copies and its
end. Collectives run in the order in which they are issued; every rank must issue the same ones in
the same order. One thread at a time may use a communicator; others take a `duplicate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch import Tensor

from ringdp.comm.arguments import MOST, check_async, patience, whole
from ringdp.comm.call import ANYBODY
from ringdp.comm.graph_break import uncompiled
from ringdp.comm.guard import Guard
from ringdp.comm.messages import Messages
from ringdp.comm.moves import Moves
from ringdp.comm.reductions import Reductions
from ringdp.comm.traced import Traced
from ringdp.comm.work import Group, Work
from ringdp.errors import UsageError
from ringdp.tape import recorder
from ringdp.transport import heap
from ringdp.transport.arena import Arena
from ringdp.transport.base import FailureKind, Transport

# Joins those ranks of the job, under a name of their own; collective over them. The transport: of
# which they have agreed on this one. The arena: that of another transport over the same ranks.
Connect = Callable[[str, Sequence[int], Transport | None, Arena | None], Transport]


@uncompiled
class Communicator(Reductions, Moves, Messages, Traced):
    """A group of `size` ranks, of which this process is `rank`. Made by `ringdp.init()`.

    What its collectives take and raise is in `ringdp.comm.job`; which `op` there is of which dtype,
    in `ringdp.comm.reductions`. `closed`: whether it can be used no more.
    """

    def __init__(
        self,
        connect: Connect,
        ranks: Sequence[int],
        *,
        name: str,
        timeout: float,
        warn_after: float,
        parent: Transport | None = None,
        arena: Arena | None = None,
        duplicates: WeakSet[Transport] | None = None,
    ) -> None:
        """Collective over `ranks`, which are numbers of the job: here they are 0, 1, ...

        Raises UsageError for more ranks than a call's fingerprint can name.
        """
        if len(ranks) > ANYBODY:
            raise UsageError(f"a communicator of {len(ranks)} ranks; allowed: at most {ANYBODY}")
        self._connect, self._ranks, self._name = connect, tuple(ranks), name
        self._beside = WeakSet[Transport]() if duplicates is None else duplicates  # this one, too
        transport = connect(name, self._ranks, parent, arena)
        super().__init__(transport, Guard(transport, warn_after, self._beside))
        self._beside.add(transport)
        if self.device.type == "cpu":
            heap.keep()
        self.set_timeout(timeout)
        self._duplicates: WeakSet[Communicator] = WeakSet()
        recorder.join(self)

    @property
    def device(self) -> torch.device:
        """Where the tensors are that it moves best, and those of `empty`."""
        return self._transport.device

    @property
    def timeout(self) -> float:
        """How long a call may wait for another rank, in seconds."""
        return self._transport.timeout

    def set_timeout(self, timeout: float) -> None:
        """For this rank's calls from now on, and for the communicators made of this one: above 0
        and finite, as of `init`."""
        self._transport.timeout = patience(timeout)

    @property
    def ended(self) -> bool:
        """Whether no other call can end: it is closed, or one has raised a CommunicationError."""
        return self.closed or self._guard.error is not None

    @property
    def wired(self) -> bool:
        """Whether bytes go over a network that knows none of our collectives: torch's, a `Link`."""
        return self._transport.own is None or self._transport.link is not None

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised tensor in the memory that the transport moves best.

        In shared memory: a CPU tensor that all ranks of the host have mapped. Collectives read and
        write it in place, where others are copied: an all_reduce if every rank's tensor is such a
        one, a reduce_scatter or broadcast if its input is, an all_gather if this rank's part is.
        Its storage cannot be resized.
        """
        one = f"of the shape {shape} a length"
        lengths = tuple(whole("empty", one, length, MOST, "lengths") for length in shape)
        if not isinstance(dtype, torch.dtype):
            raise UsageError(f"empty: dtype is {dtype!r}; allowed: a torch.dtype")
        return self._transport.empty(lengths, dtype)

    def duplicate(self) -> Communicator:
        """Another communicator over the same ranks, whose collectives do not queue behind these.

        Collective: every rank must call it.
        """
        name = self._agreed(self.all_reduce, torch.zeros(1))
        return self._made(name, self._ranks, self._transport.arena, self._beside)

    def name_tags(self, units: Sequence[str]) -> None:
        """Errors name the unit of a collective, which is its tag."""
        self._guard.units = units

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """A communicator of the ranks that give the same `color`, a number from 0 on.

        Collective: every rank must call it. There, ranks are in the order of `key`, and of rank
        here where keys are equal. None for a rank whose color is None.
        """
        most = torch.iinfo(torch.int64).max
        if color is not None:
            color = whole("split", "color", color, most, "but for None, colors")
        key = whole("split", "key", key, most, "keys", -most)
        mine = torch.tensor([-1 if color is None else color, key])
        given = mine.new_empty(self.size, 2)
        name = self._agreed(self.all_gather, given, mine)
        if color is None:
            return None
        asked = [(k, rank) for rank, (c, k) in enumerate(given.tolist()) if c == color]
        ranks = [self._ranks[rank] for _, rank in sorted(asked)]
        return self._made(f"{name}.{color}", ranks)

    def _agreed(self, call: Callable[..., Work], *tensors: Tensor) -> str:
        """A name for what all ranks make next, once they have called this: on the host, where who
        has died is lost, or late. Who leaves it by Ctrl-C gives up, as the others may have gone on.
        """
        issued = self.issued
        try:
            call(*tensors).wait()
        except KeyboardInterrupt:
            if self.issued > issued:
                self._transport.fail(FailureKind.ABORTED, self.rank)
            raise
        return f"{self._name}.{self.issued}"

    def _made(
        self,
        name: str,
        ranks: Sequence[int],
        arena: Arena | None = None,
        duplicates: WeakSet[Transport] | None = None,
    ) -> Communicator:
        made = Communicator(
            self._connect,
            ranks,
            name=name,
            timeout=self.timeout,
            warn_after=self._guard.warn_after,
            parent=self._transport,
            arena=arena,
            duplicates=duplicates,
        )
        self._duplicates.add(made)
        return made

    @contextmanager
    def group(self, *, async_op: bool = False) -> Iterator[Group]:
        """Issue the calls of the block at once, and wait for all of them at its end.

        With `async_op` it does not wait: the Group that it gives can be waited for later. An error
        in the block goes through, and leaves what was issued under way.
        """
        check_async("group", async_op)
        outer, group = self._group, Group()
        self._collect(group)
        try:
            yield group
        finally:
            self._collect(outer)
        if not async_op:
            group.wait()

    def _collect(self, group: Group | None) -> None:
        """The works of calls from now on, in that group."""
        self._group = group
        if self._ready:
            self._ready.held = group is not None

    def sent_bytes(self) -> int:
        """Payload bytes that this rank has sent to others over this communicator."""
        return self._transport.sent_bytes()

    def close(self) -> None:
        """Stop. Ranks that still wait for this one raise PeerLost.

        A collective that ended here may still fail elsewhere: a broadcast ends at its root before
        all have it. If it is known by now that one did, and no call has raised it, this one does.
        What Ctrl-C has ended half-way, a second call ends. One that is collected, with nothing
        under way, is closed, and none is collected while a trace runs; over nccl and peer none is
        before its end, and over peer each holds up to 64 MiB of its GPU until then.
        """
        try:
            if not self.closed:
                self._guard.farewell(self.issued)
        finally:
            self._close()

    def abort(self) -> None:
        """Give up, with all duplicates: every other rank's calls raise PeerLost at once.

        It waits for nobody. After it, the ranks may come together again by `ringdp.init()`.
        """
        for duplicate in list(self._duplicates):
            duplicate.abort()
        if not self.closed:
            self._transport.fail(FailureKind.ABORTED, self.rank)
        self._close()

    def _close(self) -> None:
        self.closed = True
        recorder.leave(self)
        self._beside.discard(self._transport)
        self._transport.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # which says more than what else we could raise
            self._close()
