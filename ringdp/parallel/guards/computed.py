"""Parameters in their unit's forward and backward: views of the gathered buffer.

With masters apart they are other nn.Parameters (see Note [masters apart] in `unit`), registered in
the masters' places. What is written to any of them, as by a weight constraint in forward, would be
lost: an error names the parameter.

Their .grad is still that of the optimizer: a slice, or of the master's dtype. torch.compile would
copy it beside the parameter, which fails for another shape and skips the function for another
dtype, so it sees none.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

from torch import Tensor, nn
from torch._guards import TracingContext
from torch.utils.weak import WeakIdKeyDictionary

from ringdp.errors import UsageError


class WholeParam(nn.Parameter):
    """A parameter that is whole while its .grad is this rank's slice."""

    def full_tensor(self) -> Tensor:
        """A copy, as what a ShardedParam gathers."""
        return self.detach().clone()

    @property
    def grad(self) -> Any:
        return None if TracingContext.try_get() else _grad.__get__(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


class GatheredParam(WholeParam):
    """One in which writes through `p.data` increase _version, too."""

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        set_data(self, values)


class ComputeParam(GatheredParam):
    """Computes in the place of its master. Its .grad is its own or else the master's; it is cleared
    and frozen together with the master's.

    The model's zero_grad and requires_grad_ find these between forward and backward.
    """

    _master: nn.Parameter | None = None  # None in a copy

    @classmethod
    def of(cls, master: nn.Parameter, values: Tensor) -> Self:
        made = cls(values.data, requires_grad=master.requires_grad)  # with a version of its own
        made._master = master
        _COMPUTE_PARAMS[master] = weakref.ref(made)
        return made

    def full_tensor(self) -> Tensor:
        """The master's, in its dtype."""
        master: Any = self._master
        return super().full_tensor() if master is None else master.full_tensor()

    @property
    def grad(self) -> Any:
        if TracingContext.try_get():
            return None
        own = _grad.__get__(self)
        return self._master.grad if own is None and self._master is not None else own

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        own = self._master is None or _grad.__get__(self) is not None
        if own:
            _grad.__set__(self, value)
        if self._master is not None and (value is None or not own):
            self._master.grad = value

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def requires_grad(self) -> Any:
        return _requires_grad.__get__(self)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        super().requires_grad_(requires_grad)
        if self._master is not None:
            self._master.requires_grad_(requires_grad)
        return self


set_data: Any = Tensor.data.__set__  # type: ignore[attr-defined]
_grad: Any = Tensor.grad
_requires_grad: Any = Tensor.requires_grad
_COMPUTE_PARAMS: Any = WeakIdKeyDictionary()  # master -> weak reference to its ComputeParam


def computing(master: Any) -> Any:
    """Its ComputeParam if it has one, else itself."""
    made = _COMPUTE_PARAMS.get(master, lambda: None)()
    return master if made is None else made


def refuse_lost(names: Sequence[str]) -> None:
    """Raise UsageError if any parameters were written to while they computed."""
    if names:
        raise UsageError(
            f"written to while its unit computes: {', '.join(names)}. There it is a gathered copy, "
            "and what is written is lost. Write to it between steps, when it is this rank's slice, "
            "or within full_parameters(write=True); or keep such values in a buffer"
        )


class Place(NamedTuple):
    """Where a parameter is registered."""

    module: nn.Module
    name: str
    plain: bool  # the module has nn.Module's own __setattr__


def places(model: nn.Module) -> dict[nn.Parameter, list[Place]]:
    """Every parameter's places; a tied one has several."""
    found: dict[nn.Parameter, list[Place]] = {}
    for module in model.modules():
        plain = type(module).__setattr__ is nn.Module.__setattr__
        for name, p in module._parameters.items():
            if p is not None:
                found.setdefault(p, []).append(Place(module, name, plain))
    return found


def put(at: Sequence[Sequence[Place]], parameters: Sequence[nn.Parameter]) -> None:
    """Register each parameter in its places."""
    for where, parameter in zip(at, parameters, strict=True):
        for module, name, plain in where:
            if plain:
                module._parameters[name] = parameter  # setattr takes ten times as long
            else:  # a recurrent layer also keeps a list of its weights
                setattr(module, name, parameter)
