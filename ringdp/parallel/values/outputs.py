"""The output tensors of a unit's forward: its backward starts at their gradients.

    returned   inside any structure (see `tensor_tree`)
    left       in attributes of its modules, such as a mixture of experts' auxiliary loss, or put
               into lists and dicts that were passed in

Attributes count if they are tensors, or lists, tuples and dicts of them. Of all these, outputs are
those that an operation since the forward's start has made, by autograd's sequence numbers: what a
unit has left earlier is none, nor is what it only passes on, as a skipped block does. Threads have
numbers of their own, so what it returns with a lower number is an output unless it was passed in,
or a unit that had ended before had it as one.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ringdp.errors import UsageError
from ringdp.parallel.unit import FlatUnit
from ringdp.parallel.values.tensor_tree import DEEP, map_tensors, tensors

CONTAINERS = (list, dict, tuple)
_COUNT = itertools.count()  # orders the beginnings and outputs of forwards in all threads


class UnitOutputs:
    """The outputs of a module, which has these units, and of its submodules, without `others`,
    which have their own."""

    def __init__(
        self, module: nn.Module, units: Sequence[FlatUnit], others: Container[nn.Module]
    ) -> None:
        self._units = units
        self._modules = list(own_modules(module, others))
        # Of each running forward (they may nest) the first operation, and its number among
        # beginnings and outputs; None before its units are gathered, and once it has returned.
        self._since: list[tuple[int, int] | None] = []

    def enter(self) -> None:
        """A forward is called, whose units are not gathered yet."""
        self._since.append(None)

    def begin(self) -> None:
        self._since[-1] = torch._C._autograd._get_sequence_nr(), next(_COUNT)

    def returned(self, output: Any, passed: Sequence[Any]) -> tuple[Any, list[Tensor]]:
        """For a forward with arguments `passed` that has just returned `output`: what to return
        instead (see `_outliving`), and the tensors at whose gradients its backward starts."""
        since, begun = 0, 0
        if self._since:
            (since, begun), self._since[-1] = self._since[-1] or (0, 0), None
        full = [unit.full.untyped_storage() for unit in self._units if unit.freed]
        freed = {memory.data_ptr() for memory in full if memory.nbytes()}
        records = torch.is_grad_enabled()
        left = [*self._left(passed)] if freed or records else []
        for t in left:  # views of weights get memory of their own
            if _is_in(freed, t) and not isinstance(t, nn.Parameter):
                t.data = t.data.clone()
        output = _outliving(output, freed, self._units[0].plan.name)
        if not records:
            return output, []

        def is_new(t: Tensor) -> bool:
            return t.grad_fn is not None and t.grad_fn._sequence_nr() >= since

        def is_from_a_thread(t: Tensor) -> bool:
            if t.grad_fn is None or getattr(t, "_ringdp_output", begun) < begun:
                return False
            return not any(t is x for x in tensors(passed))

        starts = [t for t in tensors(output) if is_new(t) or is_from_a_thread(t)]
        starts += filter(is_new, left)
        for t in starts:
            t._ringdp_output = next(_COUNT)  # type: ignore[attr-defined]
        # A write to a view removes the view's hooks, but not its base's. These may run too late: if
        # an autograd.Function has returned an input, after the backward of its other inputs.
        bases = (t._base for t in starts if t._base is not None)
        return output, [*starts, *filter(is_new, bases)]

    def end(self) -> bool:
        """A forward has ended. Returns whether it raised after its `begin`."""
        return bool(self._since) and self._since.pop() is not None

    def _left(self, passed: Iterable[Any]) -> Iterator[Tensor]:
        """The tensors in attributes and in containers that were passed in."""
        for module in self._modules:
            yield from _in_attributes(module)
        for x in passed:
            if isinstance(x, CONTAINERS):
                yield from tensors(x, deep=0)


def own_modules(module: nn.Module, others: Container[nn.Module]) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if child not in others:
            yield from own_modules(child, others)


_OF_ALL = frozenset(vars(nn.Module()))  # skipped: looking at these too takes twice as long


def _in_attributes(module: nn.Module) -> Iterator[Tensor]:
    for name, value in vars(module).items():
        if name in _OF_ALL:
            continue
        if isinstance(value, Tensor):
            yield value
        elif type(value) in CONTAINERS:
            for inner in value.values() if isinstance(value, dict) else value:
                if isinstance(inner, Tensor):
                    yield inner


def _is_in(memory: Collection[int], t: Tensor) -> bool:
    """Whether the tensor has elements there. `memory`: addresses of storages."""
    if not memory or t.layout is not torch.strided or not t.numel():
        return False
    return t.untyped_storage().data_ptr() in memory


def _outliving(output: Any, freed: Collection[int], unit: str) -> Any:
    """`output` with copies of tensors in memory that will be freed, and with views of leaves.

    Leaves are tensors that require gradients, so that hooks on the views go with the graph; without
    gradients, parameters, which will be slices. Raises UsageError for an output that may have a
    tensor in freed memory which cannot be found or copied.
    """

    def is_leaf(t: Tensor) -> bool:
        if not torch.is_grad_enabled():
            return isinstance(t, nn.Parameter)
        return t.is_leaf and t.requires_grad

    def dies(t: Tensor) -> bool:
        return _is_in(freed, t)

    def changes(t: Tensor) -> bool:
        return dies(t) or is_leaf(t)

    def one(t: Tensor) -> Tensor:
        return t.clone() if dies(t) else t.view_as(t)

    if freed and any(isinstance(x, Iterator) for x in tree_leaves(output)):
        raise _refusal(unit, "an iterator, and what comes out of that may be")
    if any(map(changes, tensors(output))):
        output = map_tensors(one, output, which=changes, deep=DEEP)
        if any(map(dies, tensors(output))):
            raise _refusal(unit, "a function, or an object that cannot be copied, which has")
    return output


def _refusal(unit: str, what: str) -> UsageError:
    return UsageError(
        f"unit {unit!r} returns {what} a part of its parameters, which are freed after its forward "
        "in stage 3. Return tensors, or containers of them"
    )
