"""A reducer's hooks on autograd, which do not keep the reducer alive; and torch's, for optimizers
that step in backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ringdp.errors import ModelError


class Listener(Protocol):
    def made(self, index: int) -> None:
        """A gradient, or a part of one, has been added to that parameter's p.grad."""

    def end_later(self) -> None:
        """A backward has reached an output of forward."""


class GradHooks:
    def __init__(self, reducer: Listener, parameters: Sequence[nn.Parameter]) -> None:
        self._reducer, self._parameters = weakref.ref(reducer), parameters
        # Of each parameter its gradient accumulator, which torch does not keep alive, and the hook.
        self._hooked: dict[int, tuple[Any, RemovableHandle]] = {}
        self._leaves: list[RemovableHandle] = []
        self.listen()

    def listen(self) -> None:
        """Add hooks to gradient accumulators that have none: a parameter whose dtype has changed
        has a new one."""
        for index, p in enumerate(self._parameters):
            trained = p.requires_grad
            node = get_gradient_edge(p.requires_grad_()).node
            p.requires_grad_(trained)  # a copy may be frozen before its first forward
            if index not in self._hooked or node is not self._hooked[index][0]:
                handle = node.register_hook(partial(_made, self._reducer, index))
                self._hooked[index] = node, handle

    def hears(self, index: int) -> bool:
        with torch._C._DisableFuncTorch():  # a transform's views have no grad_fn that leads here
            return get_gradient_edge(self._parameters[index]).node is self._hooked[index][0]

    def listen_to(self, outputs: Iterable[Tensor]) -> None:
        """Add hooks to the outputs of forward, until `let_go`."""
        ref = self._reducer

        def end(_: Tensor) -> None:
            if (reducer := ref()) is not None:
                reducer.end_later()

        for t in outputs:
            if t.requires_grad:
                handle = t.register_hook(end)  # type: ignore[no-untyped-call]
                if t.is_leaf:  # such as a parameter: the hook does not go with a graph
                    self._leaves.append(handle)

    def let_go(self) -> None:
        while self._leaves:
            self._leaves.pop().remove()

    def remove(self) -> None:
        for _, handle in self._hooked.values():
            handle.remove()


def _made(ref: weakref.ref[Listener], index: int, *_: object) -> None:
    if (reducer := ref()) is not None:
        reducer.made(index)


def take_off_optimizers(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Remove the hooks of torch's _apply_optimizer_in_backward, which step a parameter's optimizer
    once its gradient is accumulated, before it is reduced. Returns the parameters with such
    optimizers."""
    found = [p for p in parameters if hasattr(p, "_in_backward_optimizers")]
    if found:  # whoever made them has imported this; it takes 1.5 s
        from torch.distributed.optim.apply_optimizer_in_backward import (
            param_to_optim_hook_handle_map as handles,
        )

        for p in found:
            for handle in handles.get(p, ()):  # type: ignore[no-untyped-call]
                handle.remove()
    return found


def raiser(error: Exception) -> Callable[[], None]:
    """For a reduction that could not start: raises at the end of backward, like one that fails
    later. So an error of the user's own, which this backward may be about to raise as it did on the
    rank that failed, comes first."""

    def end() -> None:
        raise error

    return end


def distributed_autograd_error() -> ModelError | None:
    """The error to raise if no gradient came because distributed autograd keeps them. (Of what is
    raised in a hook it would show no text.)"""
    try:
        backwards = torch._C._distributed_autograd._get_debug_info()
    except (AttributeError, RuntimeError):  # it is not there, or not begun
        return None
    if not int(backwards["num_current_backward_passes"]):
        return None
    return ModelError(
        "distributed autograd keeps gradients in its context, and p.grad None, where "
        "DistributedDataParallel finds nothing to reduce: call loss.backward() instead of "
        "torch.distributed.autograd.backward(), or reduce what get_gradients() gives"
    )
