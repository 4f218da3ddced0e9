"""AdamW that steps neighbours in memory as one: a unit's flat shard in one pass.

The engine lays a unit's slices out one behind the other, and so does this optimizer with its state;
parameters of any other model are stepped as they lie. An element's bits depend on its own values
only (see `kernels.adamw`), so they are the same in every stage, for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ringdp.errors import UsageError
from ringdp.kernels import adamw


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW's arguments and state; float32 parameters (Precision lets them compute in
    another dtype). Leaves out amsgrad and maximize."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        if lr < 0 or eps < 0 or weight_decay < 0 or not all(0 <= b < 1 for b in betas):
            raise UsageError(
                f"AdamW(lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}): allowed: "
                "nothing below 0, and betas below 1"
            )
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))  # noqa: C408

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step on every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for run in self._runs(group["params"]):
                self._step(run, group)
        return loss

    def _runs(self, parameters: Iterable[Tensor]) -> list[list[Tensor]]:
        """Parameters with gradients, cut where one does not follow the other everywhere."""
        runs: list[list[Tensor]] = []
        last = None
        for p in parameters:
            if p.grad is None or not p.numel():
                continue
            _check(p)
            ends = p.data_ptr(), p.grad.data_ptr(), self.state[p].get("step")
            if last is None or not _follows(last, ends):
                runs.append([])
            runs[-1].append(p)
            size = p.numel() * p.element_size()
            last = ends[0] + size, ends[1] + size, ends[2]
        return runs

    def _step(self, run: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[p] for p in run]
        for state in states:
            state["step"] = state["step"] + 1 if "step" in state else torch.ones(())
        sizes = [p.numel() for p in run]
        adamw(
            _joined(run),
            _joined([p.grad for p in run if p.grad is not None]),
            *(self._moment(key, run, sizes) for key in ("exp_avg", "exp_avg_sq")),
            step=int(states[0]["step"].item()),
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )
        increment_version(run)  # neighbours have counters of their own

    def _moment(self, key: str, run: list[Tensor], sizes: list[int]) -> Tensor:
        """The run's moments, one behind the other; each parameter's state is a view."""
        have = [self.state[p].get(key) for p in run]
        first = have[0]
        if first is not None and _adjoin(have):
            return _joined(have)
        flat = torch.zeros(sum(sizes), dtype=torch.float32, device=run[0].device)
        for p, old, part in zip(run, have, torch.split(flat, sizes), strict=True):
            self.state[p][key] = part.view(p.shape)
            if old is not None:
                self.state[p][key].copy_(old)
        return flat


def _check(p: Tensor) -> None:
    assert p.grad is not None
    for x, what in ((p, "a parameter"), (p.grad, "a gradient")):
        if x.dtype != torch.float32 or not x.is_contiguous():
            raise UsageError(
                f"ringdp.AdamW found {what} that is {x.dtype}{list(x.shape)} with strides "
                f"{x.stride()}; allowed: contiguous float32. Let a float32 model compute in "
                "another dtype by shard(precision=Precision(param=...))"
            )


def _follows(last: tuple[int, int, Any], ends: tuple[int, int, Any]) -> bool:
    """Whether parameter and gradient begin where the last ones end, after as many steps."""
    a, b = last[2], ends[2]
    steps = (a is None) == (b is None) and (a is None or bool(a == b))
    return last[:2] == ends[:2] and steps


def _adjoin(tensors: list[Any]) -> bool:
    end = tensors[0].data_ptr()
    for t in tensors:
        if t is None or t.data_ptr() != end or not t.is_contiguous():
            return False
        end += t.numel() * t.element_size()
    return True


def _joined(tensors: list[Tensor]) -> Tensor:
    """Neighbours in one storage as one flat tensor."""
    first = tensors[0].detach()
    if len(tensors) == 1:
        return first.view(-1)
    return first.as_strided((sum(t.numel() for t in tensors),), (1,), first.storage_offset())
