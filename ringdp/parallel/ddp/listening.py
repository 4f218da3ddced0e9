"""What autograd calls for a reducer: hooks that do not keep it alive, and what ends a backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ringdp.errors import ModelError


class Listens(Protocol):
    def made(self, index: int) -> None:
        """A part of that parameter's gradient has been added to p.grad."""

    def end_later(self) -> None:
        """A backward has come to what forward returned."""


def listener(ref: weakref.ref[Listens], index: int) -> Callable[..., None]:
    """A hook that does not keep the reducer alive."""

    def made(*_: object) -> None:
        reducer = ref()
        if reducer is not None:
            reducer.made(index)

    return made


def raiser(error: Exception) -> Callable[[], None]:
    """Of a reduction that could not begin. It is told at backward's end, as of one that fails
    later: where this backward is about to raise an error of the user's own, as it did on a rank
    that has left for it, that error is heard."""

    def end() -> None:
        raise error

    return end


def enders(ref: weakref.ref[Listens], outputs: Iterable[Tensor]) -> list[RemovableHandle]:
    """Hang hooks on what forward returns. Given are those that no graph takes with it: of leaves,
    such as parameters."""

    def end(_: Tensor) -> None:
        reducer = ref()
        if reducer is not None:
            reducer.end_later()

    trained = [t for t in outputs if t.requires_grad]
    handles = [t.register_hook(end) for t in trained]  # type: ignore[no-untyped-call]
    return [handle for t, handle in zip(trained, handles, strict=True) if t.is_leaf]


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
