"""torch's calls that only move data: broadcast, all_gather, gather, scatter, all_to_all, messages.

The tensors of a list are the parts of one buffer. If they are adjacent in memory, it is not copied.
Messages and collectives of a group do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch._C import _distributed_c10d as c10d

from ringdp.comm.backend.calls import (
    Begin,
    Calls,
    Tensors,
    Timeout,
    check_count,
    check_parts,
    joined,
    movable,
    options_of,
    output_buffer,
    parts_of,
    single,
    sizes,
)
from ringdp.comm.backend.works import GroupWork, span_of
from ringdp.errors import UsageError


class Moves(Calls):
    """The methods of a group that move data between ranks without reducing it."""

    def broadcast(
        self, tensors: Tensors, opts: Any = None, timeout: Timeout = None, root: int | None = None
    ) -> GroupWork:
        tensor = single(tensors, "broadcast: tensors")
        options = options_of(c10d.BroadcastOptions, opts, rootRank=root, timeout=timeout)
        begin = partial(self._comm.broadcast, movable(tensor), options.rootRank)
        return self._call("broadcast", options, [tensor], [begin])

    def allgather(
        self,
        output_tensors: Sequence[Any],
        input_tensors: Tensors,
        opts: Any = None,
        timeout: Timeout = None,
    ) -> GroupWork:
        """The parts may differ in size."""
        options = options_of(c10d.AllgatherOptions, opts, timeout=timeout)
        part = movable(single(input_tensors, "allgather: input_tensors"))
        parts = parts_of(output_tensors, input_tensors, "allgather: output_tensors")
        check_count(parts, self._comm.size, "allgather: output_tensors")
        moved = [movable(t) for t in parts]
        whole, finish = output_buffer(moved)
        begin = partial(self._comm.all_gather_v, whole, part, sizes(moved))
        return self._call("all_gather", options, parts, [begin], finish)

    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[Tensor]],
        input_list: Sequence[Tensor],
        opts: Any = None,
    ) -> GroupWork:
        """`output_lists`: one list per rank, with tensors for that rank's `input_list`."""
        options = options_of(c10d.AllgatherOptions, opts)
        check_count(output_lists, self._comm.size, "allgather_coalesced: output_lists")
        begins, finishes = [], []
        for part, *parts in zip(input_list, *output_lists, strict=True):
            whole, finish = output_buffer([movable(t) for t in parts])
            begins.append(partial(self._comm.all_gather, whole, movable(part)))
            finishes.append(finish)
        return self._call("all_gather", options, output_lists, begins, *finishes)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> GroupWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> GroupWork:
        options = options_of(c10d.AllgatherOptions, opts)

        def begin(whole: Tensor, part: Tensor) -> Begin:
            return partial(self._comm.all_gather, movable(whole), movable(part))

        return self._call("all_gather", options, outputs, map(begin, outputs, inputs))

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self,
        output_tensors: Sequence[Any],
        input_tensors: Tensors,
        opts: Any = None,
        timeout: Timeout = None,
        root: int | None = None,
    ) -> GroupWork:
        options = options_of(c10d.GatherOptions, opts, rootRank=root, timeout=timeout)
        part = single(input_tensors, "gather: input_tensors")
        parts: Sequence[Tensor] = []
        whole, finish = None, None
        if self._comm.rank == options.rootRank:
            parts = parts_of(output_tensors, input_tensors, "gather: output_tensors")
            check_parts(parts, part, self._comm.size, "gather: output_tensors")
            whole, finish = output_buffer([movable(t) for t in parts])
        begin = partial(self._comm.gather, whole, movable(part), options.rootRank)
        return self._call("gather", options, parts, [begin], finish)

    def gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> GroupWork:
        """`output` is ignored on ranks other than the root."""
        options = options_of(c10d.GatherOptions, opts)
        whole = movable(output) if self._comm.rank == options.rootRank else None
        begin = partial(self._comm.gather, whole, movable(input), options.rootRank)
        return self._call("gather", options, [output], [begin])

    gather_into_tensor = gather_single

    def scatter(
        self,
        output_tensors: Tensors,
        input_tensors: Sequence[Any],
        opts: Any = None,
        timeout: Timeout = None,
        root: int | None = None,
    ) -> GroupWork:
        options = options_of(c10d.ScatterOptions, opts, rootRank=root, timeout=timeout)
        output, whole = single(output_tensors, "scatter: output_tensors"), None
        if self._comm.rank == options.rootRank:
            parts = parts_of(input_tensors, output_tensors, "scatter: input_tensors")
            check_parts(parts, output, self._comm.size, "scatter: input_tensors")
            whole = joined([movable(t) for t in parts])
        begin = partial(self._comm.scatter, movable(output), whole, options.rootRank)
        return self._call("scatter", options, [output], [begin])

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        timeout: Timeout = None,
    ) -> GroupWork:
        """Split sizes are along the first dimension. Without them parts are equal and move much
        faster. If only some ranks pass them, all raise CollectiveMismatch."""
        options = options_of(c10d.AllToAllOptions, opts, timeout=timeout)
        to, source = movable(output), movable(input)
        begin: Begin = partial(self._comm.all_to_all, to, source)
        if output_split_sizes or input_split_sizes:
            received = self._cut("output", output, output_split_sizes)
            sent = self._cut("input", input, input_split_sizes)
            begin = partial(self._comm.all_to_all_v, to, source, received, sent)
        return self._call("all_to_all", options, [output], [begin])

    alltoall_base = all_to_all_single

    def _cut(self, what: str, tensor: Tensor, splits: Sequence[int]) -> list[int]:
        """Return the elements of each part. `splits` are in rows; if empty, parts are equal."""
        ranks, rows = self._comm.size, tensor.shape[0] if tensor.dim() else 1
        if not splits and rows % ranks:
            raise UsageError(
                f"all_to_all_single: {what} of shape {tuple(tensor.shape)} without split sizes; "
                f"its first dimension must be a multiple of {ranks} (ranks)"
            )
        splits = splits or [rows // ranks] * ranks
        if len(splits) != ranks or min(splits) < 0 or sum(splits) != rows:
            raise UsageError(
                f"all_to_all_single: {what}_split_sizes is {list(splits)}; allowed: the rows of "
                f"{what} for each of {ranks} ranks, 0 or more, {rows} in all"
            )
        row = tensor.numel() // rows if rows else 0
        return [n * row for n in splits]

    def alltoall(
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Tensor],
        opts: Any = None,
        timeout: Timeout = None,
    ) -> GroupWork:
        """The parts may differ in size."""
        options = options_of(c10d.AllToAllOptions, opts, timeout=timeout)
        check_count(output_tensors, self._comm.size, "alltoall: output_tensors")
        check_count(input_tensors, self._comm.size, "alltoall: input_tensors")
        outputs, inputs = [[movable(t) for t in ts] for ts in (output_tensors, input_tensors)]
        whole, finish = output_buffer(outputs)
        received, sent = sizes(outputs), sizes(inputs)
        begin = partial(self._comm.all_to_all_v, whole, joined(inputs), received, sent)
        return self._call("all_to_all", options, output_tensors, [begin], finish)

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> GroupWork:
        """`dst` is a rank of the group."""
        tensor = single(tensors, "send: tensors")
        return self._message("send", tensor, partial(self._comm.isend, dst=dst, tag=tag))

    def recv(self, tensors: Sequence[Tensor], src: int | None, tag: int = 0) -> GroupWork:
        """`src` is a rank of the group."""
        tensor = single(tensors, "recv: tensors")
        return self._message("recv", tensor, partial(self._comm.irecv, src=src, tag=tag))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> GroupWork:
        return self.recv(tensors, None, tag)

    def _message(self, what: str, tensor: Tensor, begin: Begin) -> GroupWork:
        # Not the group's watcher: a message that never arrives must not block collectives' futures.
        span = span_of(what)
        return self._tracked(GroupWork([begin(movable(tensor))], [tensor]), span)
