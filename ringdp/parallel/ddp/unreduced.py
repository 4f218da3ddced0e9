"""Finds gradients that would miss the reducer's hooks, so that ranks would silently diverge.

    another parameter     from load_state_dict(assign=True), or a layer put in another's place
    another accumulator   autograd makes one for a parameter that was cast: net.double()
    compiled autograd     runs a trace instead of hooks

In the first two cases torch's DDP trains on with each rank's own gradients. Checked in the first
forward, and in a forward if no gradient has reached the hooks since the one before.
"""

from __future__ import annotations

import sys

from torch import nn

from ringdp.errors import ModelError
from ringdp.parallel.ddp.reducer import Reducer


def check(model: nn.Module, reducer: Reducer) -> None:
    """Raise ModelError if a trained parameter is not the one given to DDP, or was cast since."""
    now = dict(model.named_parameters(remove_duplicate=False))
    for index, (name, given, _) in enumerate(reducer.parameters):
        p = now.get(name)
        if isinstance(p, nn.Parameter) and p is not given:
            raise ModelError(
                f"{name} is another parameter than when DistributedDataParallel was made, as after "
                "load_state_dict(assign=True): its gradient would not be reduced. Change the model "
                "first, and wrap it then"
            )
        follows = reducer.mixed_precision.dtype is not None  # every cast
        if p is given and p.requires_grad and not (follows or reducer.grad_hooks.hears(index)):
            raise ModelError(
                f"{name} has been cast since DistributedDataParallel was made, and is now of "
                f"{p.dtype}: its gradient would not be reduced. Cast the model first, and wrap it "
                "then"
            )


def check_autograd() -> None:
    """Raise ModelError where compiled autograd is on."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(compiled, "compiled_autograd_enabled", False):
        raise ModelError(
            "Compiled autograd is not compatible with DistributedDataParallel: no hook hears of a "
            "gradient there. Leave torch._dynamo.config.compiled_autograd False; torch.compile of "
            "the model is fine"
        )
