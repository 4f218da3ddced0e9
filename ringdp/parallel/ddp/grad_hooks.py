"""What autograd calls for a reducer: hooks that do not keep it alive, and what ends a backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ringdp.errors import ModelError


class Listener(Protocol):
    def made(self, index: int) -> None:
        """A part of that parameter's gradient has been added to p.grad."""

    def end_later(self) -> None:
        """A backward has come to what forward returned."""


class GradHooks:
    """The hooks of one reducer."""

    def __init__(self, reducer: Listener, parameters: Sequence[nn.Parameter]) -> None:
        self._reducer, self._parameters = weakref.ref(reducer), parameters
        self._nodes: dict[int, Any] = {}  # torch keeps one, and its hooks, only as long as others
        self._handles: list[RemovableHandle] = []
        self._leaves: list[RemovableHandle] = []
        self.listen()

    def listen(self) -> None:
        """To gradients of the parameters as they are now: another dtype is made by another node."""
        for index, p in enumerate(self._parameters):
            trained = p.requires_grad
            node = get_gradient_edge(p.requires_grad_()).node
            p.requires_grad_(trained)  # a copy may be frozen before its first forward
            if node is not self._nodes.get(index):
                self._handles.append(node.register_hook(_listener(self._reducer, index)))
                self._nodes[index] = node

    def hears(self, index: int) -> bool:
        return get_gradient_edge(self._parameters[index]).node is self._nodes[index]

    def listen_to(self, outputs: Iterable[Tensor]) -> None:
        """To gradients of what forward returns, until `let_go`."""
        ref = self._reducer

        def end(_: Tensor) -> None:
            if (reducer := ref()) is not None:
                reducer.end_later()

        for t in outputs:
            if t.requires_grad:
                handle = t.register_hook(end)  # type: ignore[no-untyped-call]
                if t.is_leaf:  # such as a parameter: no graph takes the hook with it
                    self._leaves.append(handle)

    def let_go(self) -> None:
        while self._leaves:
            self._leaves.pop().remove()

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()


def _listener(ref: weakref.ref[Listener], index: int) -> Callable[..., None]:
    def made(*_: object) -> None:
        if (reducer := ref()) is not None:
            reducer.made(index)

    return made


def raiser(error: Exception) -> Callable[[], None]:
    """Of a reduction that could not begin. It is told at backward's end, as of one that fails
    later: where this backward is about to raise an error of the user's own, as it did on a rank
    that has left for it, that error is heard."""

    def end() -> None:
        raise error

    return end


def kept() -> ModelError | None:
    """Where no gradient has come because distributed autograd keeps them. It says nothing of what
    is raised in a hook but that it was a Python error."""
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
