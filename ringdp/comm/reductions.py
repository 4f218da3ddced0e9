"""The collectives that add: all_reduce, reduce, reduce_scatter, and a barrier. `comm.job` says what
all share.

    op     float, double, half  complex  integers  bool
    sum    x                    x        x         or
    avg    x                    x        -         -      the sum, divided by size: see below
    scale  x                    x        -         -      the sum of inputs times scale
    prod   x                    -        x         and
    min    x                    -        x         and    NaN if any is NaN; -0.0 < 0.0
    max    x                    -        x         or     NaN if any is NaN
    band   -                    -        x         and
    bor    -                    -        x         or
    bxor   -                    -        x         xor

Integers wrap around. `direct` divides the sum of 16-bit floats before it is rounded, so that their
average cannot overflow. Other algorithms round first, and divide once the result is waited for;
`nccl` averages in NCCL's own way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ringdp.comm.arguments import number
from ringdp.comm.buffers import Flat, apart, fill, flat, flat_output, same, writable
from ringdp.comm.graph_break import uncompiled
from ringdp.comm.job import How, Issuer, Job, Named, op_of_rows
from ringdp.comm.work import Work
from ringdp.errors import UsageError
from ringdp.schedule import Builder, Program
from ringdp.transport.base import REDUCE_OPS, ReduceOp
from ringdp.transport.bounds import bounds_of, chunk_bounds, shard_bounds, uneven_bounds
from ringdp.transport.repeated import repeated

BITWISE = ("band", "bor", "bxor")


@uncompiled
class Reductions(Issuer):
    """The methods of a Communicator that combine the elements of all ranks."""

    @repeated
    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp = "sum",
        *,
        scale: float | None = None,
        algorithm: str | Builder = "direct",
        async_op: bool = False,
        tag: int = 0,
    ) -> Work:
        """Every rank's `tensor` becomes the element-wise `op` over all ranks, in place.

        `ringdp.comm.reductions` has a table of ops and dtypes, `ringdp.comm.job` what all
        collectives take and raise.
        """
        how = self._how("all_reduce", tensor, algorithm, async_op, tag)
        factor = factor_of("all_reduce", op, scale, tensor)
        program = self._program_or_exchange(how)
        out = flat_output(tensor, "all_reduce: tensor", read=True)
        if factor != 1:
            out.data.mul_(factor)
        elements, finish = out.data.numel(), self._home(out, program, op, how)
        if program:
            cuts = chunk_bounds(elements, program)
            return self._issue(Job(program, cuts, out.data, None, finish, op), how)
        bounds = shard_bounds(elements, self.size)
        return self._issue(Job("all_reduce", bounds, out.data, None, finish, op), how)

    @repeated
    def reduce(
        self,
        tensor: Tensor,
        root: int = 0,
        op: ReduceOp = "sum",
        *,
        scale: float | None = None,
        algorithm: str | Builder = "direct",
        async_op: bool = False,
        tag: int = 0,
    ) -> Work:
        """Rank `root`'s `tensor` becomes what all_reduce would give; the others keep theirs."""
        how = self._how("reduce", tensor, algorithm, async_op, tag, root)
        factor = factor_of("reduce", op, scale, tensor)
        program = self._program_or_exchange(how)
        if self.rank == root:
            buffer, home = out = flat_output(tensor, "reduce: tensor", read=True)
            finish: Callable[[], None] | None = self._home(out, program, op, how)
        else:
            (buffer, home), finish = flat(tensor), None
            if home is None and ((program and program.changes) or factor != 1):
                buffer = buffer.clone()
        if factor != 1:
            buffer.mul_(factor)
        if program:
            cuts = chunk_bounds(buffer.numel(), program)
            return self._issue(Job(program, cuts, buffer, None, finish, op), how)
        part, bounds = buffer if self.rank == root else None, self._all_at(root, buffer.numel())
        return self._issue(Job("reduce_scatter", bounds, buffer, part, finish, op), how)

    @repeated
    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor,
        op: ReduceOp = "sum",
        *,
        scale: float | None = None,
        algorithm: str | Builder = "direct",
        async_op: bool = False,
        tag: int = 0,
    ) -> Work:
        """`output` becomes this rank's part of the reduction of every rank's `input`.

        input: size x output.numel() elements, of which rank r's are the r-th part. If `output` is
        that part of `input`, no copy is made and the rest of `input` is overwritten.
        """
        how = self._how("reduce_scatter", input, algorithm, async_op, tag)
        return self._reduce_scatter(output, input, None, op, scale, how)

    def reduce_scatter_v(
        self,
        output: Tensor,
        input: Tensor,
        sizes: Sequence[int],
        op: ReduceOp = "sum",
        *,
        scale: float | None = None,
        algorithm: str | Builder = "direct",
        async_op: bool = False,
        tag: int = 0,
    ) -> Work:
        """reduce_scatter where rank r's part has sizes[r] elements, and `input` sum(sizes).

        All ranks pass the same sizes.
        """
        how = self._how("reduce_scatter_v", input, algorithm, async_op, tag)
        return self._reduce_scatter(output, input, sizes, op, scale, how)

    def _reduce_scatter(
        self,
        output: Tensor,
        input: Tensor,
        sizes: Sequence[int] | None,
        op: ReduceOp,
        scale: float | None,
        how: How,
    ) -> Work:
        factor = factor_of(how.name, op, scale, input)
        shards = self._shards(how, Named("output", output), Named("input", input), sizes)
        program = self._program_or_exchange(how)
        whole, part = flat(input), self._part(shards)
        in_place = same(whole.data[part], output)
        out = flat_output(output, f"{how.name}: output")
        buffer, copied = whole.data, whole.home is not None
        if factor != 1 and not (copied or in_place):
            buffer, copied = buffer * factor, True
        elif factor != 1:
            buffer.mul_(factor)
        if program is None:
            buffer, bounds = apart(buffer, out.data, in_place), bounds_of(shards)
            job = Job("reduce_scatter", bounds, buffer, out.data, out.settle, op)
            return self._issue(job, how)
        buffer = buffer if copied or in_place else buffer.clone()
        home = self._home(Flat(buffer[part], None), program, op, how)

        def finish() -> None:
            home()
            fill(out.data, buffer[part])
            out.settle()

        cuts = uneven_bounds(shards, program)
        return self._issue(Job(program, cuts, buffer, None, finish, op), how)

    def _home(
        self, out: Flat, program: Program | None, op: ReduceOp, how: How
    ) -> Callable[[], None]:
        """What brings a result home; a program's average may be a sum until then."""
        left = program is not None and op != op_of_rows(op, how, out.data.dtype)

        def finish() -> None:
            nonlocal left
            if left:  # once: who waits again after an interrupt comes again
                data = writable(out.data)
                by = torch.full((), self.size, dtype=data.dtype, device=data.device)
                left = False  # what raises or is interrupted before has divided nothing
                data.div_(by)  # by a number a GPU would multiply with 1/size
            out.settle()

        return finish if left else out.settle

    @repeated
    def barrier(self, *, async_op: bool = False) -> Work:
        """Return once every rank has called it, and collectives issued before have ended; with
        async_op at once, with a Work that ends then."""
        self._transport.await_device()
        how = self._how("barrier", self._zero, "direct", async_op, 0)
        if program := self._program_or_exchange(how):
            return self._issue(Job(program, chunk_bounds(1, program), self._zero), how)
        return self._issue(Job("all_reduce", shard_bounds(1, self.size), self._zero), how)


def factor_of(collective: str, op: ReduceOp, scale: float | None, tensor: Tensor) -> float:
    """By what every input is multiplied first.

    Raises UsageError for an op that there is not, or not for this dtype.
    """
    if not (isinstance(op, str) and op in REDUCE_OPS):
        raise UsageError(f"{collective}: no op {op!r}; there are {', '.join(REDUCE_OPS)}")
    floats = tensor.is_floating_point() or tensor.is_complex()
    if floats and op in BITWISE:
        raise UsageError(f"{collective}: {op} is for integers and bool, not for {tensor.dtype}")
    if tensor.is_complex() and op not in ("sum", "avg"):
        raise UsageError(f"{collective}: {op} is for real numbers; {tensor.dtype} has sum and avg")
    if scale is not None and op != "sum":
        raise UsageError(f"{collective}: scale goes with op 'sum', not with {op!r}")
    if not floats and (op == "avg" or scale is not None):
        what = "avg" if op == "avg" else "scale"
        raise UsageError(f"{collective}: {what} is for floats; this tensor is {tensor.dtype}")
    return 1 if scale is None else number(f"{collective}: scale", scale, "a number")
