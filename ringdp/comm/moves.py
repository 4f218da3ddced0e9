"""The collectives that only move data: broadcast, all_gather, gather, scatter and all_to_all.

`comm.job` documents what all collectives share. The `_v` forms take parts of uneven sizes, in
elements. A rank allocates only the chunks that its program touches: with `direct`, a gather sends
from `input` itself and a scatter receives into `output` itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ringdp.comm.arguments import check_tensor
from ringdp.comm.buffers import apart, empty, fill, flat, flat_output, form_of, same, writable
from ringdp.comm.graph_break import uncompiled
from ringdp.comm.job import How, Issuer, Job, Named
from ringdp.comm.work import Work
from ringdp.errors import UsageError
from ringdp.schedule import Builder
from ringdp.transport.bounds import (
    bounds_of,
    chunk_bounds,
    own_bounds,
    own_part,
    pair_bounds,
    shard_bounds,
    uneven_bounds,
)
from ringdp.transport.repeated import repeated


@uncompiled
class Moves(Issuer):
    """The methods of a Communicator that move data between ranks without reducing it."""

    @repeated
    def broadcast(
        self,
        tensor: Tensor,
        root: int = 0,
        *,
        algorithm: str | Builder = "direct",
        async_op: bool = False,
        tag: int = 0,
    ) -> Work:
        """Copy rank `root`'s `tensor` to every rank's `tensor`, in place."""
        how = self._how("broadcast", tensor, algorithm, async_op, tag, root)
        program = self._program_or_exchange(how)
        is_root = self.rank == root
        if is_root and not (program and program.changes):
            buffer, finish = flat(tensor).data, None
        else:
            out = flat_output(tensor, "broadcast: tensor", read=is_root)
            buffer, finish = out.data, out.settle
        if program:
            cuts = chunk_bounds(buffer.numel(), program)
            return self._issue(Job(program, cuts, buffer, None, finish), how)
        part, bounds = buffer if is_root else None, self._all_at(root, buffer.numel())
        return self._issue(Job("all_gather", bounds, buffer, part, finish), how)

    @repeated
    def all_gather(
        self,
        output: Tensor,
        input: Tensor,
        *,
        algorithm: str | Builder = "direct",
        async_op: bool = False,
        tag: int = 0,
    ) -> Work:
        """Concatenate the inputs of ranks 0, 1, ... into `output` on every rank.

        output: size x input.numel() elements. No copy is made if `input` is this rank's part of it.
        """
        how = self._how("all_gather", input, algorithm, async_op, tag)
        return self._all_gather(output, input, None, how)

    def all_gather_v(
        self,
        output: Tensor,
        input: Tensor,
        sizes: Sequence[int],
        *,
        algorithm: str | Builder = "direct",
        async_op: bool = False,
        tag: int = 0,
    ) -> Work:
        """all_gather with uneven inputs: rank r's has sizes[r] elements, `output` sum(sizes).

        All ranks pass the same sizes.
        """
        how = self._how("all_gather_v", input, algorithm, async_op, tag)
        return self._all_gather(output, input, sizes, how)

    def _all_gather(
        self, output: Tensor, input: Tensor, sizes: Sequence[int] | None, how: How
    ) -> Work:
        shards = self._shards(how, Named("input", input), Named("output", output), sizes)
        program = self._program_or_exchange(how)
        part = self._part(shards)
        out = flat_output(output, f"{how.name}: output")
        if program:
            fill(out.data[part], input)
            cuts = uneven_bounds(shards, program)
            return self._issue(Job(program, cuts, out.data, None, out.settle), how)
        piece = apart(flat(input).data, out.data, same(out.data[part], input))
        return self._issue(Job("all_gather", bounds_of(shards), out.data, piece, out.settle), how)

    @repeated
    def gather(
        self,
        output: Tensor | None,
        input: Tensor,
        root: int = 0,
        *,
        algorithm: str | Builder = "direct",
        async_op: bool = False,
        tag: int = 0,
    ) -> Work:
        """Concatenate the inputs of ranks 0, 1, ... into `output` on rank `root`.

        output: size x input.numel() elements on the root; ignored elsewhere, and may be None.
        """
        how = self._how("gather", input, algorithm, async_op, tag, root)
        return self._gather(output, input, None, how)

    def gather_v(
        self,
        output: Tensor | None,
        input: Tensor,
        sizes: Sequence[int],
        root: int = 0,
        *,
        algorithm: str | Builder = "direct",
        async_op: bool = False,
        tag: int = 0,
    ) -> Work:
        """gather with sizes[r] elements from rank r. All ranks pass the same sizes."""
        how = self._how("gather_v", input, algorithm, async_op, tag, root)
        return self._gather(output, input, sizes, how)

    def _gather(
        self, output: Tensor | None, input: Tensor, sizes: Sequence[int] | None, how: How
    ) -> Work:
        whole = self._at_root(how, "output", output)
        shards = self._shards(how, Named("input", input), whole, sizes)
        program = self._program_or_exchange(how)
        out = whole and flat_output(whole.tensor, f"{how.name}: output")
        finish = out and out.settle
        if program is None:
            piece, buffer, bounds = flat(input).data, out and out.data, bounds_of(shards)
            if buffer is not None:
                piece = apart(piece, buffer, same(buffer[self._part(shards)], input))
            job = Job("all_gather", bounds, buffer, piece, finish, root=how.root)
            return self._issue(job, how)
        cuts = own_bounds(shards, program)
        part = own_part(cuts, program)
        if out is None and part == slice(0, cuts[-1]) and not program.changes:
            buffer = flat(input).data
        else:
            buffer = out.data if out else empty(cuts[-1], input)
            fill(buffer[part], input)
        job = Job(program, cuts, buffer, finish=finish, elements=sum(shards))
        return self._issue(job, how)

    @repeated
    def scatter(
        self,
        output: Tensor,
        input: Tensor | None,
        root: int = 0,
        *,
        algorithm: str | Builder = "direct",
        async_op: bool = False,
        tag: int = 0,
    ) -> Work:
        """Store this rank's part of rank `root`'s `input` in `output`.

        input: size x output.numel() elements on the root; ignored elsewhere, and may be None.
        """
        how = self._how("scatter", output, algorithm, async_op, tag, root)
        return self._scatter(output, input, None, how)

    def scatter_v(
        self,
        output: Tensor,
        input: Tensor | None,
        sizes: Sequence[int],
        root: int = 0,
        *,
        algorithm: str | Builder = "direct",
        async_op: bool = False,
        tag: int = 0,
    ) -> Work:
        """scatter with sizes[r] elements to rank r. All ranks pass the same sizes."""
        how = self._how("scatter_v", output, algorithm, async_op, tag, root)
        return self._scatter(output, input, sizes, how)

    def _scatter(
        self, output: Tensor, input: Tensor | None, sizes: Sequence[int] | None, how: How
    ) -> Work:
        whole = self._at_root(how, "input", input)
        shards = self._shards(how, Named("output", output), whole, sizes)
        program = self._program_or_exchange(how)
        out = flat_output(output, f"{how.name}: output")
        if program is None:
            source = whole and apart(flat(whole.tensor).data, out.data)
            bounds = bounds_of(shards)
            job = Job("all_to_all", bounds, source, out.data, out.settle, root=how.root)
            return self._issue(job, how)
        cuts = own_bounds(shards, program)
        part = own_part(cuts, program)
        if whole:
            buffer, home = flat(whole.tensor)
            buffer = buffer.clone() if home is None and program.changes else buffer
        elif part == slice(0, cuts[-1]):
            buffer = out.data
        else:
            buffer = empty(cuts[-1], output)

        def finish() -> None:
            fill(out.data, buffer[part])
            out.settle()

        job = Job(program, cuts, buffer, finish=finish, elements=sum(shards))
        return self._issue(job, how)

    @repeated
    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        *,
        algorithm: str | Builder = "direct",
        async_op: bool = False,
        tag: int = 0,
    ) -> Work:
        """Send part r of `input` to rank r, and receive part r of `output` from rank r.

        input, output: the same number of elements, a multiple of size. They may be one tensor.
        """
        how = self._how("all_to_all", input, algorithm, async_op, tag)
        check_tensor("all_to_all", output, "output")
        count = input.numel()
        if output.numel() != count or form_of(output) != form_of(input) or count % self.size:
            raise UsageError(
                f"all_to_all: input has {count} elements of {form_of(input)}, output "
                f"{output.numel()} of {form_of(output)}; allowed: equally many of one dtype on one "
                f"device, a multiple of {self.size} (ranks)"
            )
        program = self._program_or_exchange(how)
        out = flat_output(output, "all_to_all: output")
        if program:
            fill(out.data, input)
            cuts = chunk_bounds(out.data.numel(), program)
            return self._issue(Job(program, cuts, out.data, None, out.settle), how)
        source = apart(flat(input).data, out.data)
        bounds = shard_bounds(out.data.numel(), self.size)
        return self._issue(Job("all_to_all", bounds, source, out.data, out.settle), how)

    def all_to_all_v(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        *,
        async_op: bool = False,
        tag: int = 0,
    ) -> Work:
        """all_to_all with uneven parts: input_sizes[r] elements to rank r, output_sizes[r] from it.

        Raises CollectiveMismatch if two ranks disagree on how much one sends the other.
        """
        me = self.rank
        how = self._how("all_to_all_v", input, "direct", async_op, tag)
        sent = self._cuts(how, Named("input", input), "input_sizes", input_sizes)
        received = self._cuts(how, Named("output", output), "output_sizes", output_sizes)
        if form_of(output) != form_of(input) or received[me] != sent[me]:
            raise UsageError(
                f"all_to_all_v: rank {me} sends itself {input_sizes[me]} elements of "
                f"{form_of(input)} and expects {output_sizes[me]} of {form_of(output)}; allowed: "
                "the same"
            )
        bounds = pair_bounds(me, sent, received)
        out = flat_output(output, "all_to_all_v: output")
        buffer = empty(bounds[-1], output)
        # buffer: from ranks 0 ... me - 1 | to ranks 0 ... n - 1 | from ranks me + 1 ... n - 1
        sends, to_self = bounds[me * self.size], bounds[me * self.size + me]
        fill(buffer[sends : sends + sum(sent)], input)

        def finish() -> None:
            data = writable(out.data)
            data[:sends] = buffer[:sends]
            data[sends : sends + sent[me]] = buffer[to_self : to_self + sent[me]]
            data[sends + sent[me] :] = buffer[sends + sum(sent) :]
            out.settle()

        return self._issue(Job(self._program(how), bounds, buffer, finish=finish), how)

    def _at_root(self, how: How, what: str, tensor: Tensor | None) -> Named | None:
        """Return the tensor that only the root has, or None on other ranks.

        Raises UsageError if the root passes None.
        """
        if self.rank != how.root:
            return None
        if tensor is None:
            raise UsageError(
                f"{how.name}: {what} is None on the root, rank {how.root}; allowed: a tensor"
            )
        return Named(what, tensor)
