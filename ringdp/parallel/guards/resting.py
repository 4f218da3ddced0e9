"""Parameters while they rest, outside their unit's use: to use one is an error that names it.

Between uses (while it is used, see `computed`) a parameter is this rank's flat slice, and what
autograd made of it there would be wrong without a word. So while it is one, its class is `Sharded`,
which refuses whatever would record a graph. Reading under no_grad, as optimizers do, goes through
(of norms see `sliced`), and so do `backward(inputs=...)` and `autograd.grad`: see `Resting`. How
many dimensions it has is told of the whole, as scripts sort by them what decays.
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
from ringdp.parallel.guards.computed import Gathered, computing

P = ParamSpec("P")
R = TypeVar("R")


class Resting(nn.Parameter):
    """A parameter while another may compute in its place: to a backward that shall end there, it is
    that one, as no graph is made of it. See Note [masters apart] in `unit`."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        named = kwargs or {}
        if func is torch.autograd.backward and named.get("inputs"):
            named = named | {"inputs": [computing(t) for t in named["inputs"]]}
        if func is torch.autograd.grad:  # which passes outputs and inputs on as tuples
            args = (args[0], tuple(map(computing, args[1])))
        with torch._C.DisableTorchFunctionSubclass():
            try:
                return func(*args, **named)
            except RuntimeError as e:
                if cls is Resting and _mixes_dtypes(args, named):
                    raise _refusal(args, named, _AT_REST) from e
                raise


class Sharded(Resting):
    """A parameter while it is a slice."""

    _ringdp_guards = True  # see `sliced`

    def full_tensor(self) -> Tensor:
        """As of torch's DTensor. Collective."""
        return sliced.full(self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        run = super().__torch_function__
        if func in (torch.autograd.backward, torch.autograd.grad):
            return run(func, types, args, kwargs)
        if func in sliced.OF_ALL and not _records(args, kwargs):
            args, kwargs = tree_map_only(Sharded, Tensor.detach, (args, kwargs or {}))
            return func(*args, **kwargs)
        if func in _DIMENSIONS:
            return args[0]._ringdp_ndim
        if func in _ON_TRUST:
            raise _refusal(args, kwargs)
        try:
            out = run(func, types, args, kwargs)
        except (RuntimeError, IndexError) as e:  # the slice has another shape than the parameter
            raise _refusal(args, kwargs) from e
        if torch.is_grad_enabled() and any(
            isinstance(t, Tensor) and t.grad_fn is not None for t in _flat(out)
        ):
            raise _refusal(args, kwargs)
        if out is not None and func == _grad.__get__:
            sliced.read(out, args[0])
        elif type(out) is Tensor and args and isinstance(args[0], Sharded):
            sliced.part(out, args[0])
        return out


_grad: Any = Tensor.grad
_ndim: Any = Tensor.ndim
_DIMENSIONS = (Tensor.dim, Tensor.ndimension, _ndim.__get__)
# These take shapes on trust: the first reads past the slices; nn.init's orthogonal_ and eye_, which
# have asked for the dimensions alone, would write something else with the others.
_ON_TRUST = (torch._weight_norm, Tensor.view_as, torch.eye)


def _records(args: Any, kwargs: Any) -> bool:
    """Whether a graph would be made of this call."""
    with torch._C.DisableTorchFunctionSubclass():
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _mixes_dtypes(args: Any, kwargs: Any) -> bool:
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    return len({t.dtype for t in tensors if t.is_floating_point()}) > 1


_A_SLICE = (
    "is used outside the forward of its unit, where it is only this rank's flat slice. Read it, or "
    "evaluate the model, within full_parameters(); for an L2 term take the optimizer's "
    "weight_decay; where a module uses another's weight, let both lie in one unit; where it is "
    "called apart from the one around it, let it be a unit itself."
)
_AT_REST = (
    "is used as it is at rest, where it computes in another dtype: a module that keeps it, as in a "
    "list, keeps that one. Register it as a parameter of every module that uses it, or take it "
    "from there in the forward."
)


def _refusal(args: Any, kwargs: Any, why: str = _A_SLICE) -> UsageError:
    used = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Resting)]
    names = ", ".join(dict.fromkeys(getattr(t, "_ringdp_name", "a parameter") for t in used))
    return UsageError(f"{names} {why}")


def name(parameter: nn.Parameter, text: str) -> None:
    """What errors call it, which is whole yet."""
    parameter._ringdp_name = text  # type: ignore[attr-defined]
    parameter._ringdp_ndim = parameter.ndim  # type: ignore[attr-defined]


def guard(parameters: Sequence[nn.Parameter], into: type[Resting] = Sharded) -> None:
    """From now on they refuse to be used, or are Resting. Subclasses of a user's are left alone."""
    for p in parameters:
        if type(p) in (nn.Parameter, Gathered):
            p.__class__ = into


def release(parameters: Sequence[nn.Parameter], into: type[nn.Parameter] = nn.Parameter) -> None:
    """They are ordinary parameters again, or Gathered."""
    for p in parameters:
        if type(p) in (Resting, Sharded):
            p.__class__ = into


def unguarded(method: Callable[P, R]) -> Callable[P, R]:
    """Of the engine's own: to ask a `Resting` takes ten times as long elsewhere."""

    @wraps(method)
    def call(*args: P.args, **named: P.kwargs) -> R:
        with torch._C.DisableTorchFunctionSubclass():
            return method(*args, **named)

    return call


def _flat(out: Any) -> Sequence[Any]:
    return out if isinstance(out, tuple | list) else (out,)
