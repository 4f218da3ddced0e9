"""torch's reducing collectives: all_reduce, reduce, reduce_scatter and barrier."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from ringdp.comm.backend import futures
from ringdp.comm.backend.buckets import Buckets, comes_from_autograd
from ringdp.comm.backend.calls import (
    Begin,
    Calls,
    Tensors,
    Timeout,
    check_count,
    joined,
    options_of,
    parts_of,
    reduction,
    single,
    sizes,
)
from ringdp.comm.backend.sparse import all_reduce_sparse
from ringdp.comm.backend.works import Finish, GroupWork
from ringdp.comm.reductions import dividing
from ringdp.errors import CollectiveTimeout
from ringdp.transport.base import ReduceOp as Op

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Reductions(Calls):
    """The methods of a group that reduce over all ranks."""

    # DDP's join passes the work of a one-element tensor to C++ and drops it in Python. Without its
    # Python object the C++ object would wait forever, so the last works are kept here.
    _ones: deque[GroupWork]
    _buckets: Buckets

    def allreduce(
        self, tensors: Tensors, opts: Any = None, timeout: Timeout = None, op: Any = None
    ) -> GroupWork:
        tensor = single(tensors, "allreduce: tensors")
        options = options_of(c10d.AllreduceOptions, opts, reduceOp=op, timeout=timeout)
        if not comes_from_autograd(sys._getframe()):
            return self._all_reduce(options, [tensor], [], [tensor])
        if of_hook := futures.is_of_hook(tensor):
            options.asyncOp = True
        else:
            self._buckets.move(tensor)
        work = self._all_reduce(options, [tensor], [], [tensor])
        work.is_read_in_cpp |= of_hook
        return work

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        """Tensors may share memory: the sums are of what they held at the call."""
        options = options_of(c10d.AllreduceCoalescedOptions, opts, reduceOp=None)
        results = [tensors] if isinstance(tensors, Tensor) else tensors
        return self._all_reduce(options, *apart(results), results)

    def _all_reduce(
        self,
        options: Any,
        tensors: Sequence[Tensor],
        copies: Sequence[Finish],
        results: Sequence[Tensor],
    ) -> GroupWork:
        op, scale, finishes = self._reduction_of(options, tensors)

        def begin(tensor: Tensor) -> Begin:
            if tensor.layout is not torch.strided:
                return lambda async_op: all_reduce_sparse(self._comm, tensor, op, **scale)
            return partial(self._comm.all_reduce, tensor, op, **scale)

        work = self._call("all_reduce", options, results, map(begin, tensors), *finishes, *copies)
        if tensors and tensors[0].numel() == 1:
            self._ones.append(work)
        return work

    def _reduction_of(
        self, options: Any, results: Sequence[Tensor]
    ) -> tuple[Op, dict[str, Any], list[Finish]]:
        """Return the communicator's op, its scale if any, and what finishes it.

        An average of integers is a sum, divided toward zero as NCCL does. gloo has no average, so
        libraries that special-case gloo, as Lightning does, use it with all other backends.
        """
        op, scale = reduction(options.reduceOp)
        if op != "avg" or not results or results[0].dtype not in INTEGERS:
            return op, scale, []
        return "sum", {}, [dividing(t.detach(), self._comm.size, "trunc") for t in results]

    def reduce(
        self,
        tensors: Tensors,
        opts: Any = None,
        op: Any = None,
        timeout: Timeout = None,
        root: int | None = None,
    ) -> GroupWork:
        tensor = single(tensors, "reduce: tensors")
        options = options_of(c10d.ReduceOptions, opts, rootRank=root, reduceOp=op, timeout=timeout)
        to = options.rootRank
        by, scale, finishes = self._reduction_of(options, [tensor])
        begin = partial(self._comm.reduce, tensor, to, by, **scale)
        finishes = finishes if to == self._comm.rank else []
        return self._call("reduce", options, [tensor], [begin], *finishes)

    def reduce_scatter(
        self,
        output_tensors: Tensors,
        input_tensors: Sequence[Any],
        opts: Any = None,
        timeout: Timeout = None,
        op: Any = None,
    ) -> GroupWork:
        """The parts may differ in size."""
        output = single(output_tensors, "reduce_scatter: output_tensors")
        parts = parts_of(input_tensors, output_tensors, "reduce_scatter: input_tensors")
        check_count(parts, self._comm.size, "reduce_scatter: input_tensors")
        options = options_of(c10d.ReduceScatterOptions, opts, reduceOp=op, timeout=timeout)
        by, scale, finishes = self._reduction_of(options, [output])
        comm, whole = self._comm, joined(parts)
        begin = partial(comm.reduce_scatter_v, output, whole, sizes(parts), by, **scale)
        return self._call("reduce_scatter", options, [output], [begin], *finishes)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> GroupWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> GroupWork:
        options = options_of(c10d.ReduceScatterOptions, opts, reduceOp=None)
        op, scale, finishes = self._reduction_of(options, outputs)

        def begin(part: Tensor, whole: Tensor) -> Begin:
            return partial(self._comm.reduce_scatter, part, whole, op, **scale)

        begins = map(begin, outputs, inputs)
        return self._call("reduce_scatter", options, outputs, begins, *finishes)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def barrier(self, opts: Any = None, timeout: Timeout = None) -> GroupWork:
        options = options_of(c10d.BarrierOptions, opts, timeout=timeout)
        return self._call("barrier", options, [], [self._comm.barrier])

    def monitored_barrier(self, timeout: Timeout = None, wait_all_ranks: bool = False) -> None:
        """barrier with its own timeout. The error names every rank that has not arrived."""
        try:
            self.barrier(timeout=timeout).wait()
        except CollectiveTimeout as error:
            raise CollectiveTimeout(
                f"Rank {self._comm.rank} timed out in monitoredBarrier: {error}"
            ) from error


def apart(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Finish]]:
    """Return the tensors, with a clone in place of each whose storage one before it has, and what
    copies the clones back."""
    found: list[Tensor] = []
    copies: list[Finish] = []
    seen: set[int] = set()
    for tensor in tensors:
        strided = tensor.layout is torch.strided
        at = tensor.untyped_storage().data_ptr() if strided else id(tensor)
        found.append(tensor.detach().clone() if at in seen else tensor)
        if at in seen:
            copies.append(partial(tensor.detach().copy_, found[-1]))
        seen.add(at)
    return found, copies
