"""A sharded parameter and its gradient, as the user reads them: this rank's slice, whose norm is
the whole one's.

So torch's own clip_grad_norm_ and GradScaler, and norms that are logged, come to what they would be
in one process, as with FSDP2's DTensors. A norm, and GradScaler's look for what is not finite, are
therefore collective: every rank must take them, of the same parameters. All else is of the slice.
`ringdp.clip_grad_norm_` takes one collective where torch's takes one for each parameter.

A gradient is `Sliced` from the end of its backward, or once it has been read from a parameter
between steps, and so is what has its shape and is made of it (`p.grad.detach()`); what is made of
the parameter (`p.data`) is a `Part`. An optimizer that steps finds plain tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils.weak import WeakIdKeyDictionary

from ringdp.comm import Communicator
from ringdp.errors import UsageError
from ringdp.parallel.cut import Slices


class Whole(Protocol):
    """Who has the other slices: an engine."""

    comm: Communicator

    @property
    def units(self) -> Sequence[Slices]: ...

    def check_reduced(self, what: str) -> None: ...


_WHOLES: Any = WeakIdKeyDictionary()  # parameter -> a weak reference to its Whole


class Sliced(Tensor):
    """A slice of a gradient."""

    _ringdp_whole: weakref.ref[Whole]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        if any(getattr(t, "_ringdp_guards", False) for t in types):
            return NotImplemented  # it comes next, and knows whether a graph would be made
        with torch._C.DisableTorchFunctionSubclass():
            if func in OF_ALL:
                return OF_ALL[func](*args, **(kwargs or {}))
            first = args[0] if args else None
            if func in _LEAVE and isinstance(first, Sliced):
                return func(first.as_subclass(Tensor), *args[1:], **(kwargs or {}))
            out = func(*args, **(kwargs or {}))
            if type(out) is Tensor and isinstance(first, Sliced) and out.shape == first.shape:
                _mark(out, first._ringdp_whole, type(first))
            return out


class Part(Sliced):
    """A slice of a parameter's values."""


def belong(parameters: Iterable[nn.Parameter], whole: Whole) -> None:
    """From now on what is read as their gradients is sliced."""
    reference = weakref.ref(whole)
    for p in parameters:
        _WHOLES[p] = reference


def wholes(parameters: Iterable[Tensor]) -> list[Any]:
    """Of those that are slices, who has the others, each once; None: it is gone."""
    references = {id(whole): whole for p in parameters if (whole := _WHOLES.get(p))}
    return [whole() for whole in references.values()]


def read(gradient: Tensor, parameter: nn.Parameter) -> None:
    """The user gets it from the parameter, which is a slice."""
    if type(gradient) is Tensor and (whole := _WHOLES.get(parameter)):
        _mark(gradient, whole)


def part(values: Tensor, parameter: nn.Parameter) -> None:
    """They are made of the parameter, which is a slice."""
    with torch._C.DisableTorchFunctionSubclass():
        if values.shape == parameter.shape and parameter in _WHOLES:
            _mark(values, _WHOLES[parameter], Part)


def full(parameter: nn.Parameter) -> Tensor:
    """Of a slice all there is. Collective."""
    if (whole := _WHOLES[parameter]()) is None:
        raise UsageError("full_tensor(), but the engine that has the other slices is gone")
    with torch._C.DisableTorchFunctionSubclass():
        own = parameter.detach()
    places = ((u, at) for u in whole.units for at, p in enumerate(u.parameters) if p is parameter)
    unit, at = next(places)
    parts = [unit.plan.part(unit.plan.entries[at], rank) for rank in range(whole.comm.size)]
    out = own.new_empty(unit.plan.entries[at].elements)
    whole.comm.all_gather_v(out, own, [end - begin for begin, end in parts], tag=unit.index)
    return out.view(unit.cut.shapes[at])


Emptied = list[tuple[nn.Parameter, Tensor]]  # whose gradients have no elements, and these


def release(parameters: Iterable[nn.Parameter]) -> Emptied:
    """An optimizer is about to step them: their gradients are plain, and no slice is empty. Returns
    what has been taken off for that."""
    emptied: Emptied = []
    for p in parameters:
        if isinstance(p.grad, Sliced):
            p.grad.__class__ = Tensor  # type: ignore[assignment]
        if p.grad is not None and not p.numel():
            emptied.append((p, p.grad.new_empty(0)))  # which holds no memory
            p.grad = None  # else it would keep a state for it
    return emptied


def restore(emptied: Emptied) -> None:
    """It has stepped: every rank has gradients of the same parameters again, for their norms."""
    while emptied:
        p, gradient = emptied.pop()
        increment_version(p)  # as on ranks where it is not empty
        if p.grad is None:
            p.grad = gradient


def _mark(tensor: Tensor, whole: weakref.ref[Whole], into: type[Sliced] = Sliced) -> None:
    tensor.__class__ = into
    tensor._ringdp_whole = whole  # type: ignore[attr-defined]


def _wholes(tensors: Sequence[Tensor], what: str) -> dict[Whole, list[int]]:
    """Who has the others of which of the tensors."""
    found: dict[Whole, list[int]] = {}
    for at, t in enumerate(tensors):
        if isinstance(t, Sliced):
            if (whole := t._ringdp_whole()) is None:
                raise UsageError(f"{what}, but the engine that has the other slices is gone")
            found.setdefault(whole, []).append(at)
    for whole, places in found.items():
        if not all(isinstance(tensors[at], Part) for at in places):
            whole.check_reduced(what)
    return found


# ---- of all slices: torch's functions, by their signatures


def _norms(tensors: Sequence[Tensor], given: Any, dtype: torch.dtype | None) -> list[Tensor]:
    order = float({None: 2, "fro": 2, "nuc": 0}.get(given, given))
    if not order > 0:
        raise UsageError(f"the norm of order {given!r} of a sharded tensor; allowed: above 0")
    out = [
        t if isinstance(t, Sliced) else torch.linalg.vector_norm(t, order, dtype=dtype)
        for t in tensors
    ]
    for whole, places in _wholes(tensors, "the norm of gradients is taken").items():
        mine = torch.zeros(len(places), dtype=torch.float64)
        for i, at in enumerate(places):
            if tensors[at].numel():
                mine[i] = torch.linalg.vector_norm(tensors[at], order, dtype=torch.float64)
        every = torch.empty(whole.comm.size * len(places), dtype=torch.float64)
        whole.comm.all_gather(every, mine)
        norms = torch.linalg.vector_norm(every.view(-1, len(places)), order, dim=0)
        for at, norm in zip(places, norms, strict=True):
            out[at] = norm.to(tensors[at].device, dtype or tensors[at].dtype)
    return out


def _foreach_norm(
    tensors: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None
) -> list[Tensor]:  # fmt: skip
    return _norms(tensors, ord, dtype)


def _norm(
    tensor: Tensor,
    p: Any = None,
    dim: Any = None,
    keepdim: bool = False,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    ord: Any = None,
) -> Tensor:
    if keepdim or out is not None or dim not in (None, 0, -1, (0,), [0]):
        raise UsageError(
            f"the norm of a sharded tensor with dim={dim}, keepdim={keepdim} or out: it is this "
            "rank's flat slice; allowed: the norm of all of it"
        )
    return _norms([tensor], p if ord is None else ord, dtype)[0]


def _linalg_norm(tensor: Tensor, ord: Any = None, **others: Any) -> Tensor:
    if ord is not None:
        raise UsageError(
            f"torch.linalg.norm(ord={ord}) of a sharded tensor: of a matrix it is another norm "
            "than of its slice; allowed: None, or torch.linalg.vector_norm"
        )
    return _norm(tensor, **others)


def _unscale(tensors: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    wholes = _wholes(tensors, "gradients are unscaled")
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, inv_scale)
    for whole in wholes:
        found = found_inf.cpu().view(1)
        whole.comm.all_reduce(found, "max")
        found_inf.copy_(found.view(found_inf.shape))


OF_ALL: dict[Any, Callable[..., Any]] = {
    torch._foreach_norm: _foreach_norm,
    torch.linalg.vector_norm: _norm,
    torch.linalg.norm: _linalg_norm,
    torch.norm: _norm,
    Tensor.norm: _norm,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
}
_LEAVE = {Tensor.__deepcopy__, Tensor.__reduce_ex__}  # what makes a tensor that knows no engine
