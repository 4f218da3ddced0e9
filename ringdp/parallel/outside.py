"""A parameter used outside its unit's forward: an error that names it.

Between uses a parameter is this rank's flat slice, and what autograd made of it there would be
wrong without a word. So while it is one, its class is `Sharded`, which refuses whatever would
record a graph. Reading under no_grad, as optimizers do, goes through; the model's state_dict, which
would be one of slices, does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ringdp.errors import UsageError
from ringdp.parallel import sliced
from ringdp.parallel.copies import Own


class Sharded(nn.Parameter):
    """A parameter while it is a slice."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        try:
            with torch._C.DisableTorchFunctionSubclass():
                out = func(*args, **(kwargs or {}))
        except RuntimeError as e:  # the slice has another shape than the parameter
            if torch.is_grad_enabled():
                raise _refusal(args, kwargs) from e
            raise
        if torch.is_grad_enabled() and any(
            isinstance(t, Tensor) and t.grad_fn is not None for t in _flat(out)
        ):
            raise _refusal(args, kwargs)
        if out is not None and func == _grad.__get__:
            sliced.read(out, args[0])
        return out


_grad: Any = Tensor.grad


def _refusal(args: Any, kwargs: Any) -> UsageError:
    used = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Sharded)]
    names = ", ".join(getattr(t, "_ringdp_name", "a parameter") for t in used)
    return UsageError(
        f"{names} is used outside the forward of its unit, where it is only this rank's flat "
        "slice. Use it within that forward; read it whole within full_parameters(); or choose "
        "units so that it lies in the one whose forward uses it."
    )


def guard_state(
    model: nn.Module, may_save: Callable[[], bool], may_load: Callable[[], bool], own: Own
) -> list[RemovableHandle]:
    """From now on state_dict and load_state_dict, of any of its modules, are refused unless the
    parameters are whole, and what is loaded is kept."""

    def refuse(what: str, allowed: bool, instead: str) -> None:
        if not allowed:
            raise UsageError(
                f"{what} of a sharded model: its parameters are this rank's flat slices{instead}"
            )

    save = ". Call it within full_parameters(), or use ringdp.save or ringdp.export."
    load = ", or only read. Call it within full_parameters(write=True), or use ringdp.load."
    handles: list[RemovableHandle] = []
    for module in model.modules():
        handles += [
            module.register_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                own(lambda *_: refuse("state_dict", may_save(), save))
            ),
            module.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                own(lambda *_: refuse("load_state_dict", may_load(), load))
            ),
        ]
    return handles


def name(parameter: nn.Parameter, text: str) -> None:
    """What errors call it."""
    parameter._ringdp_name = text  # type: ignore[attr-defined]


def guard(parameters: Sequence[nn.Parameter]) -> None:
    """From now on they refuse to be used. Subclasses of a user's are left alone."""
    for p in parameters:
        if type(p) is nn.Parameter:
            p.__class__ = Sharded


def release(parameters: Sequence[nn.Parameter]) -> None:
    """They are ordinary parameters again."""
    for p in parameters:
        if type(p) is Sharded:
            p.__class__ = nn.Parameter  # type: ignore[assignment]


def _flat(out: Any) -> Sequence[Any]:
    return out if isinstance(out, tuple | list) else (out,)
