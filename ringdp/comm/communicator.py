"""The communicator: collectives on torch tensors, over any transport.

It looks up the schedule, proves it, projects and fuses it once per (collective, algorithm, n), and
hands the program to the transport. Collectives run in the order in which they are issued; every
rank must issue the same ones in the same order.

An algorithm is a name, or a function n -> Schedule, which is proved like ours before it moves a
byte. The default is `direct`: it folds in rank order, so that the result's bits do not depend
on the length of the buffer that an element is part of.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from ringdp.comm.call import TAGS, call_site, fingerprint
from ringdp.comm.guard import Guard, supported
from ringdp.comm.work import Work
from ringdp.errors import CommunicationError, ScheduleError, UsageError
from ringdp.schedule import (
    Builder,
    Collective,
    Program,
    contract,
    fifo_depth,
    fuse,
    project,
    proved,
)
from ringdp.transport.arena import Arena
from ringdp.transport.base import OPS, Direct, Link, Transport, shard_bounds
from ringdp.transport.records import Call
from ringdp.transport.shm import ShmTransport

Started = tuple[int, Callable[[], None]]  # a ticket, and what is left to do at the end
EXCHANGES: dict[Collective, Direct] = {
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "all_gather": "all_gather",
    "broadcast": "all_gather",
}
ReduceOp = Literal["sum", "avg", "prod", "min", "max"]


class Communicator:
    """A group of `size` ranks, of which this process is `rank`. Made by `ringdp.init()`."""

    def __init__(
        self,
        store: Store | None,
        rank: int,
        size: int,
        *,
        name: str,
        timeout: float,
        warn_after: float,
        arena: Arena | None = None,
        link: Link | None = None,
    ) -> None:
        self.rank, self.size, self.timeout, self.link = rank, size, timeout, link
        self._store, self._name = store, name
        self._copies = self._issued = 0
        prefixed = None if store is None else PrefixStore(name, store)
        self._transport: Transport = ShmTransport(prefixed, rank, size, arena=arena, link=link)
        self._guard = Guard(self._transport, timeout, warn_after)
        self._closed = False

    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp = "sum",
        *,
        algorithm: str | Builder = "direct",
        async_op: bool = False,
        tag: int = 0,
    ) -> Work:
        """Every rank's `tensor` becomes the element-wise `op` over all ranks, in place.

        Any shape, the same on all ranks; float32, float64, float16, bfloat16, int8, uint8, int32,
        int64. `avg` multiplies by 1/size and then sums, for floats only. With `async_op` it returns
        at once, and the tensor must not be touched until the Work's `wait` has returned. `tag`, as
        for every collective, says what is moved: ranks whose tags differ raise CollectiveMismatch.
        """
        return self._issue("all_reduce", tensor, None, op, algorithm, async_op, tag)

    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor,
        op: ReduceOp = "sum",
        *,
        algorithm: str | Builder = "direct",
        async_op: bool = False,
        tag: int = 0,
    ) -> Work:
        """`output` becomes this rank's 1/size of the reduction of every rank's `input`.

        input: size x output.numel() elements, of which rank r's are the r-th part. If `output` is
        that part of `input`, no copy is made and the rest of `input` is overwritten.
        """
        whole = self._whole(output, input, "reduce_scatter: input", "output")
        return self._issue("reduce_scatter", whole, output, op, algorithm, async_op, tag)

    def all_gather(
        self,
        output: Tensor,
        input: Tensor,
        *,
        algorithm: str | Builder = "direct",
        async_op: bool = False,
        tag: int = 0,
    ) -> Work:
        """`output` becomes the inputs of ranks 0, 1, ... one behind the other, on every rank.

        output: size x input.numel() elements. No copy is made if `input` is this rank's part of it.
        """
        whole = self._whole(input, output, "all_gather: output", "input")
        return self._issue("all_gather", whole, input, "sum", algorithm, async_op, tag)

    def broadcast(
        self,
        tensor: Tensor,
        root: int = 0,
        *,
        algorithm: str | Builder = "direct",
        async_op: bool = False,
        tag: int = 0,
    ) -> Work:
        """Every rank's `tensor` becomes rank `root`'s, in place."""
        if not 0 <= root < self.size:
            raise UsageError(f"broadcast: root is {root}; ranks are 0..{self.size - 1}")
        return self._issue("broadcast", tensor, None, "sum", algorithm, async_op, tag, root=root)

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self.all_reduce(torch.zeros(1, dtype=torch.int32))

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised CPU tensor in memory that all ranks of the host have mapped.

        Collectives read and write it in place, where other tensors are copied through shared
        memory: an all_reduce if every rank's tensor is such a one, a reduce_scatter or broadcast if
        its input is, an all_gather if this rank's part is. Its storage cannot be resized.
        """
        return self._transport.empty(shape, dtype)

    def duplicate(self) -> Communicator:
        """Another communicator over the same ranks, whose collectives do not queue behind these.

        Collective: every rank must call it.
        """
        self._copies += 1
        name = f"{self._name}.{self._copies}"
        return Communicator(
            self._store,
            *(self.rank, self.size),
            name=name,
            timeout=self.timeout,
            warn_after=self._guard.warn_after,
            arena=self._transport.arena,
            link=self.link,
        )

    def sent_bytes(self) -> int:
        """Payload bytes that this rank has sent to others over this communicator."""
        return self._transport.sent_bytes()

    def close(self) -> None:
        """Stop. Ranks that still wait for this one raise PeerLost."""
        if not self._closed:
            self._closed = True
            self._transport.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _issue(
        self,
        collective: Collective,
        whole: Tensor,
        part: Tensor | None,
        op: ReduceOp,
        algorithm: str | Builder,
        async_op: bool,
        tag: int,
        root: int = 0,
    ) -> Work:
        """`part`: the output of a reduce_scatter, the input of an all_gather."""
        supported(whole.dtype)
        if op not in (*OPS, "avg"):
            raise UsageError(f"{collective}: no op {op!r}; there are {', '.join((*OPS, 'avg'))}")
        if op == "avg" and not whole.is_floating_point():
            raise UsageError(f"{collective}: avg is for floats; this tensor is {whole.dtype}")
        if not 0 <= tag < TAGS:
            raise UsageError(f"{collective}: tag is {tag}; tags are 0..{TAGS - 1}")
        if self._closed:
            raise CommunicationError(f"{collective} on a communicator that has been closed")
        kind = tag << 24 | fingerprint(collective, whole.dtype, op, root)
        call = (self._issued, kind, whole.numel(), call_site(3))
        self._guard.check(call)
        direct = algorithm == "direct" and collective in EXCHANGES and self._transport.exchanges
        begin = self._exchange if direct else self._run
        ticket, finish = begin(collective, call, whole, part, op, algorithm, root, async_op)
        self._issued += 1
        work = Work(self._guard, call, ticket, finish)
        if not async_op:
            work.wait()
        return work

    def _exchange(
        self,
        collective: Collective,
        call: Call,
        whole: Tensor,
        part: Tensor | None,
        op: ReduceOp,
        algorithm: str | Builder,
        root: int,
        background: bool,
    ) -> Started:
        """Direct, in the transport's own way."""
        buffer, copied = _flat(whole)
        piece, piece_copied = (None, False) if part is None else _flat(part)
        if op == "avg" and collective == "reduce_scatter" and not copied:
            buffer = buffer * (1 / self.size)
        elif op == "avg":
            buffer.mul_(1 / self.size)
        if collective == "broadcast":  # an all_gather where only the root has anything
            shards = tuple(whole.numel() if r > root else 0 for r in range(self.size + 1))
            piece = buffer if self.rank == root else None
        else:
            shards = shard_bounds(whole.numel(), self.size)

        def finish() -> None:
            if copied and collective != "reduce_scatter":
                whole.detach().copy_(buffer.view(whole.shape))
            if piece_copied and collective == "reduce_scatter":
                assert part is not None
                assert piece is not None
                part.detach().copy_(piece.view(part.shape))

        ticket = self._transport.exchange(
            EXCHANGES[collective],
            shards,
            buffer,
            piece,
            "sum" if op == "avg" else op,
            call,
            background=background,
        )
        return ticket, finish

    def _run(
        self,
        collective: Collective,
        call: Call,
        whole: Tensor,
        part: Tensor | None,
        op: ReduceOp,
        algorithm: str | Builder,
        root: int,
        background: bool,
    ) -> Started:
        """A schedule's program, in place on the whole buffer."""
        program = _program(collective, algorithm, self.size, self.rank, root, self._transport.depth)
        buffer, copied = _flat(whole)
        mine = buffer[self._part(buffer)] if part is not None else buffer
        elsewhere = part is not None and not _same(mine, part)
        if collective == "reduce_scatter" and elsewhere and not copied:
            buffer = buffer.clone()
        if collective == "all_gather" and elsewhere:
            assert part is not None
            mine.copy_(part.detach().reshape(-1))
        if op == "avg":
            buffer.mul_(1 / self.size)

        def finish() -> None:
            if collective == "reduce_scatter":
                if elsewhere:
                    assert part is not None
                    part.detach().copy_(buffer[self._part(buffer)].view(part.shape))
            elif copied:
                whole.detach().copy_(buffer.view(whole.shape))

        ticket = self._transport.start(
            program, buffer, "sum" if op == "avg" else op, call, background=background
        )
        return ticket, finish

    def _whole(self, part: Tensor, whole: Tensor, what: str, part_name: str) -> Tensor:
        if whole.numel() != self.size * part.numel() or whole.dtype != part.dtype:
            raise UsageError(
                f"{what} has {whole.numel()} elements of {whole.dtype}; it needs {self.size} "
                f"(ranks) x {part.numel()} ({part_name}) of {part.dtype}"
            )
        if not whole.is_contiguous():
            raise UsageError(f"{what} must be contiguous")
        return whole.detach().view(-1)

    def _part(self, whole: Tensor) -> slice:
        elements = whole.numel() // self.size
        return slice(self.rank * elements, (self.rank + 1) * elements)


def _same(part: Tensor, tensor: Tensor) -> bool:
    """Whether `tensor` is `part`: as many elements, in the same memory, in the same order."""
    return part.data_ptr() == tensor.data_ptr() and tensor.is_contiguous()


def _flat(tensor: Tensor) -> tuple[Tensor, bool]:
    """A 1-D contiguous tensor of the same elements, and whether it is a copy."""
    data = tensor.detach()
    if data.is_contiguous():
        return data.view(-1), False
    return data.contiguous().view(-1), True


@cache
def _program(
    collective: Collective, algorithm: str | Builder, n: int, rank: int, root: int, depth: int
) -> Program:
    """Proved, projected, fused if that fits, and shown not to stall in FIFOs of `depth` slots."""
    plan = proved(algorithm, collective, n)
    live = contract(collective, n, plan.chunks).after
    if root:  # a renaming of ranks, so the proof holds for it too
        plan = plan.embed([(r + root) % n for r in range(n)], range(plan.chunks))
    plain = [project(plan, r) for r in range(n)]
    fused = [fuse(p, [c for q, c in live if (q + root) % n == p.rank]) for p in plain]
    # Fusing trades longer FIFOs for fewer passes; what then needs too many slots runs as it is.
    for programs in (fused, plain):
        needed = fifo_depth(programs)
        if needed <= depth:
            return programs[rank]
    raise ScheduleError(
        f"{algorithm} {collective} needs FIFOs of {needed} slots; the transport has {depth}"
    )
