"""Materializes models built on the meta device, unit by unit, just before each unit is sharded.

So only about one unit is whole at any time. A module's parameters and buffers are allocated
together, on the device that the communicator works on, and filled by `init(module)`, by default its
`reset_parameters()`, which torch's layers have. Every rank draws values; rank 0's count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import nan

import torch
from torch import nn

from ringdp.errors import UsageError

Init = Callable[[nn.Module], object]


def check(model: nn.Module, init: Init | None) -> None:
    """Raise UsageError, with their names, for modules that cannot be filled."""
    if init is not None:
        return
    stuck = [
        f"{name or 'the model'} ({type(m).__name__})"
        for name, m in model.named_modules()
        if _own(m) and not callable(getattr(m, "reset_parameters", None))
    ]
    if stuck:
        raise UsageError(
            f"on the meta device and without reset_parameters: {', '.join(stuck)}; write one, or "
            "pass init=, a function that fills a module's own parameters and buffers, or does "
            "nothing where a checkpoint is loaded next (to FullyShardedDataParallel torch's "
            "param_init_fn=)"
        )


def fill(
    within: nn.Module,
    tensors: Iterable[torch.Tensor],
    init: Init | None,
    device: torch.device,
) -> None:
    """Allocate and fill, on `device`, every module in `within` that has one of these, parameters or
    buffers."""
    wanted = {t for t in tensors if t.is_meta}
    for module in list(within.modules()) if wanted else ():
        if any(t in wanted for t in _own(module)):
            _fill(module, init, device)


def _own(module: nn.Module) -> list[torch.Tensor]:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return [t for t in own if t.is_meta]


def _fill(module: nn.Module, init: Init | None, device: torch.device) -> None:
    if isinstance(module, nn.RNNBase):
        module._flat_weight_refs = []  # no tensor with weak references can be swapped
    for t in _own(module):
        made = torch.empty_like(t, device=device)
        if made.is_floating_point():
            made.fill_(nan)  # what `init` leaves out, such as buffers, must not pass for values
        if isinstance(t, nn.Parameter):
            made = nn.Parameter(made, t.requires_grad)
        torch.utils.swap_tensors(t, made)  # type: ignore[no-untyped-call]  # the object stays: ties and optimizers hold it
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()
    with torch.no_grad():
        if init is not None:
            init(module)
        else:
            module.reset_parameters()  # type: ignore[operator]
