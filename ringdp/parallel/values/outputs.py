"""The output tensors of a unit's forward: its backward starts at their gradients.

    returned   inside any structure (see `tensor_tree`)
    left       in attributes of its modules, such as a mixture of experts' auxiliary loss, or put
               into lists and dicts that were passed in

Attributes count if they are tensors, or lists, tuples and dicts whose name does not start with "_".
A tensor that a unit only passes on, as a skipped block does, is an output of the unit that made it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ringdp.parallel.unit import FlatUnit
from ringdp.parallel.values.tensor_tree import FreedMemory, outliving, tensors

CONTAINERS = (list, dict, tuple)


class UnitOutputs:
    """The outputs of a module and its submodules, without `others`, which have their own units.

    `units`: the module's. `callers`: of every unit, the units whose forward calls it. `makers`:
    tensor -> (the unit that made it, the sequence number of its last operation, since it may be
    written in place later); shared by all units.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[FlatUnit],
        others: Container[nn.Module],
        callers: Sequence[set[int]],
        makers: Any,
    ) -> None:
        self._units, self._unit = units, units[0].index
        self._callers, self._makers = callers, makers
        self._modules = list(_own(module, others))
        # Of each running forward (they may nest) the first operation; None once it has returned.
        self._since: list[int | None] = []
        self._known: Any = WeakIdKeyDictionary()  # left in attributes by an earlier forward

    def begin(self) -> None:
        """A forward begins."""
        self._since.append(torch._C._autograd._get_sequence_nr())  # the next operation's

    def returned(self, output: Any, passed: Iterable[Any]) -> tuple[Any, list[Tensor]]:
        """For a forward with arguments `passed` that has just returned `output`: what to return
        instead (see `outliving`), and the tensors at whose gradients its backward starts."""
        dies = FreedMemory(unit.full for unit in self._units if unit.freed)
        left = self._left(passed, dies)
        output = outliving(output, dies, self._units[0].plan.name)
        if not torch.is_grad_enabled():
            return output, []
        return output, [t for t in (*tensors(output), *left) if t.grad_fn and self._is_ours(t)]

    def end(self) -> bool:
        """A forward has ended. Returns whether it raised."""
        return bool(self._since) and self._since.pop() is not None

    def _left(self, passed: Iterable[Any], dies: FreedMemory) -> list[Tensor]:
        """The tensors left in attributes and arguments. Views of weights about to be freed
        (`dies`) get memory of their own."""
        since = 0
        if self._since:
            since, self._since[-1] = self._since[-1] or 0, None
        if not dies and not torch.is_grad_enabled():
            return []
        kept = [t for module in self._modules for t in _in_attributes(module)]
        put = [t for x in passed if isinstance(x, CONTAINERS) for t in tensors(x, deep=0)]
        for t in (*kept, *put) if dies else ():
            if dies(t) and not isinstance(t, nn.Parameter):
                t.data = t.data.clone()
        left = [t for t in kept if t.grad_fn and t not in self._known]
        for t in left:
            self._known[t] = None
        return left + [t for t in put if t.grad_fn and t.grad_fn._sequence_nr() >= since]

    def _is_ours(self, tensor: Tensor) -> bool:
        """Whether this unit, or a unit inside it, made the tensor."""
        number = tensor.grad_fn._sequence_nr()  # type: ignore[union-attr]
        maker, then = self._makers.get(tensor, (self._unit, None))
        if then != number:
            maker = self._unit
            self._makers[tensor] = maker, number
        return maker == self._unit or self._unit in self._callers[maker]


def of_units(
    modules: Mapping[nn.Module, list[int]], units: Sequence[FlatUnit], callers: Sequence[set[int]]
) -> dict[int, UnitOutputs]:
    """One for every module with units, by its first unit's index."""
    makers: Any = WeakIdKeyDictionary()
    return {
        own[0]: UnitOutputs(module, [units[i] for i in own], modules, callers, makers)
        for module, own in modules.items()
    }


def _own(module: nn.Module, others: Container[nn.Module]) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if child not in others:
            yield from _own(child, others)


_OF_ALL = frozenset(vars(nn.Module()))  # skipped: looking at these too takes twice as long


def _in_attributes(module: nn.Module) -> Iterator[Tensor]:
    for name, value in vars(module).items():
        if name in _OF_ALL:
            continue
        if isinstance(value, Tensor):
            yield value
        elif type(value) in CONTAINERS and name[0] != "_":
            for inner in value.values() if isinstance(value, dict) else value:
                if isinstance(inner, Tensor):
                    yield inner
