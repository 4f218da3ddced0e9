"""Batch normalisation over the batches of all ranks, also on the CPU, where torch's does not work.

    forward    every rank gathers (count, mean, sum of squares about it) of each channel
               N = Σ n,  μ = Σ n·mean / N,  M2 = Σ (m2 + n·(mean − μ)²)        Chan et al. 1979
               y = (x − μ) / sqrt(M2/N + eps) · weight + bias
    backward   with ŷ = (x − μ)·invstd, and sums over all ranks:
               dx = weight·invstd·(dy − Σdy / N − ŷ·Σ(dy·ŷ) / N)

weight and bias get this rank's gradients, which DDP averages. In float32 at least. A rank may have
other batch sizes than the rest, or none. Its gradients cannot be differentiated again.
"""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from ringdp.comm import Communicator, communicator_of
from ringdp.errors import UsageError


class SyncBatchNorm(_BatchNorm):
    """torch.nn.SyncBatchNorm over `process_group`, by default what `ringdp.init` made last, or else
    torch's default group.

    Input: [rows, channels, ...]; the output has its shape and dtype, and statistics are float32 or
    wider. Forward and backward are collective in training; in evaluation it is an ordinary batch
    norm. Raises UsageError for an input with other channels.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Communicator | ProcessGroup | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.process_group = process_group

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise UsageError(
                f"SyncBatchNorm: the input's shape is {list(input.shape)}; it must be "
                f"[rows, {self.num_features}, ...]"
            )

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training:
            wide = torch.promote_types(input.dtype, torch.float32)  # as in training
            own = (self.running_mean, self.running_var, self.weight, self.bias)
            mean, var, weight, bias = (t if t is None else t.to(wide) for t in own)
            return batch_norm(input, mean, var, weight, bias, mean is None, eps=self.eps)
        comm = communicator_of(self.process_group, [input])
        y, mean, m2, count = _Normalize.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, comm
        )
        if self.track_running_stats and self.running_mean is not None and count > 0:
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            seen = int(self.num_batches_tracked)
            share = 1 / seen if self.momentum is None else self.momentum
            unbiased = m2 / (count - 1).clamp(min=1)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
        out: Tensor = y
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Over the same ranks."""
        memo[id(self.process_group)] = self.process_group
        memo[id(self)] = new = type(self).__new__(type(self))
        new.__setstate__(copy.deepcopy(self.__dict__, memo))  # type: ignore[no-untyped-call]
        return new

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "process_group": None}  # a communicator belongs to its process

    @classmethod
    def _like(cls, m: _BatchNorm, process_group: Communicator | ProcessGroup | None) -> Self:
        affine, tracked = m.affine, m.track_running_stats
        new = cls(m.num_features, m.eps, m.momentum, affine, tracked, process_group)
        new.weight, new.bias = m.weight, m.bias
        new.running_mean, new.running_var = m.running_mean, m.running_var
        new.num_batches_tracked = m.num_batches_tracked
        new.training = m.training
        return new

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: Communicator | ProcessGroup | None = None
    ) -> nn.Module:
        """`module` with every BatchNorm*d in it replaced, parameters and buffers kept."""
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            return cls._like(module, process_group)
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child, process_group))
        return module


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        comm: Communicator,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(y, mean, sum of squares about it, count), all but y over all ranks' rows."""
        over = [d for d in range(x.dim()) if d != 1]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        channels = wide.shape[1]
        count = wide.new_tensor([wide.numel() // channels])
        mean = wide.sum(over) / count.clamp(min=1)
        m2 = (wide - _along(mean, x)).square().sum(over)
        found = wide.new_empty(comm.size * (2 * channels + 1))
        comm.all_gather(found, torch.cat([mean, m2, count]))
        means, m2s, counts = torch.split(found.view(comm.size, -1), [channels, channels, 1], 1)
        total = counts.sum(0)
        rows = total.clamp(min=1)  # there may be none anywhere
        mean = (counts * means).sum(0) / rows
        m2 = (m2s + counts * (means - mean).square()).sum(0)
        invstd = torch.rsqrt(m2 / rows + eps)
        normal = (wide - _along(mean, x)) * _along(invstd, x)
        y = normal if weight is None else normal * _along(weight, x)
        y = y if bias is None else y + _along(bias, x)
        ctx.save_for_backward(x, mean, invstd, weight, rows)
        ctx.comm, ctx.over, ctx.biased = comm, over, bias is not None
        ctx.mark_non_differentiable(mean, m2, total)
        return y.to(x.dtype), mean, m2, total

    @staticmethod
    @once_differentiable  # autograd does not see the all_reduce
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, invstd, weight, rows = ctx.saved_tensors
        wide = dy.to(mean.dtype)
        normal = (x.to(mean.dtype) - _along(mean, x)) * _along(invstd, x)
        sums = torch.stack([wide.sum(ctx.over), (wide * normal).sum(ctx.over)])
        dbias, dweight = sums[0].clone(), sums[1].clone()
        ctx.comm.all_reduce(sums)
        dx = wide - _along(sums[0] / rows, dy) - normal * _along(sums[1] / rows, dy)
        dx = dx * _along(invstd if weight is None else invstd * weight, dy)
        return (
            dx.to(dy.dtype),
            None if weight is None else dweight.to(weight.dtype),
            dbias.to(weight.dtype) if ctx.biased else None,
            *(None, None),
        )


def _along(channel: Tensor, x: Tensor) -> Tensor:
    """[channels] in the place of x's second dimension."""
    return channel.view(-1, *[1] * (x.dim() - 2))
