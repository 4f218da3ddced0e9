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
from ringdp.transport.base import OPS, Op, Transport
from ringdp.transport.shm import ShmTransport

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
    ) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self._store, self._name = store, name
        self._copies = self._issued = 0
        prefixed = None if store is None else PrefixStore(name, store)
        self._transport: Transport = ShmTransport(prefixed, rank, size)
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
        return self._issue("all_reduce", tensor, op, algorithm, async_op, tag)

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
        in_place = _same(whole[self._part(whole)], output)
        whole = whole if in_place else whole.clone()

        def finish() -> None:
            if not in_place:
                output.detach().copy_(whole[self._part(whole)].view(output.shape))

        return self._issue("reduce_scatter", whole, op, algorithm, async_op, tag, finish)

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
        part = whole[self._part(whole)]
        if not _same(part, input):
            part.copy_(input.detach().reshape(-1))
        return self._issue("all_gather", whole, "sum", algorithm, async_op, tag)

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
        return self._issue("broadcast", tensor, "sum", algorithm, async_op, tag, root=root)

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self.all_reduce(torch.zeros(1, dtype=torch.int32))

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
        tensor: Tensor,
        op: ReduceOp,
        algorithm: str | Builder,
        async_op: bool,
        tag: int,
        finish: Callable[[], None] = lambda: None,
        root: int = 0,
    ) -> Work:
        supported(tensor.dtype)
        if op not in (*OPS, "avg"):
            raise UsageError(f"{collective}: no op {op!r}; there are {', '.join((*OPS, 'avg'))}")
        if op == "avg" and not tensor.is_floating_point():
            raise UsageError(f"{collective}: avg is for floats; this tensor is {tensor.dtype}")
        if not 0 <= tag < TAGS:
            raise UsageError(f"{collective}: tag is {tag}; tags are 0..{TAGS - 1}")
        if self._closed:
            raise CommunicationError(f"{collective} on a communicator that has been closed")
        program = _program(collective, algorithm, self.size, self.rank, root, self._transport.depth)
        buffer, copied = _flat(tensor)
        op_: Op = "sum" if op == "avg" else op
        kind = tag << 24 | fingerprint(collective, tensor.dtype, op, root)
        call = (self._issued, kind, tensor.numel(), call_site(3))
        self._guard.check(call)
        if op == "avg":
            buffer.mul_(1 / self.size)

        def complete() -> None:
            if copied:
                tensor.detach().copy_(buffer.view(tensor.shape))
            finish()

        ticket = self._transport.start(program, buffer, op_, call)
        self._issued += 1
        work = Work(self._guard, call, ticket, complete)
        if not async_op:
            work.wait()
        return work

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
