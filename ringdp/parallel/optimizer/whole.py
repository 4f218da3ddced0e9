"""Steps of optimizers that look at whole parameters, as Muon and Adafactor do, from stage 1 on.

For a step each parameter goes to its owner, one of the ranks that have elements of it: the others
send theirs of the value, of the gradient, and of state with one value for each element. Afterwards
the owner returns the new ones, with what other state there is (Adafactor's row_var). So between
steps a rank has what it has with any optimizer: slices, and single values that go with them. A
parameter that lies on one rank does not move, and is stepped in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from ringdp.comm import Communicator
from ringdp.parallel.cut import Slices
from ringdp.parallel.exchange import Exchange
from ringdp.parallel.guards.computed import set_data
from ringdp.parallel.optimizer.state import is_json, is_per_element, is_slice, marked
from ringdp.parallel.replicas import gather_json

State = dict[str, Any]


class Place(NamedTuple):
    """parts[rank]: (begin, end) of that rank's elements, if it has some. A parameter without any is
    every rank's own."""

    parameter: nn.Parameter
    shape: torch.Size
    parts: dict[int, tuple[int, int]]


class Loan(NamedTuple):
    """What this rank has of a parameter that is stepped."""

    place: Place
    owner: int
    values: Tensor
    gradient: Tensor
    state: State


class WholeStep:
    """While `optimizer` steps parameters of these units, each is whole on its owner, and has no
    gradient elsewhere. `end` it after the step; `undo` it if the step raised."""

    def __init__(self, comm: Communicator, units: Sequence[Slices], optimizer: Optimizer) -> None:
        """Collective. All ranks must have gradients of the same parameters."""
        self.comm, self.optimizer = comm, optimizer
        places = _places(units, optimizer, comm.rank)
        self.moves = any(len(place.parts) > 1 for place in places)
        devices = [place.parameter.device for place in places]
        self.exchange = Exchange(comm, devices[0] if devices else torch.device("cpu"))
        self.loans = {
            at: Loan(place, owner, p.data, p.grad, optimizer.state.get(p, {}))
            for at, (place, owner) in enumerate(
                zip(places, _owners(places, comm.size), strict=True)
            )
            if comm.rank in place.parts and (p := place.parameter).grad is not None
        }
        whole = []
        for loan in self.loans.values():
            size, old = loan.values.numel(), loan.state.items()
            slices = {k: v for k, v in old if is_slice(optimizer, k, v, size)}
            values, gradient = (self._lend(loan, t) for t in (loan.values, loan.gradient))
            state = loan.state | {name: self._lend(loan, t) for name, t in slices.items()}
            whole.append((values, gradient, state))
        if self.moves:
            self.exchange.run()
        for loan, (values, gradient, state) in zip(self.loans.values(), whole, strict=True):
            p, mine = loan.place.parameter, loan.owner == comm.rank
            self._set(p, values, gradient, state) if mine else self._set(p, loan.values, None, {})

    def _lend(self, loan: Loan, own: Tensor) -> Tensor:
        """On the owner: the whole tensor, once the exchange has run."""
        place, me = loan.place, self.comm.rank
        if loan.owner != me:
            self.exchange.send(loan.owner, own)
            return own
        if len(place.parts) == 1:
            return own.view(place.shape)
        whole = own.new_empty(place.shape.numel())
        for rank, span in place.parts.items():
            part = whole[slice(*span)]
            if rank == me:
                part.copy_(own)
            else:
                self.exchange.receive(rank, part)
        return whole.view(place.shape)

    def end(self) -> None:
        """Every rank has slices again, with the new values and state. Collective."""
        told = self._tell() if self.moves else {}
        states = [
            self._return(loan)
            if loan.owner == self.comm.rank
            else self._receive(loan, told.get(at, []))
            for at, loan in self.loans.items()
        ]
        if self.moves:
            self.exchange.run()
        for loan, state in zip(self.loans.values(), states, strict=True):
            self._set(loan.place.parameter, loan.values, loan.gradient, state)

    def undo(self, *, again: bool) -> None:
        """Every rank has slices again, with the values and state from before the step. But what
        lies on one rank keeps what the step has changed in its place, and so does, on the owner,
        state that is not of slices. Unless the step is tried again, gradients are dropped:
        zero_grad may have been called, which only owners see."""
        for loan in self.loans.values():
            gradient = loan.gradient if again else None
            self._set(loan.place.parameter, loan.values, gradient, loan.state)

    def _set(self, p: nn.Parameter, values: Tensor, gradient: Tensor | None, state: State) -> None:
        p.grad = None  # first, since it must have the shape of the values
        set_data(p, values)
        p.grad = gradient
        increment_version(p)
        self.optimizer.state.pop(p, None)
        if state:
            self.optimizer.state[p] = state

    def _tell(self) -> dict[int, list[Any]]:
        """The `_facts` of all owners' state, by place."""
        mine = [
            [at, [*_facts(self.optimizer.state.get(loan.place.parameter, {}), loan.place.shape)]]
            for at, loan in self.loans.items()
            if loan.owner == self.comm.rank and len(loan.place.parts) > 1
        ]
        return {at: facts for owned in gather_json(self.comm, mine) for at, facts in owned}

    def _return(self, loan: Loan) -> State:
        """On the owner: what it keeps of the state. Sends the others what is theirs."""
        p, shape, parts = loan.place
        state: State = self.optimizer.state.get(p, {})
        flat = {k: v.reshape(-1) for k, v in state.items() if is_per_element(k, v, shape)}
        others = [rank for rank in parts if rank != loan.owner]
        for rank in others:
            part = slice(*parts[rank])
            self.exchange.send(rank, p.data.reshape(-1)[part])
            for name, value in state.items():
                if isinstance(value, Tensor):
                    self.exchange.send(rank, flat[name][part] if name in flat else value)
        part = slice(*parts[loan.owner])
        values = p.data.reshape(-1)[part]
        if values.data_ptr() != loan.values.data_ptr():
            loan.values.copy_(values)
        return state | {k: marked(v[part].clone() if others else v) for k, v in flat.items()}

    def _receive(self, loan: Loan, facts: list[Any]) -> State:
        """Elsewhere: the new state, once the exchange has run."""
        self.exchange.receive(loan.owner, loan.values)
        state: State = {}
        for name, *fact in facts:
            if len(fact) == 1:
                (state[name],) = fact
                continue
            dtype, shape, device = fact
            device = device if device == "cpu" else loan.values.device
            value = loan.values.new_empty(
                loan.values.shape if shape is None else shape,
                dtype=getattr(torch, dtype),
                device=device,
            )
            self.exchange.receive(loan.owner, value)
            state[name] = marked(value) if shape is None else value
        return state


def _places(units: Sequence[Slices], optimizer: Optimizer, rank: int) -> list[Place]:
    """In the same order on all ranks."""
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [
        Place(p, shape, unit.plan.parts(entry) or {rank: (0, 0)})
        for unit in units
        for entry, p, shape in zip(unit.plan.entries, unit.parameters, unit.cut.shapes, strict=True)
        if id(p) in stepped
    ]


def _owners(places: Sequence[Place], ranks: int) -> list[int]:
    """Of the ranks in each one's parts that with the fewest elements to step. Those on one rank
    come first, then the largest."""
    load, owners = [0] * ranks, dict[int, int]()
    order = sorted(enumerate(places), key=lambda x: (len(x[1].parts) > 1, -x[1].shape.numel()))
    for at, place in order:
        owners[at] = min(place.parts, key=load.__getitem__)
        load[owners[at]] += place.shape.numel()
    return [owners[at] for at in range(len(places))]


def _facts(state: State, shape: torch.Size) -> Iterator[list[Any]]:
    """Of a tensor [name, dtype, shape, device], with None for a value for each element of `shape`.
    Of what is JSON [name, value]. Other objects stay on the owner."""
    for name, value in state.items():
        if isinstance(value, Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            single = None if is_per_element(name, value, shape) else [*value.shape]
            yield [name, dtype, single, value.device.type]
        elif is_json(value):
            yield [name, value]
