"""Which rank steps each parameter, whole, and keeps all of its state: the parameter's owner.

That is one of the ranks that have elements of it, so chosen that all step about as many. It stays
as long as the optimizer has the parameter, whatever others are added, so state never moves.

So a rank has whole state of some parameters where other optimizers have a slice of all, as in
torch's ZeroRedundancyOptimizer and distributed Shampoo: about 1/n of it all, if there are many
parameters. Sliced, it would go to the owner and back in every step: with Muon, 5/3 of the traffic.
What is not per element, such as SOAP's and Shampoo's matrices, is not sliced at all: each rank with
a part of the parameter would have all of it. Of 12 layers (qkv, out, up, down) on 8 ranks that is
some 3 times what owners have, and does not become less with more ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from ringdp.parallel.cut import Slices
from ringdp.parallel.layout import Unit


class Place(NamedTuple):
    """parts[rank]: how many elements of the parameter that rank has, if any, in order. A parameter
    without any is every rank's own."""

    parameter: nn.Parameter
    plan: Unit
    shape: torch.Size
    parts: dict[int, int]
    owner: int


_PLACES = WeakKeyDictionary[Optimizer, dict[int, Place]]()  # by the parameter's id


def may_have_state(optimizer: Optimizer) -> bool:
    """Whether owners may, for all that this rank knows: then they are known, on all ranks."""
    return optimizer in _PLACES


def drop(optimizer: Optimizer, others: Sequence[nn.Parameter]) -> None:
    """It has no state here of these, which other ranks own. If that leaves none, an empty one stays
    instead: torch's set_optimizer_state_dict steps an optimizer that has none, on that rank."""
    for p in others:
        optimizer.state.pop(p, None)
    if others and not optimizer.state:
        optimizer.state[others[0]] = {}


def places(optimizer: Optimizer, units: Sequence[Slices], rank: int) -> list[Place]:
    """Of its parameters in these units, in the same order on all ranks; `rank` is this one.

    New ones go to those with the fewest elements: first what lies on one rank, then the largest.
    """
    known = _PLACES.setdefault(optimizer, {})
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    mine, new, load = list[int](), list[Place](), dict[int, int]()
    for unit in units:
        for at, p in enumerate(unit.parameters):
            if id(p) not in stepped:
                continue
            mine.append(id(p))
            was = known.get(id(p))
            if was and was.plan is unit.plan:
                load[was.owner] = load.get(was.owner, 0) + was.shape.numel()
                continue
            spans = unit.plan.parts(unit.plan.entries[at]) or {rank: (0, 0)}
            parts = {rank: end - begin for rank, (begin, end) in spans.items()}
            owner = was.owner if was else -1
            new.append(Place(p, unit.plan, unit.cut.shapes[at], parts, owner))
    for place in sorted(new, key=lambda new: (len(new.parts) > 1, -new.shape.numel())):
        owner = place.owner
        if owner not in place.parts:
            owner = min(place.parts, key=lambda rank: load.get(rank, 0))
        load[owner] = load.get(owner, 0) + place.shape.numel()
        known[id(place.parameter)] = place._replace(owner=owner)
    return [known[p] for p in mine]
