"""The collectives that only move data: broadcast, all_gather, gather, scatter and all_to_all.

`comm.job` documents what all collectives share. The `_v` forms take parts of uneven sizes, in
elements. A rank allocates only the chunks that its program touches: with `direct`, a gather sends
from `input` itself and a scatter receives into `output` itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from ringdp.comm.arguments import check_tensor
from ringdp.comm.buffers import empty, fill, flat, flat_output, same, type_of, without_overlap
from ringdp.comm.job import Arg, CallSpec, Issuer, Job
from ringdp.comm.work import Work
from ringdp.errors import UsageError
from ringdp.schedule import Builder, Program
from ringdp.transport.bounds import bounds_of, own_bounds, pair_bounds
from ringdp.transport.repeated import repeated


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
        check_tensor("broadcast", tensor)
        spec = self._spec("broadcast", algorithm, async_op, tag, root)
        by = self._way(spec, "all_gather")
        part, finish = None, None
        if self.rank == root:  # whatever its program stores meanwhile, its values end as they were
            buffer = part = flat(tensor).data
        else:
            out = flat_output(tensor, "broadcast: tensor")
            buffer, finish = out.data, out.copy_back
        bounds = self._bounds(by, buffer.numel(), root)
        return self._issue(Job(by, bounds, buffer, part, finish), spec)

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
        spec = self._spec("all_gather", algorithm, async_op, tag)
        return self._gather(spec, Arg("output", output), input)

    @repeated
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
        spec = self._spec("all_gather_v", algorithm, async_op, tag)
        return self._gather(spec, Arg("output", output), input, sizes)

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
        spec = self._spec("gather", algorithm, async_op, tag, root)
        return self._gather(spec, self._at_root(spec, "output", output), input)

    @repeated
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
        spec = self._spec("gather_v", algorithm, async_op, tag, root)
        return self._gather(spec, self._at_root(spec, "output", output), input, sizes)

    def _gather(
        self,
        spec: CallSpec,
        whole: Arg | None,
        input: Tensor,
        sizes: Sequence[int] | None = None,
    ) -> Work:
        """`whole`: the output, or None on a rank that gathers nothing."""
        shards = self._shards(spec, Arg("input", input), whole, sizes)
        by = self._way(spec, "all_gather")
        out = whole and flat_output(whole.tensor, f"{spec.name}: output")
        finish = out and out.copy_back
        if not isinstance(by, Program):
            piece, buffer = flat(input).data, out and out.data
            if buffer is not None:
                piece = without_overlap(piece, buffer, same(buffer[self._part(shards)], input))
            return self._issue(Job(by, bounds_of(shards), buffer, piece, finish), spec)
        cuts, part = own_bounds(shards, by)
        if out is None and not by.changes:  # then it reads this rank's part alone
            buffer = flat(input).data
        else:
            buffer = out.data if out else empty(cuts[-1], input)
            fill(buffer[part], input)
        return self._issue(Job(by, cuts, buffer, finish=finish, elements=sum(shards)), spec)

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
        spec = self._spec("scatter", algorithm, async_op, tag, root)
        return self._scatter(spec, output, input)

    @repeated
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
        spec = self._spec("scatter_v", algorithm, async_op, tag, root)
        return self._scatter(spec, output, input, sizes)

    def _scatter(
        self,
        spec: CallSpec,
        output: Tensor,
        input: Tensor | None,
        sizes: Sequence[int] | None = None,
    ) -> Work:
        whole = self._at_root(spec, "input", input)
        shards = self._shards(spec, Arg("output", output), whole, sizes)
        by = self._way(spec, "all_to_all")
        out = flat_output(output, f"{spec.name}: output")
        source = whole and flat(whole.tensor)
        if not isinstance(by, Program):
            given, bounds = source and without_overlap(source.data, out.data), bounds_of(shards)
            return self._issue(Job(by, bounds, given, out.data, out.copy_back), spec)
        cuts, part = own_bounds(shards, by)
        if source:
            buffer = source.data.clone() if by.changes else source.data
        elif part == slice(0, cuts[-1]):
            buffer = out.data
        else:
            buffer = empty(cuts[-1], output)
        finish = partial(out.take, buffer[part])
        return self._issue(Job(by, cuts, buffer, finish=finish, elements=sum(shards)), spec)

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
        spec = self._spec("all_to_all", algorithm, async_op, tag)
        check_tensor("all_to_all", input, "input")
        check_tensor("all_to_all", output, "output")
        count = input.numel()
        if output.numel() != count or type_of(output) != type_of(input) or count % self.size:
            raise UsageError(
                f"all_to_all: input has {count} elements of {type_of(input)}, output "
                f"{output.numel()} of {type_of(output)}; allowed: equally many of one dtype on one "
                f"device, a multiple of {self.size} (ranks)"
            )
        by = self._way(spec, "all_to_all")
        out = flat_output(output, "all_to_all: output")
        if isinstance(by, Program):
            whole = out.data
            fill(whole, input)
        else:
            whole = without_overlap(flat(input).data, out.data)
        bounds = self._bounds(by, out.data.numel())
        return self._issue(Job(by, bounds, whole, out.data, out.copy_back), spec)

    @repeated
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
        spec = self._spec("all_to_all_v", "direct", async_op, tag)
        sent = self._cuts(spec, Arg("input", input), input_sizes)
        received = self._cuts(spec, Arg("output", output), output_sizes)
        if type_of(output) != type_of(input) or received[me] != sent[me]:
            raise UsageError(
                f"all_to_all_v: rank {me} sends itself {input_sizes[me]} elements of "
                f"{type_of(input)} and expects {output_sizes[me]} of {type_of(output)}; allowed: "
                "the same"
            )
        by = self._way(spec, "all_to_all")
        out = flat_output(output, "all_to_all_v: output")
        if not isinstance(by, Program):
            given, into = without_overlap(flat(input).data, out.data), bounds_of(received)
            job = Job(by, bounds_of(sent), given, out.data, out.copy_back, received=into)
            return self._issue(job, spec)
        bounds = pair_bounds(me, sent, received)
        buffer = empty(bounds[-1], output)
        # buffer: from ranks 0 ... me - 1 | to ranks 0 ... n - 1 | from ranks me + 1 ... n - 1
        sends, to_self = bounds[me * self.size], bounds[me * self.size + me]
        fill(buffer[sends : sends + sum(sent)], input)
        own = buffer[to_self : to_self + sent[me]]
        finish = partial(out.take, buffer[:sends], own, buffer[sends + sum(sent) :])
        return self._issue(Job(by, bounds, buffer, finish=finish), spec)

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
