"""What all collectives share: from the arguments of a call to the job that a transport runs.

A collective turns its tensors into one flat buffer, computes the bounds of every rank's part, and
passes a Job to `Issuer._issue`. For all collectives:

- Tensors may have any shape and strides, may be empty, and may require grad; their elements are
  taken in row-major order. Dtypes: float32, float64, float16, bfloat16, int8, int16, uint8, int32,
  int64 and bool; complex dtypes if they are summed or only moved. All ranks pass the same dtype.
- The tensors of one call are on one device.
- `async_op=True` returns a Work at once; do not touch the tensors until its `wait` has returned.
  Otherwise the call returns when the result is there.
- `algorithm` is a name (`ringdp show --list`), a function n -> Schedule, or `FILE.py:function`. A
  function's schedule is proved, like the built-in ones, before it moves a byte. It is proved once
  per function object, so pass the same one each time. The default, `direct`, adds in rank order, so
  an element's bits depend neither on its position in the buffer nor on the root.
- `tag` identifies what is moved: ranks with different tags raise CollectiveMismatch.
- A bad argument raises UsageError before anything is sent. PeerLost, CollectiveTimeout and
  CollectiveMismatch are raised by the call, or with async_op by `wait`.
- A call returns once this rank has done its part, not once all ranks have. So a rank that waits for
  no other, such as the root of a binomial broadcast that has room for what it sends, may not yet
  know that a rank has died. It learns this from its next call or `wait` that depends on another
  rank, and from `close` at the latest. If a third rank detects the death, its next call of any kind
  raises.
- Ctrl-C either stops a call before it has begun or leaves it running on its tensors; in the latter
  case `issued` counts it. A `wait` that was interrupted can be called again.
- After an error a late rank may still write to tensors from `empty` that the failed call was given,
  until all ranks have closed the communicator or ended. Until then that memory is not reused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from operator import index
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from ringdp.comm.arguments import MOST, check_algorithm, check_async, check_int, check_tensor
from ringdp.comm.buffers import type_of, width
from ringdp.comm.call import COLLECTIVES, TAGS, fingerprint
from ringdp.comm.guard import UNEVEN, Guard
from ringdp.comm.programs import program
from ringdp.comm.work import ENDED, Group, Work
from ringdp.errors import CommunicationError, UsageError
from ringdp.schedule import Builder, Collective, Program
from ringdp.transport.base import (
    DTYPES,
    HELD_BACK,
    Direct,
    Exchange,
    Prepared,
    ReduceOp,
    Run,
    Transport,
)
from ringdp.transport.bounds import Bounds, bounds_of, chunk_bounds, shard_bounds
from ringdp.transport.records import Call, call_site
from ringdp.transport.repeated import METHODS, SLICE

W = TypeVar("W", bound=Work)


class CallSpec(NamedTuple):
    """The arguments of a collective, without its tensors and op."""

    name: str  # of the method
    base_name: str  # `name` without `_v`; all_to_all_v keeps it, as it has a schedule of its own
    algorithm: str | Builder
    async_op: bool
    tag: int
    root: int = 0  # for collectives that have one

    @property
    def collective(self) -> Collective:
        """The collective whose schedule it runs."""
        return "all_reduce" if self.base_name == "barrier" else cast(Collective, self.base_name)


class Job(NamedTuple):
    """What the transport is to do, and `finish`, which copies the result to the user's tensor.

    `by` is a program that runs in place on `whole` (see `Run`), or an exchange that the transport
    does in its own way, also with `part` (see `Exchange`). Buffers are 1-D, contiguous and real.
    """

    by: Program | Direct
    bounds: Bounds  # of the chunks of `whole`; for an exchange, of every rank's share of it
    whole: Tensor | None
    part: Tensor | None = None
    finish: Callable[[], None] | None = None
    op: ReduceOp = "sum"  # the user's
    factor: float = 1  # `whole` is multiplied by it first
    elements: int | None = None  # of the collective, if the bounds cover fewer
    received: Bounds = ()  # of an exchange with uneven parts: see `Exchange`

    @property
    def any_buffer(self) -> Tensor:
        """One of this rank's buffers, for its dtype and device."""
        buffer = self.part if self.whole is None else self.whole
        assert buffer is not None
        return buffer

    def finish_on_gpu(self) -> None:
        """Run `finish` on a GPU, in the current stream of the caller that waits.

        The buffers may belong to another stream. `record_stream` keeps the allocator from reusing
        them there before this stream is done with them.
        """
        if self.finish is not None:
            self.finish()
        for buffer in (self.whole, self.part):
            if buffer is not None:
                buffer.record_stream(torch.cuda.current_stream(buffer.device))


def op_of_rows(op: ReduceOp, spec: CallSpec, dtype: torch.dtype) -> ReduceOp:
    """Return the op that a program's rows compute.

    An average is computed as a sum and divided later. The exception is `direct` on 16-bit floats:
    it rounds only complete sums, so it divides before rounding.
    """
    rounds_once = spec.algorithm == "direct" and dtype in (torch.float16, torch.bfloat16)
    return "sum" if op == "avg" and not rounds_once else op


class Arg(NamedTuple):
    """A tensor and its argument name, for errors."""

    name: str
    tensor: Tensor


class Issuer:
    """One rank's end of a communicator: from the arguments of a call to what a transport runs."""

    def __init__(self, transport: Transport, guard: Guard) -> None:
        self.rank, self.size = transport.rank, transport.ranks
        self._transport, self._guard, self.closed = transport, guard, False
        # The barrier's buffer. On the host, since collectives on a GPU return before they end.
        self._zero = torch.zeros(1, dtype=torch.int32, device="cpu")
        self._ready = transport.ready  # None if every call goes through Python
        if self._ready:
            kinds = [fingerprint("send", dtype, "sum", 0) for dtype in DTYPES]
            self._ready.learn(ENDED, self._zero, kinds)
        self._group: Group | None = None

    @property
    def issued(self) -> int:
        """The number of collectives that this rank has issued."""
        return self._transport.issued

    def _spec(
        self,
        name: str,
        algorithm: str | Builder,
        async_op: bool,
        tag: int,
        root: int = 0,
    ) -> CallSpec:
        """Check the arguments other than tensors."""
        check_algorithm(name, algorithm)
        check_async(name, async_op)
        tag = check_int(name, "tag", tag, TAGS - 1, "tags")
        root = check_int(name, "root", root, self.size - 1, "ranks")
        if self.closed:
            raise CommunicationError(f"{name} on a communicator that has been closed")
        base_name = name if name in COLLECTIVES else name.removesuffix("_v")
        return CallSpec(name, base_name, algorithm, async_op or self._group is not None, tag, root)

    def _way(self, spec: CallSpec, exchange: Direct) -> Program | Direct:
        """Return the program, or `exchange` if the transport has its own implementation."""
        collective, algorithm, transport = spec.collective, spec.algorithm, self._transport
        if algorithm == transport.own and (transport.link is None or collective in HELD_BACK):
            return exchange
        return program(collective, algorithm, self.size, self.rank, spec.root, transport.depth)

    def _bounds(self, by: Program | Direct, elements: int, root: int | None = None) -> Bounds:
        """Return the bounds of a program's chunks, or of an exchange's shares, all of them the
        root's if there is one."""
        if isinstance(by, Program):
            return chunk_bounds(elements, by)
        if root is None:
            return shard_bounds(elements, self.size)
        return bounds_of(elements if rank == root else 0 for rank in range(self.size))

    def _shards(
        self, spec: CallSpec, part: Arg, whole: Arg | None, sizes: Sequence[int] | None
    ) -> tuple[int, ...]:
        """Return every rank's share of the whole in real elements: `sizes`, or `part`'s for all.

        Raises UsageError unless `part` has the size of this rank's share, and `whole` (if this rank
        has it) that of all shares.
        """
        for given in filter(None, (part, whole)):
            check_tensor(spec.name, given.tensor, given.name)
        count, form = part.tensor.numel(), type_of(part.tensor)
        if sizes is None:
            shards = (count,) * self.size
            needs = f"{self.size} (ranks) x {count} ({part.name})"
        else:
            shards = self._whole_numbers(spec, "sizes", sizes)
            needs = f"{sum(shards)} (the sum of sizes)"
            if count != shards[self.rank]:
                raise UsageError(
                    f"{spec.name}: {part.name} has {count} elements; sizes[{self.rank}] is "
                    f"{shards[self.rank]}"
                )
        if whole and (whole.tensor.numel() != sum(shards) or type_of(whole.tensor) != form):
            raise UsageError(
                f"{spec.name}: {whole.name} has {whole.tensor.numel()} elements of "
                f"{type_of(whole.tensor)}; it needs {needs} of {form}"
            )
        return tuple(s * width(part.tensor) for s in shards)

    def _cuts(self, spec: CallSpec, whole: Arg, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return `sizes` in real elements. Raises UsageError unless they add up to the whole's."""
        check_tensor(spec.name, whole.tensor, whole.name)
        cuts = self._whole_numbers(spec, f"{whole.name}_sizes", sizes)
        if sum(cuts) != whole.tensor.numel():
            raise UsageError(
                f"{spec.name}: {whole.name} has {whole.tensor.numel()} elements; "
                f"{whole.name}_sizes has {sum(cuts)} in all"
            )
        return tuple(c * width(whole.tensor) for c in cuts)

    def _whole_numbers(self, spec: CallSpec, name: str, sizes: Sequence[int]) -> tuple[int, ...]:
        try:
            found = tuple(index(size) for size in sizes)
        except TypeError:
            raise UsageError(f"{spec.name}: {name} is {sizes}; allowed: whole numbers") from None
        if len(found) != self.size or min(found) < 0 or sum(found) > MOST:
            raise UsageError(
                f"{spec.name}: {name} is {list(found)}; allowed: a number of elements, 0 or more, "
                f"for each of {self.size} ranks, and 2**56 in all at most"
            )
        return found

    def _part(self, shards: tuple[int, ...]) -> slice:
        """Return the slice of the whole that is this rank's share."""
        begin = sum(shards[: self.rank])
        return slice(begin, begin + shards[self.rank])

    def _issue(self, job: Job, spec: CallSpec) -> Work:
        """Start a job. Every collective passes here, except calls that `repeated` runs in C++."""
        dtype, elements = job.any_buffer.dtype, job.elements
        elements = job.bounds[-1] if elements is None else elements
        kind = fingerprint(spec.base_name, dtype, job.op, spec.root, spec.algorithm, spec.tag)
        call = (self.issued, kind, elements, call_site())
        self._guard.check(call)
        self._transport.check(job.any_buffer)
        if job.factor != 1:  # not before: a call that is refused changes nothing
            job.any_buffer.mul_(job.factor)
        if isinstance(job.by, Program):
            op = op_of_rows(job.op, spec, dtype)
            differ = spec.collective in UNEVEN
            what: Run | Exchange = Run(job.by, job.bounds, dtype, op, kind, elements, differ)
        else:
            root = spec.root if spec.collective in ("gather", "scatter") else None
            what = Exchange(job.by, job.bounds, dtype, job.op, kind, root, job.received)
        ready = self._transport.prepare(what)
        name = spec.name.removesuffix("_v")
        uneven = name != spec.name
        if self._ready and not (uneven and isinstance(job.by, Program)):
            self._ready.remember(
                METHODS.index(name),
                DTYPES.index(dtype),
                elements,
                job.op,
                spec.root,
                spec.tag,
                spec.algorithm,
                (*job.bounds, *job.received) if uneven else (),
                ready,
            )
        return self._run(ready, job, call, spec.async_op)

    def _begun(
        self, call: Call, ticket: int, background: bool, finish: Callable[[], None] | None
    ) -> Work:
        """Return the Work of a repeated call that is asynchronous, takes long, or has failed.

        csrc/ready.hpp calls this.
        """
        self._transport.release()
        waited = 0.0 if background else SLICE
        return self._wait_if_sync(Work(self._guard, call, ticket, finish, waited), background)

    def _run(self, ready: Prepared, job: Job, call: Call, background: bool) -> Work:
        begun = time.monotonic()
        ticket = (ready.start if background else ready.run)(job.whole, job.part, call[-1])
        self._transport.release()
        if ticket:
            waited = 0.0 if background else time.monotonic() - begun
            gpu = job.any_buffer.device if job.any_buffer.is_cuda else None
            finish = job.finish_on_gpu if gpu else job.finish
            work = Work(self._guard, call, ticket, finish, waited, gpu)
            return self._wait_if_sync(work, background)
        if job.finish is not None:
            job.finish()
        return ENDED

    def _wait_if_sync(self, work: W, background: bool) -> W:
        if self._group is not None:
            self._group.works.append(work)
        elif not background:
            work.wait()
        return work
