"""Tensor subclasses for this rank's slices: their norm is that of the whole tensor, over all ranks.

So torch's own clip_grad_norm_ and GradScaler, and logged norms, give what they would give in one
process, as with FSDP2's DTensors. A norm, and GradScaler's check for inf and NaN, are therefore
collective: every rank must take them, of the same parameters. Everything else applies to the slice.
(`ringdp.clip_grad_norm_` takes one collective; torch's takes one for each parameter.)

A p.grad is a `Slice` from the end of backward on, or once it has been read between steps, and so is
a tensor of the same shape made from it, such as `p.grad.detach()`. A tensor made from a parameter,
such as `p.data`, is a `ParamSlice`. While an optimizer steps, both are plain tensors.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ringdp.errors import UsageError
from ringdp.parallel.cut import SliceOwner

_OWNERS: Any = WeakIdKeyDictionary()  # parameter -> weak reference to its SliceOwner


class Slice(Tensor):
    """This rank's slice of a gradient."""

    _ringdp_of: weakref.ref[nn.Parameter]

    def full_tensor(self) -> Tensor:
        """The whole gradient, or what was made from it, in the parameter's shape, as torch's
        DTensor.full_tensor. Collective."""
        return full_tensor(self._ringdp_of(), self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        if any(getattr(t, "_ringdp_guards", False) for t in types):
            return NotImplemented  # ShardedParam's runs next, and sees whether a graph is recorded
        with torch._C.DisableTorchFunctionSubclass():
            if func in COLLECTIVE:
                return COLLECTIVE[func](*args, **(kwargs or {}))
            first = args[0] if args else None
            if func in _LEAVE and isinstance(first, Slice):
                return _LEAVE[func](first.as_subclass(Tensor), *args[1:], **(kwargs or {}))
            try:
                out = func(*args, **(kwargs or {}))
            except RuntimeError as e:
                e.add_note(
                    "A tensor here is this rank's flat slice of a sharded parameter or gradient. "
                    "Parameters are whole within full_parameters()."
                )
                raise
            if type(out) is Tensor and isinstance(first, Slice) and out.shape == first.shape:
                _mark(out, first._ringdp_of, type(first))
            return out


class ParamSlice(Slice):
    """This rank's slice of a parameter's values."""


def register(parameters: Iterable[nn.Parameter], owner: SliceOwner) -> None:
    """These parameters are slices, of which `owner` can reach the others."""
    _OWNERS.update(dict.fromkeys(parameters, weakref.ref(owner)))


def forget(parameters: Iterable[nn.Parameter]) -> None:
    """These parameters are whole, whatever they have been."""
    for p in parameters:
        _OWNERS.pop(p, None)


def owners(parameters: Iterable[Tensor]) -> list[Any]:
    """The distinct owners of those that are slices; None for an owner that is gone."""
    references = {id(owner): owner for p in parameters if (owner := _OWNERS.get(p))}
    return [owner() for owner in references.values()]


def mark_grad(gradient: Tensor, parameter: nn.Parameter) -> None:
    """Make the user's view of p.grad a Slice, if the parameter is one."""
    if type(gradient) is Tensor and parameter in _OWNERS:
        _mark(gradient, weakref.ref(parameter))


def mark_values(values: Tensor, parameter: nn.Parameter) -> None:
    """Make a tensor made from the parameter a ParamSlice, if its shape is that of the slice."""
    with torch._C.DisableTorchFunctionSubclass():
        if values.shape == parameter.shape and parameter in _OWNERS:
            _mark(values, weakref.ref(parameter), ParamSlice)


def full_tensor(parameter: nn.Parameter | None, slice: Tensor) -> Tensor:
    """The whole tensor, in the parameter's shape: this rank has the `slice` of it. Collective."""
    owner = _owner(parameter, "full_tensor()")
    if type(slice) is Slice:
        owner.check_reduced("full_tensor() of a gradient")
    with torch._C.DisableTorchFunctionSubclass():
        own = slice.detach()
    places = ((u, at) for u in owner.units for at, p in enumerate(u.parameters) if p is parameter)
    unit, at = next(places)
    parts = [unit.plan.part(unit.plan.entries[at], rank) for rank in range(owner.shards.size)]
    out = own.new_empty(unit.plan.entries[at].elements)
    owner.shards.all_gather_v(out, own, [end - begin for begin, end in parts], tag=unit.index)
    return out.view(unit.cut.shapes[at])


def _mark(tensor: Tensor, of: weakref.ref[nn.Parameter], into: type[Slice] = Slice) -> None:
    tensor.__class__ = into
    tensor._ringdp_of = of  # type: ignore[attr-defined]


def _owner(parameter: nn.Parameter | None, what: str) -> SliceOwner:
    """Raises UsageError, which begins with `what`, if the parameter or the owner is gone."""
    owner = None if parameter is None else _OWNERS.get(parameter, lambda: None)()
    if owner is None:
        raise UsageError(f"{what}, but the engine that has the other slices is gone")
    return cast(SliceOwner, owner)


def _by_owner(tensors: Sequence[Tensor], what: str) -> dict[SliceOwner, list[int]]:
    """The indices of the slices among the tensors, by owner."""
    found: dict[SliceOwner, list[int]] = {}
    for at, t in enumerate(tensors):
        if isinstance(t, Slice):
            found.setdefault(_owner(t._ringdp_of(), what), []).append(at)
    for owner, places in found.items():
        if not all(isinstance(tensors[at], ParamSlice) for at in places):
            owner.check_reduced(what)
    return found


# ---- torch's functions of all ranks' slices, with torch's signatures


def _foreach_norm(
    tensors: Sequence[Tensor], ord: Any = 2, dtype: torch.dtype | None = None
) -> list[Tensor]:  # fmt: skip
    order = float({None: 2, "fro": 2, "nuc": 0}.get(ord, ord))
    if not order > 0:
        raise UsageError(f"the norm of order {ord!r} of a sharded tensor; allowed: above 0")
    out = [
        t if isinstance(t, Slice) else torch.linalg.vector_norm(t, order, dtype=dtype)
        for t in tensors
    ]
    for owner, places in _by_owner(tensors, "the norm of gradients is taken").items():
        mine = torch.zeros(len(places), dtype=torch.float64, device="cpu")
        for i, at in enumerate(places):
            if tensors[at].numel():
                mine[i] = torch.linalg.vector_norm(tensors[at], order, dtype=torch.float64)
        every = torch.empty(owner.shards.size * len(places), dtype=torch.float64, device="cpu")
        owner.shards.all_gather(every, mine)
        norms = torch.linalg.vector_norm(every.view(-1, len(places)), order, dim=0)
        for at, norm in zip(places, norms, strict=True):
            out[at] = norm.to(tensors[at].device, dtype or tensors[at].dtype)
    return out


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
    return _foreach_norm([tensor], p if ord is None else ord, dtype)[0]


def _linalg_norm(tensor: Tensor, ord: Any = None, **others: Any) -> Tensor:
    if ord is not None:
        raise UsageError(
            f"torch.linalg.norm(ord={ord}) of a sharded tensor: of a matrix it is another norm "
            "than of its slice; allowed: None, or torch.linalg.vector_norm"
        )
    return _norm(tensor, **others)


def _unscale(tensors: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    owners = _by_owner(tensors, "gradients are unscaled")
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, inv_scale)
    for owner in owners:
        found = found_inf.cpu().view(1)
        owner.shards.all_reduce(found, "max")
        found_inf.copy_(found.view(found_inf.shape))


COLLECTIVE: dict[Any, Callable[..., Any]] = {
    torch._foreach_norm: _foreach_norm,
    torch.linalg.vector_norm: _norm,
    torch.linalg.norm: _linalg_norm,
    torch.norm: _norm,
    Tensor.norm: _norm,
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
}
# These make plain tensors. copy.deepcopy keeps what it copies alive; Tensor's own __deepcopy__
# leaves in the memo the id of a tensor that is gone, where the next one's copy would be found.
_LEAVE: dict[Any, Callable[..., Any]] = {
    Tensor.__deepcopy__: copy.deepcopy,
    Tensor.__reduce_ex__: Tensor.__reduce_ex__,
}
