"""torch's collectives that only move data: broadcast, all_gather, gather, scatter and all_to_all.

The tensors of a list are the parts of one buffer. If they are adjacent in memory, it is not copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    ScatterOptions,
)

from ringdp.comm.backend.calls import (
    Begin,
    Calls,
    Tensors,
    check_parts,
    joined,
    movable,
    options_of,
    output_buffer,
    parts_of,
    single,
    sizes,
)
from ringdp.comm.backend.works import GroupWork
from ringdp.errors import UsageError


class Moves(Calls):
    """The methods of a group that move data between ranks without reducing it."""

    def broadcast(
        self,
        tensors: Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
        root: int | None = None,
    ) -> GroupWork:
        tensor = single(tensors, "broadcast: tensors")
        options = options_of(BroadcastOptions, opts, rootRank=root, timeout=timeout)
        moved, source = movable(tensor), options.rootRank
        return self._call(
            "broadcast",
            options,
            [tensor],
            [lambda later: self._comm.broadcast(moved, source, async_op=later)],
        )

    def allgather(
        self,
        output_tensors: Sequence[Any],
        input_tensors: Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> GroupWork:
        """The parts may differ in size."""
        options = options_of(AllgatherOptions, opts, timeout=timeout)
        part = movable(single(input_tensors, "allgather: input_tensors"))
        parts = parts_of(output_tensors, input_tensors, "allgather: output_tensors")
        moved = [movable(t) for t in parts]
        whole, finish = output_buffer(moved)
        return self._call(
            "all_gather",
            options,
            parts,
            [lambda later: self._comm.all_gather_v(whole, part, sizes(moved), async_op=later)],
            finish,
        )

    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[Tensor]],
        input_list: Sequence[Tensor],
        opts: Any = None,
    ) -> GroupWork:
        """`output_lists`: one list per rank, with tensors for that rank's `input_list`."""
        options = options_of(AllgatherOptions, opts)
        rooms = [
            output_buffer([movable(t) for t in parts]) for parts in zip(*output_lists, strict=True)
        ]

        def begin(whole: Tensor, part: Tensor) -> Begin:
            return lambda later: self._comm.all_gather(whole, part, async_op=later)

        wholes, finishes = zip(*rooms, strict=True)
        begins = list(map(begin, wholes, map(movable, input_list)))
        return self._call("all_gather", options, output_lists, begins, *finishes)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> GroupWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> GroupWork:
        options = options_of(AllgatherOptions, opts)

        def begin(output: Tensor, input: Tensor) -> Begin:
            whole, part = movable(output), movable(input)
            return lambda later: self._comm.all_gather(whole, part, async_op=later)

        return self._call("all_gather", options, outputs, list(map(begin, outputs, inputs)))

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self,
        output_tensors: Sequence[Any],
        input_tensors: Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
        root: int | None = None,
    ) -> GroupWork:
        options = options_of(GatherOptions, opts, rootRank=root, timeout=timeout)
        given, to = single(input_tensors, "gather: input_tensors"), options.rootRank
        part = movable(given)
        parts: Sequence[Tensor] = []
        whole, finish = None, None
        if self._comm.rank == to:
            parts = parts_of(output_tensors, input_tensors, "gather: output_tensors")
            check_parts(parts, given, self._comm.size, "gather: output_tensors")
            whole, finish = output_buffer([movable(t) for t in parts])
        return self._call(
            "gather",
            options,
            parts,
            [lambda later: self._comm.gather(whole, part, to, async_op=later)],
            finish,
        )

    def gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> GroupWork:
        """`output` is ignored on ranks other than the root."""
        options = options_of(GatherOptions, opts)
        part, to = movable(input), options.rootRank
        whole = movable(output) if self._comm.rank == to else None
        return self._call(
            "gather",
            options,
            [output],
            [lambda later: self._comm.gather(whole, part, to, async_op=later)],
        )

    gather_into_tensor = gather_single

    def scatter(
        self,
        output_tensors: Tensors,
        input_tensors: Sequence[Any],
        opts: Any = None,
        timeout: timedelta | None = None,
        root: int | None = None,
    ) -> GroupWork:
        options = options_of(ScatterOptions, opts, rootRank=root, timeout=timeout)
        output, source = single(output_tensors, "scatter: output_tensors"), options.rootRank
        moved, whole = movable(output), None
        if self._comm.rank == source:
            parts = parts_of(input_tensors, output_tensors, "scatter: input_tensors")
            check_parts(parts, output, self._comm.size, "scatter: input_tensors")
            whole = joined([movable(t) for t in parts])
        return self._call(
            "scatter",
            options,
            [output],
            [lambda later: self._comm.scatter(moved, whole, source, async_op=later)],
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> GroupWork:
        """Split sizes are along the first dimension. Without them parts are equal and move much
        faster. If only some ranks pass them, all raise CollectiveMismatch."""
        options = options_of(AllToAllOptions, opts, timeout=timeout)
        to, source = movable(output), movable(input)
        if not output_split_sizes and not input_split_sizes:
            return self._call(
                "all_to_all",
                options,
                [output],
                [lambda later: self._comm.all_to_all(to, source, async_op=later)],
            )
        received = self._cut(output, to.numel(), output_split_sizes)
        sent = self._cut(input, source.numel(), input_split_sizes)
        return self._call(
            "all_to_all",
            options,
            [output],
            [lambda later: self._comm.all_to_all_v(to, source, received, sent, async_op=later)],
        )

    alltoall_base = all_to_all_single

    def _cut(self, tensor: Tensor, elements: int, splits: Sequence[int]) -> list[int]:
        """Return the elements of each part. `splits` are in rows; if empty, parts are equal."""
        rows = tensor.shape[0] if tensor.dim() else 1
        if not splits and rows % self._comm.size:
            raise UsageError(
                f"all_to_all_single: a tensor of shape {tuple(tensor.shape)} without split sizes; "
                f"its first dimension must be a multiple of {self._comm.size} (ranks)"
            )
        row = elements // rows if rows else 0
        return [n * row for n in splits or [rows // self._comm.size] * self._comm.size]

    def alltoall(
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> GroupWork:
        """The parts may differ in size."""
        options = options_of(AllToAllOptions, opts, timeout=timeout)
        outputs, inputs = [[movable(t) for t in ts] for ts in (output_tensors, input_tensors)]
        whole, finish = output_buffer(outputs)
        return self._call(
            "all_to_all",
            options,
            output_tensors,
            [
                lambda later: self._comm.all_to_all_v(
                    whole, joined(inputs), sizes(outputs), sizes(inputs), async_op=later
                )
            ],
            finish,
        )
