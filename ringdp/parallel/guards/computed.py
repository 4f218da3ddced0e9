"""Parameters while their unit computes: what was gathered, and with masters apart others in their
place. See Note [masters apart] in `unit`.

What is written to them there, as by a constraint or a codebook in a forward, is lost: an error that
names them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Self

from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils.weak import WeakIdKeyDictionary

from ringdp.errors import UsageError


class Gathered(nn.Parameter):
    """Counts writes through `p.data` as others, so that they can be told."""

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        set_data(self, values)


class Computed(Gathered):
    """Where it has no gradient of its own, its master's is shown and set, and cleared with its own.
    It is frozen with its master, too.

    A model's zero_grad or requires_grad_, called between forward and backward, meets these.
    """

    _master: nn.Parameter | None = None  # a copy has none

    @classmethod
    def of(cls, master: nn.Parameter, values: Tensor) -> Self:
        made = cls(values.data, requires_grad=master.requires_grad)  # with a version of its own
        made._master = master
        _COMPUTED[master] = weakref.ref(made)
        return made

    @property
    def grad(self) -> Any:
        own = _grad.__get__(self)
        return self._master.grad if own is None and self._master is not None else own

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        own = self._master is None or _grad.__get__(self) is not None
        if own:
            _grad.__set__(self, value)
        if self._master is not None and (value is None or not own):
            self._master.grad = value

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
_COMPUTED: Any = WeakIdKeyDictionary()  # by master, weak references


def computing(master: Any) -> Any:
    """What computes in its place, if it is one."""
    made = _COMPUTED.get(master, lambda: None)()
    return master if made is None else made


def follow(
    computed: Sequence[nn.Parameter], masters: Sequence[nn.Parameter], versions: Sequence[int]
) -> list[int]:
    """They take the masters' values, of whose `versions` autograd may have saved some: it is told
    of newer ones, as of any write. Returns the versions now."""
    now = [p._version for p in masters]
    if list(versions) != now:
        increment_version(computed)
    for c, p in zip(computed, masters, strict=True):
        c.requires_grad_(p.requires_grad)
    return now


def refuse_lost(names: Sequence[str]) -> None:
    """Raises UsageError for parameters that were written to, if there are any."""
    if names:
        raise UsageError(
            f"written to while its unit computes: {', '.join(names)}. There it is a gathered copy, "
            "and what is written is lost. Write to it between steps, when it is this rank's slice, "
            "or within full_parameters(write=True); or keep such values in a buffer"
        )
