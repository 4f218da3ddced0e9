"""Whether torch is running a backward, a partial backward, a transform of torch.func, or a call."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType

import torch
from torch import nn

from ringdp.errors import UsageError


def in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def leaves_some_out() -> bool:
    """Whether the running backward, seen from its current node, does not reach all nodes below: it
    is one of `autograd.grad`, or has `inputs=`."""
    found = [torch._C._current_autograd_node()]
    known = set(found)
    while found:
        node = found.pop()
        try:
            if not torch._C._will_engine_execute_node(node):
                return True
        except RuntimeError:  # an input of autograd.grad
            return True
        below = {n for n, _ in node.next_functions if n is not None} - known
        known |= below
        found += below
    return False


def transformed(are_whole: Callable[[], bool]) -> bool:
    """Whether torch.func transforms the model's call. Its tensors have no memory, so nothing can be
    gathered or reduced: parameters must be whole, else raises UsageError."""
    active = bool(torch._C._are_functorch_transforms_active())
    if active and not are_whole():
        raise UsageError(
            "a transform of torch.func (grad, vmap, jvp, ...) calls a sharded model, whose units "
            "cannot be gathered there. Call it within full_parameters(), or use torch.autograd"
        )
    return active


def calls_of(module: nn.Module, frame: FrameType | None) -> int:
    """How many calls of the module are on the stack that ends in `frame`."""
    calls = 0
    while frame is not None:
        calls += frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls
