"""Optimizers that step in backward, by torch's _apply_optimizer_in_backward.

A parameter's own optimizer steps once its gradient is averaged; then p.grad is None. torch's hooks
step it when the gradient is accumulated, which is before it is reduced: they are removed.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def taken_off(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Remove torch's hooks. Returns the parameters that have such optimizers."""
    found = [p for p in parameters if hasattr(p, "_in_backward_optimizers")]
    if found:  # whoever made them has imported this; it takes 1.5 s
        from torch.distributed.optim.apply_optimizer_in_backward import (
            param_to_optim_hook_handle_map as handles,
        )

        for p in found:
            for handle in handles.get(p, ()):  # type: ignore[no-untyped-call]
                handle.remove()
    return found


def step(parameters: Iterable[nn.Parameter]) -> None:
    for p in parameters:
        for optimizer in p._in_backward_optimizers:  # type: ignore[attr-defined]
            optimizer.step()
        p.grad = None
