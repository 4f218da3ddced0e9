"""Whether torch.func transforms the model's call. Tensors have no memory then, so nothing can be
gathered or reduced: whole parameters are used as they are, others are refused."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ringdp.errors import UsageError


def transformed(are_whole: Callable[[], bool]) -> bool:
    """Raises UsageError if it does so while parameters are not whole."""
    active = bool(torch._C._are_functorch_transforms_active())
    if active and not are_whole():
        raise UsageError(
            "a transform of torch.func (grad, vmap, jvp, ...) calls a sharded model, whose units "
            "cannot be gathered there. Call it within full_parameters(), or use torch.autograd"
        )
    return active
