"""The reducing collectives: all_reduce, reduce, reduce_scatter and barrier.

`comm.job` documents what all collectives share. The ops, by dtype:

    op     float, double, half  complex  integers  bool
    sum    x                    x        x         or
    avg    x                    x        -         -      the sum divided by size; see below
    scale  x                    x        -         -      the sum of inputs times scale
    prod   x                    -        x         and
    min    x                    -        x         and    NaN if any is NaN; -0.0 < 0.0
    max    x                    -        x         or     NaN if any is NaN
    band   -                    -        x         and
    bor    -                    -        x         or
    bxor   -                    -        x         xor

Integers wrap around. `direct` divides the sum of 16-bit floats before it rounds, so their average
cannot overflow. Other algorithms round the sum and divide it when the call is waited for; `nccl`
uses NCCL's own average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ringdp.comm.arguments import check_float, check_tensor
from ringdp.comm.buffers import Flat, flat, flat_output, same, without_overlap, writable
from ringdp.comm.job import Arg, CallSpec, Issuer, Job, op_of_rows
from ringdp.comm.work import Work
from ringdp.errors import UsageError
from ringdp.schedule import Builder, Program
from ringdp.transport.base import REDUCE_OPS, Direct, ReduceOp
from ringdp.transport.bounds import bounds_of, uneven_bounds
from ringdp.transport.repeated import repeated
from ringdp.transport.rows import divisor

BITWISE = ("band", "bor", "bxor")


class Reductions(Issuer):
    """The methods of a Communicator that reduce over all ranks."""

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
        """Reduce `tensor` element-wise with `op` over all ranks, in place on every rank.

        `ringdp.comm.reductions` has a table of ops and dtypes. `ringdp.comm.job` documents the
        other arguments and what collectives raise.
        """
        check_tensor("all_reduce", tensor)
        spec = self._spec("all_reduce", algorithm, async_op, tag)
        factor = factor_of("all_reduce", op, scale, tensor)
        by = self._way(spec, "all_reduce")
        out = flat_output(tensor, "all_reduce: tensor", read=True)
        bounds, finish = self._bounds(by, out.data.numel()), self._finisher(out, by, op, spec)
        return self._issue(Job(by, bounds, out.data, None, finish, op, factor), spec)

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
        """Reduce `tensor` with `op` to rank `root`, in place. Others' tensors do not change."""
        check_tensor("reduce", tensor)
        spec = self._spec("reduce", algorithm, async_op, tag, root)
        factor = factor_of("reduce", op, scale, tensor)
        by = self._way(spec, "reduce_scatter")
        part, finish = None, None
        if self.rank == root:
            out = flat_output(tensor, "reduce: tensor", read=True)
            buffer = part = out.data
            finish = self._finisher(out, by, op, spec)
        else:
            buffer, original = flat(tensor)
            stores = isinstance(by, Program) and by.changes
            if original is None and (stores or factor != 1):
                buffer = buffer.clone()
        bounds = self._bounds(by, buffer.numel(), root)
        return self._issue(Job(by, bounds, buffer, part, finish, op, factor), spec)

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
        """Reduce `input` over all ranks, and store this rank's part of the result in `output`.

        input: size x output.numel() elements; rank r receives the r-th part. If `output` is this
        rank's part of `input`, no copy is made and the rest of `input` is overwritten.
        """
        spec = self._spec("reduce_scatter", algorithm, async_op, tag)
        return self._reduce_scatter(output, input, None, op, scale, spec)

    @repeated
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
        """reduce_scatter with uneven parts: rank r's has sizes[r] elements, `input` sum(sizes).

        All ranks pass the same sizes.
        """
        spec = self._spec("reduce_scatter_v", algorithm, async_op, tag)
        return self._reduce_scatter(output, input, sizes, op, scale, spec)

    def _reduce_scatter(
        self,
        output: Tensor,
        input: Tensor,
        sizes: Sequence[int] | None,
        op: ReduceOp,
        scale: float | None,
        spec: CallSpec,
    ) -> Work:
        shards = self._shards(spec, Arg("output", output), Arg("input", input), sizes)
        factor = factor_of(spec.name, op, scale, input)
        by = self._way(spec, "reduce_scatter")
        whole, part = flat(input), self._part(shards)
        in_place = same(whole.data[part], output)
        out = flat_output(output, f"{spec.name}: output")
        buffer, copied = whole.data, whole.original is not None
        if factor != 1 and not (copied or in_place):
            buffer, copied, factor = buffer * factor, True, 1
        if not isinstance(by, Program):
            buffer = without_overlap(buffer, out.data, in_place)
            job = Job(by, bounds_of(shards), buffer, out.data, out.copy_back, op, factor)
            return self._issue(job, spec)
        buffer = buffer if copied or in_place else buffer.clone()
        divide = self._finisher(Flat(buffer[part], None), by, op, spec)

        def finish() -> None:
            divide()
            out.take(buffer[part])

        bounds = uneven_bounds(shards, by)
        return self._issue(Job(by, bounds, buffer, None, finish, op, factor), spec)

    def _finisher(
        self, out: Flat, by: Program | Direct, op: ReduceOp, spec: CallSpec
    ) -> Callable[[], None]:
        """Return the function that copies the result back, and divides a sum that is an average."""
        if not isinstance(by, Program) or op == op_of_rows(op, spec, out.data.dtype):
            return out.copy_back
        divide = dividing(out.data, self.size)

        def finish() -> None:
            divide()
            out.copy_back()

        return finish

    @repeated
    def barrier(self, *, async_op: bool = False) -> Work:
        """Block until every rank has called it and all earlier collectives have ended.

        With async_op, return at once a Work that completes then.
        """
        self._transport.await_device()
        spec = self._spec("barrier", "direct", async_op, 0)
        by = self._way(spec, "all_reduce")
        return self._issue(Job(by, self._bounds(by, 1), self._zero), spec)


def dividing(total: Tensor, by: int, rounding_mode: str | None = None) -> Callable[[], None]:
    """Return a function that divides in place, only once: an interrupted wait calls it again."""
    undivided = True

    def divide() -> None:
        nonlocal undivided
        if undivided:
            data, size = writable(total), divisor(total, by)
            undivided = False  # if interrupted or failed before here, nothing is divided yet
            data.div_(size, rounding_mode=rounding_mode)

    return divide


def factor_of(collective: str, op: ReduceOp, scale: float | None, tensor: Tensor) -> float:
    """Return the factor by which every rank multiplies its input first.

    Raises UsageError if the op is unknown or does not support the tensor's dtype.
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
    return 1 if scale is None else check_float(f"{collective}: scale", scale, "a number")
