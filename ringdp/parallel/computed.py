"""The parameters that compute in their masters' place. See Note [masters apart] in `unit`."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor, nn


class Computed(nn.Parameter):
    """Where it has no gradient of its own, it shows its master's, and clears that with its own.

    A model's zero_grad, called between forward and backward, meets these.
    """

    _master: nn.Parameter | None = None  # a copy has none

    @classmethod
    def of(cls, master: nn.Parameter, values: Tensor) -> Self:
        made = cls(values.data, requires_grad=master.requires_grad)  # with a version of its own
        made._master = master
        return made

    @property
    def grad(self) -> Any:
        own = _grad.__get__(self)
        return self._master.grad if own is None and self._master is not None else own

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _grad.__set__(self, value)
        if value is None and self._master is not None:
            self._master.grad = None


_grad: Any = Tensor.grad
