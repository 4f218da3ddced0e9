"""The collectives that only move data: broadcast, all_gather, gather, scatter and all_to_all.

`comm.job` documents what all collectives share. The `_v` forms take parts of uneven sizes, in
elements. A rank allocates only the chunks that its program touches: with `direct`, a gather sends
from `input` itself and a scatter receives into `output` itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ringdp.comm.arguments import check_tensor
from ringdp.comm.buffers import (
    empty,
    fill,
    flat,
    flat_output,
    same,
    type_of,
    without_overlap,
    writable,
)
from ringdp.comm.graph_break import uncompiled
from ringdp.comm.job import Arg, CallSpec, Issuer, Job
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
        spec = self._spec("broadcast", tensor, algorithm, async_op, tag, root)
        program = self._program_or_exchange(spec)
        is_root = self.rank == root
        if is_root and not (program and program.changes):
            buffer, finish = flat(tensor).data, None
        else:
            out = flat_output(tensor, "broadcast: tensor", read=is_root)
            buffer, finish = out.data, out.copy_back
        if program:
            cuts = chunk_bounds(buffer.numel(), program)
            return self._issue(Job(program, cuts, buffer, None, finish), spec)
        part, bounds = buffer if is_root else None, self._root_bounds(root, buffer.numel())
        return self._issue(Job("all_gather", bounds, buffer, part, finish), spec)

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
        spec = self._spec("all_gather", input, algorithm, async_op, tag)
        return self._all_gather(output, input, None, spec)

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
        spec = self._spec("all_gather_v", input, algorithm, async_op, tag)
        return self._all_gather(output, input, sizes, spec)

    def _all_gather(
        self, output: Tensor, input: Tensor, sizes: Sequence[int] | None, spec: CallSpec
    ) -> Work:
        shards = self._shards(spec, Arg("input", input), Arg("output", output), sizes)
        program = self._program_or_exchange(spec)
        part = self._part(shards)
        out = flat_output(output, f"{spec.name}: output")
        if program:
            fill(out.data[part], input)
            cuts = uneven_bounds(shards, program)
            return self._issue(Job(program, cuts, out.data, None, out.copy_back), spec)
        piece = without_overlap(flat(input).data, out.data, same(out.data[part], input))
        return self._issue(
            Job("all_gather", bounds_of(shards), out.data, piece, out.copy_back), spec
        )

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
        spec = self._spec("gather", input, algorithm, async_op, tag, root)
        return self._gather(output, input, None, spec)

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
        spec = self._spec("gather_v", input, algorithm, async_op, tag, root)
        return self._gather(output, input, sizes, spec)

    def _gather(
        self, output: Tensor | None, input: Tensor, sizes: Sequence[int] | None, spec: CallSpec
    ) -> Work:
        whole = self._at_root(spec, "output", output)
        shards = self._shards(spec, Arg("input", input), whole, sizes)
        program = self._program_or_exchange(spec)
        out = whole and flat_output(whole.tensor, f"{spec.name}: output")
        finish = out and out.copy_back
        if program is None:
            piece, buffer, bounds = flat(input).data, out and out.data, bounds_of(shards)
            if buffer is not None:
                piece = without_overlap(piece, buffer, same(buffer[self._part(shards)], input))
            job = Job("all_gather", bounds, buffer, piece, finish, root=spec.root)
            return self._issue(job, spec)
        cuts = own_bounds(shards, program)
        part = own_part(cuts, program)
        if out is None and part == slice(0, cuts[-1]) and not program.changes:
            buffer = flat(input).data
        else:
            buffer = out.data if out else empty(cuts[-1], input)
            fill(buffer[part], input)
        job = Job(program, cuts, buffer, finish=finish, elements=sum(shards))
        return self._issue(job, spec)

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
        spec = self._spec("scatter", output, algorithm, async_op, tag, root)
        return self._scatter(output, input, None, spec)

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
        spec = self._spec("scatter_v", output, algorithm, async_op, tag, root)
        return self._scatter(output, input, sizes, spec)

    def _scatter(
        self, output: Tensor, input: Tensor | None, sizes: Sequence[int] | None, spec: CallSpec
    ) -> Work:
        whole = self._at_root(spec, "input", input)
        shards = self._shards(spec, Arg("output", output), whole, sizes)
        program = self._program_or_exchange(spec)
        out = flat_output(output, f"{spec.name}: output")
        if program is None:
            source = whole and without_overlap(flat(whole.tensor).data, out.data)
            bounds = bounds_of(shards)
            job = Job("all_to_all", bounds, source, out.data, out.copy_back, root=spec.root)
            return self._issue(job, spec)
        cuts = own_bounds(shards, program)
        part = own_part(cuts, program)
        if whole:
            buffer, original = flat(whole.tensor)
            buffer = buffer.clone() if original is None and program.changes else buffer
        elif part == slice(0, cuts[-1]):
            buffer = out.data
        else:
            buffer = empty(cuts[-1], output)

        def finish() -> None:
            fill(out.data, buffer[part])
            out.copy_back()

        job = Job(program, cuts, buffer, finish=finish, elements=sum(shards))
        return self._issue(job, spec)

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
        spec = self._spec("all_to_all", input, algorithm, async_op, tag)
        check_tensor("all_to_all", output, "output")
        count = input.numel()
        if output.numel() != count or type_of(output) != type_of(input) or count % self.size:
            raise UsageError(
                f"all_to_all: input has {count} elements of {type_of(input)}, output "
                f"{output.numel()} of {type_of(output)}; allowed: equally many of one dtype on one "
                f"device, a multiple of {self.size} (ranks)"
            )
        program = self._program_or_exchange(spec)
        out = flat_output(output, "all_to_all: output")
        if program:
            fill(out.data, input)
            cuts = chunk_bounds(out.data.numel(), program)
            return self._issue(Job(program, cuts, out.data, None, out.copy_back), spec)
        source = without_overlap(flat(input).data, out.data)
        bounds = shard_bounds(out.data.numel(), self.size)
        return self._issue(Job("all_to_all", bounds, source, out.data, out.copy_back), spec)

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
        spec = self._spec("all_to_all_v", input, "direct", async_op, tag)
        sent = self._cuts(spec, Arg("input", input), "input_sizes", input_sizes)
        received = self._cuts(spec, Arg("output", output), "output_sizes", output_sizes)
        if type_of(output) != type_of(input) or received[me] != sent[me]:
            raise UsageError(
                f"all_to_all_v: rank {me} sends itself {input_sizes[me]} elements of "
                f"{type_of(input)} and expects {output_sizes[me]} of {type_of(output)}; allowed: "
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
            out.copy_back()

        return self._issue(Job(self._program(spec), bounds, buffer, finish=finish), spec)

    def _at_root(self, spec: CallSpec, what: str, tensor: Tensor | None) -> Arg | None:
        """Return the tensor that only the root has, or None on other ranks.

        Raises UsageError if the root passes None.
        """
        if self.rank != spec.root:
            return None
        if tensor is None:
            raise UsageError(
                f"{spec.name}: {what} is None on the root, rank {spec.root}; allowed: a tensor"
            )
        return Arg(what, tensor)
