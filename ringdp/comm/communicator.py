"""The Communicator class: construction, duplicate and split, groups of calls, close and abort.

Its collectives are in `reductions` and `moves`, and are issued by `job`. Collectives run in the
order issued, and every rank must issue the same ones in the same order. Only one thread at a time
may use a communicator; give every other thread a `duplicate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from ringdp.comm.arguments import MOST, check_async, check_int, check_timeout
from ringdp.comm.call import ANY_RANK
from ringdp.comm.graph_break import uncompiled
from ringdp.comm.guard import Guard
from ringdp.comm.messages import Messages
from ringdp.comm.moves import Moves
from ringdp.comm.reductions import Reductions
from ringdp.comm.traced import CommTracer, Named
from ringdp.comm.work import Group
from ringdp.errors import UsageError
from ringdp.tape import recorder
from ringdp.transport import heap
from ringdp.transport.base import FailureKind, Transport
from ringdp.transport.threads import Grouping, Living

# (name, ranks, timeout, parent) -> a transport over those ranks of the job; collective over them.
# The name is unique. `parent` is the transport over which the ranks agreed to make this one.
Connect = Callable[[str, Sequence[int], float, Transport | None], Transport]


@uncompiled
class Communicator(Reductions, Moves, Messages, Named):
    """A group of `size` ranks, of which this process is `rank`. `ringdp.init()` makes one.

    `ringdp.comm.job` documents what its collectives take and raise, and `ringdp.comm.reductions`
    which ops support which dtypes. `closed` is True once it can no longer be used.
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
        duplicates: Living[Transport] | None = None,
    ) -> None:
        """Collective over `ranks`: the job's numbers of the ranks, which are 0, 1, ... here.

        Raises UsageError if there are more ranks than a call's fingerprint can name.
        """
        if len(ranks) > ANY_RANK:
            raise UsageError(f"a communicator of {len(ranks)} ranks; allowed: at most {ANY_RANK}")
        self._connect, self._ranks, self._name = connect, tuple(ranks), name
        self._siblings = Living[Transport]() if duplicates is None else duplicates  # this one, too
        transport = connect(name, self._ranks, timeout, parent)
        super().__init__(transport, Guard(transport, warn_after, self._siblings, self._ranks))
        self._siblings.add(transport)
        if self.device.type == "cpu":
            heap.keep()
        self.set_timeout(timeout)
        self._children = Living[Communicator]()
        recorder.join(self, CommTracer)

    @property
    def device(self) -> torch.device:
        """The device of the tensors that `empty` returns, and that collectives move fastest."""
        return self._transport.device

    @property
    def timeout(self) -> float:
        """The number of seconds that a call may wait for another rank."""
        return self._transport.timeout

    def set_timeout(self, timeout: float) -> None:
        """Set the timeout of this rank's later calls and of communicators made from this one later.

        In seconds, above 0 and finite, as for `init`.
        """
        self._transport.timeout = check_timeout(timeout)

    @property
    def ended(self) -> bool:
        """Whether no further call can succeed: it is closed or has raised a CommunicationError."""
        return self.closed or self._guard.error is not None

    @property
    def wired(self) -> bool:
        """Whether data moves over a network without collectives of ours: torch's, or a `Link`."""
        return self._transport.own is None or self._transport.link is not None

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised tensor in the memory that the transport moves fastest.

        Over shared memory this is a CPU tensor that all ranks of the host have mapped. Collectives
        use it in place and copy other tensors. An all_reduce is in place if every rank's tensor is
        from `empty`, a reduce_scatter or broadcast if its input is, and an all_gather if this
        rank's part is. The storage cannot be resized.
        """
        one = f"of the shape {shape} a length"
        lengths = tuple(check_int("empty", one, length, MOST, "lengths") for length in shape)
        if not isinstance(dtype, torch.dtype):
            raise UsageError(f"empty: dtype is {dtype!r}; allowed: a torch.dtype")
        return self._transport.empty(lengths, dtype)

    def duplicate(self) -> Communicator:
        """Return a communicator over the same ranks, whose collectives do not queue behind these.

        Collective: every rank must call it.
        """
        with self._making():
            self.all_reduce(torch.zeros(1, device="cpu")).wait()  # also in a group
            return self._create(f"{self._name}.{self.issued}", self._ranks, self._siblings)

    def name_tags(self, units: Sequence[str]) -> None:
        """Make errors show units[tag] as the unit of a collective."""
        self._guard.units = units

    def end_with(self, *others: Communicator) -> None:
        """Once one of these has failed on this rank, so have all: ranks that share others with it
        would wait for it there. Their calls raise the same error."""
        together = Living[Guard]()
        for each in (self, *others):
            together.add(each._guard)
            each._guard.together = together

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Return a communicator of the ranks that pass the same `color`, or None if color is None.

        Collective: every rank must call it. `color` is an int >= 0. The new ranks are in the order
        of `key`; those with equal keys keep their order.
        """
        most = torch.iinfo(torch.int64).max
        if color is not None:
            color = check_int("split", "color", color, most, "but for None, colors")
        key = check_int("split", "key", key, most, "keys", -most)
        color_key = torch.tensor([-1 if color is None else color, key], device="cpu")
        gathered = color_key.new_empty(self.size, 2)
        with self._making():
            self.all_gather(gathered, color_key).wait()
            if color is None:
                return None
            members = [(k, rank) for rank, (c, k) in enumerate(gathered.tolist()) if c == color]
            ranks = [self._ranks[rank] for _, rank in sorted(members)]
            return self._create(f"{self._name}.{self.issued}.{color}", ranks)

    @contextmanager
    def _making(self) -> Iterator[None]:
        """The block makes a communicator after a collective of host tensors, in which a dead rank
        raises PeerLost or CollectiveTimeout.

        Ctrl-C once the collective has begun aborts this communicator, since the other ranks may
        have gone on and wait for this one.
        """
        issued = self.issued
        try:
            yield
        except KeyboardInterrupt:
            if self.issued > issued:
                self._transport.fail(FailureKind.ABORTED, self.rank)
            raise

    def _create(
        self, name: str, ranks: Sequence[int], duplicates: Living[Transport] | None = None
    ) -> Communicator:
        created = Communicator(
            self._connect,
            ranks,
            name=name,
            timeout=self.timeout,
            warn_after=self._guard.warn_after,
            parent=self._transport,
            duplicates=duplicates,
        )
        self._children.add(created)
        return created

    def group(self, *, async_op: bool = False) -> AbstractContextManager[Group]:
        """Issue the calls of the block without waiting, and wait for all of them at its end.

        With `async_op` the block does not wait; wait for the Group that it yields. An error in the
        block propagates, and the calls issued before it keep running.
        """
        check_async("group", async_op)
        return Grouping(self, Group(), not async_op)

    def sent_bytes(self) -> int:
        """Return the number of payload bytes that this rank has sent over this communicator."""
        return self._transport.sent_bytes()

    def close(self) -> None:
        """Close the communicator. Ranks that still wait for this one raise PeerLost.

        A collective that has ended here may still fail elsewhere: a broadcast ends at its root
        before all ranks have the data. If such a failure is known and no call has raised it, this
        one does. If Ctrl-C interrupts `close`, call it again.

        A communicator with no collectives running is closed when it is garbage-collected, but not
        while a trace runs. Over nccl and peer it is never collected before it is closed, and over
        peer each one holds up to 64 MiB of its GPU until then.
        """
        try:
            if not self.closed:
                self._guard.check_closing(self.issued)
        finally:
            self._close()

    def abort(self) -> None:
        """Abort this communicator and all made from it: other ranks' calls raise PeerLost at once.

        Waits for no other rank. Afterwards the ranks can call `ringdp.init()` again.
        """
        for child in list(self._children):
            child.abort()
        if not self.closed:
            self._transport.fail(FailureKind.ABORTED, self.rank)
        self._close()

    def _close(self) -> None:
        self.closed = True
        recorder.leave(self)
        self._siblings.discard(self._transport)
        self._guard.together.discard(self._guard)
        self._transport.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # do not hide the user's exception
            self._close()
