"""Parameters at rest, outside their unit's forward and backward: to use one is an error.

Between uses (see `computed` for the uses) a parameter is this rank's flat slice, and autograd would
silently compute something else with it. So its class is `ShardedParam` then, which raises an error
that names it for whatever would record a graph. Reads under no_grad, such as an optimizer's, go
through (for norms see `sliced`), as do `backward(inputs=...)` and `autograd.grad` (see
`RestingParam`). dim() is that of the whole parameter, since scripts choose weight decay by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ringdp.errors import UsageError
from ringdp.parallel.guards import sliced
from ringdp.parallel.guards.computed import GatheredParam, WholeParam, computing

P = ParamSpec("P")
R = TypeVar("R")


class RestingParam(nn.Parameter):
    """A master parameter while another one computes in its place: `backward(inputs=...)` and
    `autograd.grad` find that one instead. See Note [masters apart] in `unit`."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        named = kwargs or {}
        if func is torch.autograd.backward and named.get("inputs"):
            named = named | {"inputs": [computing(t) for t in named["inputs"]]}
        if func is torch.autograd.grad:  # its arguments are tuples by now
            args = (args[0], tuple(map(computing, args[1])))
        with torch._C.DisableTorchFunctionSubclass():
            try:
                return func(*args, **named)
            except RuntimeError as e:
                if cls is RestingParam and _mixes_dtypes(args, named):
                    raise _refusal(args, named, _AT_REST) from e
                raise


class ShardedParam(RestingParam):
    """A parameter that is this rank's slice."""

    _ringdp_guards = True  # see `sliced`

    def full_tensor(self) -> Tensor:
        """The whole parameter, as torch's DTensor.full_tensor. Collective."""
        return sliced.full_tensor(self, self)

    # Every zero_grad() reads and sets it, for which __torch_function__ takes 20 times as long.
    @property
    def grad(self) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            gradient = _grad.__get__(self)
        if gradient is not None:
            sliced.mark_grad(gradient, self)
        return gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        try:
            with torch._C.DisableTorchFunctionSubclass():
                _grad.__set__(self, value)
        except RuntimeError as e:
            if value is not None and value.shape == self.shape:  # it has another dtype, say
                raise
            raise _refusal([self], None) from e  # the slice has another shape than the parameter

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        run = super().__torch_function__
        if func in (torch.autograd.backward, torch.autograd.grad):
            return run(func, types, args, kwargs)
        if func in sliced.COLLECTIVE and not _records(args, kwargs):
            args, kwargs = tree_map_only(ShardedParam, Tensor.detach, (args, kwargs or {}))
            return func(*args, **kwargs)
        if func in _DIMENSIONS:
            return args[0]._ringdp_ndim
        if func in _UNCHECKED:
            raise _refusal(args, kwargs)
        try:
            out = run(func, types, args, kwargs)
        except (RuntimeError, IndexError, ValueError) as e:  # the slice has another shape
            raise _refusal(args, kwargs) from e
        if torch.is_grad_enabled() and any(
            isinstance(t, Tensor) and t.grad_fn is not None for t in _flat(out)
        ):
            raise _refusal(args, kwargs)
        if type(out) is Tensor and args and isinstance(args[0], ShardedParam):
            sliced.mark_values(out, args[0])
        return out


_OURS = (nn.Parameter, WholeParam, GatheredParam, RestingParam, ShardedParam)
_grad: Any = Tensor.grad
_ndim: Any = Tensor.ndim
_DIMENSIONS = (Tensor.dim, Tensor.ndimension, _ndim.__get__)
# These do not check shapes: _weight_norm would read past the slice; nn.init's orthogonal_ and eye_,
# which check only dim(), would fill it wrongly with the others.
_UNCHECKED = (torch._weight_norm, Tensor.view_as, torch.eye)


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    return [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]


def _records(args: Any, kwargs: Any) -> bool:
    """Whether autograd would record this call."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.is_grad_enabled() and any(t.requires_grad for t in _tensors(args, kwargs))


def _mixes_dtypes(args: Any, kwargs: Any) -> bool:
    return len({t.dtype for t in _tensors(args, kwargs) if t.is_floating_point()}) > 1


_A_SLICE = (
    "is used outside the forward of its unit, or after close() or a full_parameters() that ended "
    "within it, where it is only this rank's flat slice. Read it, or evaluate the model, within "
    "full_parameters(), entered outside of the forward, and change it within "
    "full_parameters(write=True); for an L2 term take the "
    "optimizer's weight_decay; where a module uses another's weight, let both lie in one unit; "
    "where it is called apart from the one around it, let it be a unit itself, or, after "
    "fully_shard, call its unshard() first."
)
_AT_REST = (
    "is used as it is at rest, where it computes in another dtype. Where a module uses another's "
    "weight, let both lie in one unit. A module that keeps it, as in a list, keeps it at rest: "
    "register it as a parameter of every module that uses it, or take it from there in the forward."
)


def _refusal(args: Any, kwargs: Any, why: str = _A_SLICE) -> UsageError:
    used = [t for t in _tensors(args, kwargs) if isinstance(t, RestingParam)]
    names = ", ".join(dict.fromkeys(getattr(t, "_ringdp_name", "a parameter") for t in used))
    return UsageError(f"{names} {why}")


def name(parameter: nn.Parameter, text: str) -> None:
    """Store the name and the dimensions of a parameter that is still whole."""
    parameter._ringdp_name = text  # type: ignore[attr-defined]
    parameter._ringdp_ndim = parameter.ndim  # type: ignore[attr-defined]


def become(parameters: Sequence[nn.Parameter], kind: type[nn.Parameter]) -> None:
    """Change their class to `kind`. The user's own subclasses are left alone."""
    for p in parameters:
        if type(p) in _OURS:
            p.__class__ = kind


def unguarded(method: Callable[P, R]) -> Callable[P, R]:
    """A method of the engine's in which a guarded parameter is read without __torch_function__,
    which takes ten times as long."""

    @wraps(method)
    def call(*args: P.args, **named: P.kwargs) -> R:
        with torch._C.DisableTorchFunctionSubclass():
            return method(*args, **named)

    return call


def _flat(out: Any) -> Sequence[Any]:
    return out if isinstance(out, tuple | list) else (out,)
