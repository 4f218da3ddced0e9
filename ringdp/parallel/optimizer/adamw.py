"""AdamW that steps parameters adjacent in memory at once: a unit's flat shard in one pass.

A unit's slices are adjacent, and this optimizer allocates its state likewise; it also steps
parameters of any other model. The bits of an element depend only on its own values (see
`kernels.adamw`), so they are the same in every stage and for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ringdp.errors import UsageError
from ringdp.kernels import adamw


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW's arguments and state, without amsgrad and maximize, for float32 parameters
    (they may compute in another dtype, by Precision). The formula is in `kernels.adamw`.

    Raises UsageError for a number out of bounds, and in `step` for a tensor that is not float32."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        sizes = lr >= 0 and eps >= 0 and weight_decay >= 0  # false for NaN
        if not (sizes and len(betas) == 2 and all(0 <= b < 1 for b in betas)):
            raise UsageError(
                f"AdamW(lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}): allowed: "
                "nothing below 0, and two betas below 1"
            )
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))  # noqa: C408

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad(closure)()
        ready = [(_ready(group["params"]), group) for group in self.param_groups]
        for params, group in ready:
            for run, step in _runs(params, self._count(params)):
                self._step(run, step, group)
        return loss

    def _count(self, params: Sequence[Tensor]) -> list[int]:
        """Increment each parameter's step; returns them."""
        steps = []
        for p in params:  # one may be listed twice
            state = self.state[p]
            state["step"] = state["step"] + 1 if "step" in state else torch.ones((), device="cpu")
            steps.append(int(state["step"]))
        return steps

    def _step(self, run: Sequence[Tensor], step: int, group: dict[str, Any]) -> None:
        param, grad = _joined(run), _joined([p.grad for p in run])
        if param is None or grad is None:  # adjacent by chance, in other storages
            for p in run:
                self._step([p], step, group)
            return
        adamw(
            param,
            grad,
            *(self._moment(key, run, param) for key in ("exp_avg", "exp_avg_sq")),
            step=step,
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )
        if len(run) > 1:
            increment_version(run)  # each has its own counter

    def _moment(self, key: str, run: Sequence[Tensor], param: Tensor) -> Tensor:
        """The run's moments as one tensor like `param`; each parameter's state is a view of it."""
        have = [self.state[p].get(key) for p in run]
        moment = _joined(have)
        if moment is None:
            moment = torch.zeros_like(param)
            parts = torch.split(moment.view(-1), [p.numel() for p in run])
            for p, old, part in zip(run, have, parts, strict=True):
                self.state[p][key] = part.view(p.shape)
                if old is not None:
                    self.state[p][key].copy_(old)
        return moment


def _ready(params: Iterable[Tensor]) -> list[Tensor]:
    """The parameters with a gradient. Raises UsageError for one that cannot be stepped."""
    ready = []
    for p in params:
        grad = p.grad
        if grad is None:
            continue
        for x, what in ((p, "a parameter"), (grad, "a gradient")):
            if x.dtype != torch.float32 or not x.is_contiguous():
                raise UsageError(
                    f"ringdp.AdamW found {what} that is {x.dtype}{list(x.shape)} with strides "
                    f"{x.stride()}; allowed: contiguous float32. Let a float32 model compute in "
                    "another dtype by shard(precision=Precision(param=...))"
                )
        ready.append(p)
    return ready


def _runs(params: Sequence[Tensor], steps: Sequence[int]) -> list[tuple[list[Tensor], int]]:
    """Runs of parameters that are adjacent, as are their gradients, and take the same step."""
    runs: list[tuple[list[Tensor], int]] = []
    expected = None
    for p, step in zip(params, steps, strict=True):
        assert p.grad is not None
        place = p.data_ptr(), p.grad.data_ptr(), step
        if place != expected:
            runs.append(([], step))
        runs[-1][0].append(p)
        expected = place[0] + p.nbytes, place[1] + p.nbytes, step
    return runs


def _joined(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Contiguous, adjacent tensors of one storage as one tensor (flat if several); else None."""
    first = tensors[0]
    if first is None or not first.is_contiguous():
        return None
    if len(tensors) == 1:
        return first
    end = first.data_ptr()
    for t in tensors:
        if t is None or t.data_ptr() != end or not t.is_contiguous():
            return None
        end += t.nbytes
    # An allocator may put one storage right behind another.
    storage = first.untyped_storage()
    if end > storage.data_ptr() + storage.nbytes():
        return None
    elems = (end - first.data_ptr()) // first.element_size()
    return first.detach().as_strided((elems,), (1,), first.storage_offset())
