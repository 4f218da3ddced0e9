"""What all of the group's methods share: options, lists of tensors, and how a call becomes a work.

torch passes an options object or, from Python, its fields: `pg.broadcast(tensor, root)`. An option
that is not given has the default of the options object.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.profiler import record_function

from ringdp.comm.backend.works import ENDED, UNLIMITED, Finish, GroupWork, Watcher, span_of
from ringdp.comm.buffers import plain
from ringdp.comm.communicator import Communicator
from ringdp.comm.work import Work
from ringdp.errors import UsageError
from ringdp.transport.base import DTYPES
from ringdp.transport.base import ReduceOp as Op

# By the value of torch's op: hashing and comparing the op itself takes 3 µs per call.
OPS: dict[Any, Op] = {
    ReduceOp.SUM.value: "sum",
    ReduceOp.AVG.value: "avg",
    ReduceOp.PRODUCT.value: "prod",
    ReduceOp.MIN.value: "min",
    ReduceOp.MAX.value: "max",
    ReduceOp.BAND.value: "band",
    ReduceOp.BOR.value: "bor",
    ReduceOp.BXOR.value: "bxor",
}
INTEGER_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes -> dtype
PREMUL_SUM = ReduceOp.PREMUL_SUM.value
Tensors = Tensor | Sequence[Tensor]
Timeout = timedelta | None
Begin = Callable[..., Work]  # issues a call of the communicator, given `async_op`


class Calls:
    """One rank's side of a group: base class of the methods that torch calls."""

    _comm: Communicator
    _watcher: Watcher
    _issuing: threading.Lock  # one thread issues at a time: collectives are numbered in that order
    _coalesced: list[GroupWork] | None  # works since _start_coalescing

    def _call(
        self,
        what: str,
        options: Any,
        results: Sequence[Any],
        begins: Iterable[Begin],
        *finishes: Finish | None,
    ) -> GroupWork:
        """Issue the calls, and run `finishes` when all have ended. `what` is the name in profiles.

        `options`: any of torch's options objects. A synchronous call has ended when this returns,
        and gets no work of its own.
        """
        span = span_of(what)
        limit = seconds(options.timeout)
        later = options.asyncOp or limit is not None or self._coalesced is not None
        after = filter(None, finishes)
        with self._issuing:
            works = [begin(async_op=later) for begin in begins]
        if not later and span is None:
            for finish in after:
                finish()
            return ENDED
        work = GroupWork(works, results, [*after], limit, self._watcher)
        if not later:
            work.wait()
        return self._tracked(work, span)

    def _tracked(self, work: GroupWork, span: record_function | None) -> GroupWork:
        """Let the span end with the work, and `_end_coalescing` return it with others."""
        if span is not None:
            work.end_span(span)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work


def seconds(timeout: Timeout) -> float | None:
    """Return the timeout in seconds, or None if it stands for the group's."""
    return None if timeout is None or timeout < UNLIMITED else timeout.total_seconds()


def options_of(kind: type, opts: Any, **fields: Any) -> Any:
    """Return `opts` if it is an options object, or else one with the fields that are not None.

    In the latter case `opts`, if given, is the value of the first field.
    """
    if isinstance(opts, kind):
        return opts
    options = kind()
    for name, value in fields.items():
        given, opts = opts if value is None else value, None
        if given is not None:
            setattr(options, name, given)
    return options


def reduction(op: Any) -> tuple[Op, dict[str, Any]]:
    """Return a communicator's op, and its scale if any, for torch's ReduceOp or a member of it."""
    if op == ReduceOp.SUM:  # the common case; getting its value takes longer
        return "sum", {}
    value = getattr(getattr(op, "op", op), "value", None)
    if value == PREMUL_SUM:
        _, factor = op.__getstate__()  # torch has `op.factor` from 2.12 on
        return "sum", {"scale": float(factor)}
    if value not in OPS:
        raise UsageError(f"op is {op}; allowed: {', '.join(ReduceOp.RedOpType.__members__)}")
    return OPS[value], {}


def single(tensors: Tensors | Sequence[Any], what: str) -> Any:
    """Return the only entry of the list: torch's lists are for ranks with several devices."""
    if not isinstance(tensors, (list, tuple)):
        return tensors
    if len(tensors) != 1:
        raise UsageError(f"{what} has {len(tensors)} entries; allowed: 1, as a rank has one device")
    return tensors[0]


def parts_of(parts: Sequence[Any], other: Tensors, what: str) -> Any:
    """Return the parts, one per rank. If the other tensor is in a list, so is the list of parts."""
    return parts if isinstance(other, Tensor) else single(parts, what)


def check_count(entries: Sequence[Any], ranks: int, what: str) -> None:
    """Raises UsageError unless there is one entry per rank."""
    if len(entries) != ranks:
        raise UsageError(f"{what} has {len(entries)} entries; allowed: {ranks}, one for each rank")


def check_parts(tensors: Sequence[Tensor], like: Tensor, ranks: int, what: str) -> None:
    """Raises UsageError unless there is one tensor per rank, each with the elements of `like`."""
    if sizes(tensors) != [like.numel()] * ranks:
        raise UsageError(
            f"{what} has tensors of {sizes(tensors)} elements; allowed: {ranks}, one for each "
            f"rank, of {like.numel()}, as on every rank"
        )


def movable(tensor: Tensor) -> Tensor:
    """Return the tensor, as integers if its dtype can only be moved (float8, uint16, ...)."""
    known = tensor.dtype in DTYPES or tensor.is_complex()
    return tensor if known else tensor.view(INTEGER_OF[tensor.itemsize])


def sizes(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.numel() for tensor in tensors]


def adjacent(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return a flat view of all the tensors if they are adjacent in memory, else None."""
    if len(dtypes := {str(tensor.dtype) for tensor in tensors}) > 1:
        raise UsageError(f"a list has tensors of {' and '.join(dtypes)}; allowed: one dtype")
    first, at = tensors[0], tensors[0].storage_offset()
    storage = first.untyped_storage().data_ptr()
    for tensor in tensors:
        if (
            tensor.untyped_storage().data_ptr() != storage
            or tensor.storage_offset() != at
            or not plain(tensor)
        ):
            return None
        at += tensor.numel()
    return first.detach().as_strided((sum(sizes(tensors)),), (1,), first.storage_offset())


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the concatenated elements: a view if they are adjacent in memory, else a copy."""
    flat = adjacent(tensors)
    return torch.cat([t.detach().reshape(-1) for t in tensors]) if flat is None else flat


def output_buffer(tensors: Sequence[Tensor]) -> tuple[Tensor, Finish | None]:
    """Return a flat output for all the tensors' elements, and what copies it to them, if needed."""
    flat = adjacent(tensors)
    if flat is not None:
        return flat, None
    whole = tensors[0].new_empty(sum(sizes(tensors)))

    def finish() -> None:
        for tensor, part in zip(tensors, whole.split_with_sizes(sizes(tensors)), strict=True):
            tensor.detach().copy_(part.view(tensor.shape))

    return whole, finish
