"""Optimizers that step in backward, those of torch's _apply_optimizer_in_backward.

A parameter's own steps once its gradient is the average; then p.grad is None. torch hangs them on
the gradient's coming, which is before it is reduced: there they are taken off.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def taken_off(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Those that have such optimizers, which from now on step in `step` only."""
    found = [p for p in parameters if hasattr(p, "_in_backward_optimizers")]
    if found:  # who has made them has imported it already; it takes 1.5 s
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
