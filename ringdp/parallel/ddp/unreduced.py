"""Gradients that no reducer would hear of, so that ranks would train apart without a word.

    another parameter   load_state_dict(assign=True), or a layer put in another's place
    another node        autograd makes one for a parameter that has been cast: net.double()
    compiled autograd   runs what it has traced instead of hooks

torch's DDP trains on with each rank's own gradients in the first two. Looked for in the first
forward, and in one before which no gradient has been heard of: else there is no need to.
"""

from __future__ import annotations

import sys

from torch import nn

from ringdp.errors import ModelError
from ringdp.parallel.ddp.reducer import Reducer


def check(model: nn.Module, reducer: Reducer) -> None:
    """Raise ModelError for a parameter that the model trains in the place of one given to DDP."""
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
