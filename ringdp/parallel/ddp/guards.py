"""Finds gradients that would not be reduced, or twice, so that ranks would silently diverge.

    another parameter      from load_state_dict(assign=True), or a layer put in another's place
    another accumulator    autograd makes one for a parameter that was cast: net.double()
    compiled autograd      runs a trace instead of hooks
    a DDP within another   the hooks of both get the same gradients

In the first two cases torch's DDP trains on with each rank's own gradients. They are checked in the
first forward, and in a forward if no gradient has reached the hooks since the one before.

Of nested DDPs the outermost one that reduces does so alone. In torch each reduces a copy of its
own. Here p.grad is the bucket's memory, and the outer DDP would reduce again what the inner one is
reducing.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel as _Torchs

from ringdp.errors import ModelError
from ringdp.parallel.ddp.arguments import Trainable
from ringdp.parallel.ddp.reducer import Reducer

SHOWN = 3  # names in an error


class _Here(threading.local):
    ddp: Any = None  # the innermost of ours whose forward this thread runs


_here = _Here()


def check_parameters(model: nn.Module, reducer: Reducer) -> None:
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


def around() -> Any:
    """The DDP in whose forward this thread is, or None. torch's variable is of all threads."""
    active: Any = _Torchs._active_ddp_module
    return _here.ddp if active is None or _is_ours(active) else active


@contextmanager
def forward_of(ddp: Any) -> Iterator[None]:
    """This thread runs `ddp`'s forward, which torch.compile must hear of."""
    before, outer = _here.ddp, around()
    _here.ddp = _Torchs._active_ddp_module = ddp
    try:
        yield
    finally:
        _here.ddp, _Torchs._active_ddp_module = before, outer


def _is_ours(ddp: Any) -> bool:
    return hasattr(ddp, "_trainable")


def trains(outer: Any, trainable: Sequence[Trainable]) -> bool:
    """Whether `outer`, in whose forward another DDP is called, trains that one's parameters too.

    Raises ModelError if each would have gradients of its own to reduce besides shared ones, or if
    `outer` is torch's.
    """
    mine = [t for t in trainable if t.parameter.requires_grad]
    ours = _is_ours(outer)
    theirs = {t.parameter for t in outer._trainable} if ours else {*outer._module_parameters}
    both = [t.name for t in mine if t.parameter in theirs]
    if both and not (ours and len(both) == len(mine)):
        some = ", ".join(both[:SHOWN]) + f" and {len(both) - SHOWN} more" * (len(both) > SHOWN)
        raise ModelError(
            f"a DistributedDataParallel is called within another, a {type(outer)}, and both would "
            f"reduce {some}: take one alone, as where a library wraps the model once more; or "
            "ringdp's for both, and let the outer one train all of the inner one's parameters, or "
            "none of them"
        )
    return bool(both)
