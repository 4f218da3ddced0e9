"""Steps of optimizers that look at whole parameters, as Muon and Adafactor do, from stage 1 on.

For a step each parameter goes to its owner (see `owners`), which has its state: the other ranks
with elements of it send theirs of the value and the gradient. Afterwards the owner returns the new
values. A parameter that lies on one rank does not move, and is stepped in its place.

Beside its slices and the state a rank holds what it owns whole meanwhile, values and gradients,
about as much as its slices of these; and PIECE bytes, while they are on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from ringdp.comm import Communicator
from ringdp.errors import UsageError
from ringdp.parallel.cut import Slices
from ringdp.parallel.exchange import Exchange
from ringdp.parallel.guards.computed import set_data
from ringdp.parallel.optimizer.owners import Place, drop, places

PIECE = 32 << 20  # bytes of whole parameters that one exchange moves; a larger one goes alone


class Loan(NamedTuple):
    """What this rank has of a parameter that is stepped."""

    place: Place
    values: Tensor
    gradient: Tensor


class WholeStep:
    """While `optimizer` steps parameters of these units, each is whole on its owner, and has no
    gradient elsewhere. `end` it after the step; `undo` it if the step raised."""

    def __init__(self, comm: Communicator, units: Sequence[Slices], optimizer: Optimizer) -> None:
        """Collective. All ranks must have gradients of the same parameters. Raises UsageError for
        state of what others own."""
        self.comm, self.optimizer = comm, optimizer
        found = places(optimizer, units, comm.rank)
        self.loans = {
            id(p): Loan(place, p.data, p.grad)
            for place in found
            if comm.rank in place.parts and (p := place.parameter).grad is not None
        }
        _check_state(optimizer, found, comm.rank)
        self.others = [place.parameter for place in found if place.owner != comm.rank]
        self.slices = [  # stepped as such, they get no state
            place.parameter
            for place in found
            if id(place.parameter) not in self.loans and not optimizer.state.get(place.parameter)
        ]
        self.stay = [loan for loan in self.loans.values() if len(loan.place.parts) == 1]
        self.pieces = _pieces(place for place in found if len(place.parts) > 1)
        for place, *own in self.stay:
            _set(place.parameter, *(t.view(place.shape) for t in own))
        self._move(self._lend)

    def end(self) -> None:
        """Every rank has slices again, with the new values. Collective."""
        for (p, *_), values, gradient in self.stay:
            if p.data_ptr() != values.data_ptr():  # it was given other memory
                values.copy_(p.data.reshape(-1))
            _set(p, values, gradient)
        self._move(self._return)
        self._forget()

    def undo(self, *, again: bool) -> None:
        """Every rank has slices again, with the values from before the step. But what lies on one
        rank keeps what the step has changed in its place, and so does all state. Unless the step is
        tried again, gradients are dropped: zero_grad may have been called, which only owners
        see."""
        for loan in self.loans.values():
            _set(loan.place.parameter, loan.values, loan.gradient if again else None)
        self._forget()

    def _forget(self) -> None:
        for p in self.slices:
            self.optimizer.state.pop(p, None)
        drop(self.optimizer, self.others)

    def _move(self, act: Callable[[Loan, Exchange], tuple[Tensor, Tensor | None]]) -> None:
        """What lies on several ranks gets the values and the gradient that `act` returns, once
        these have been exchanged."""
        for piece in self.pieces:
            exchange = Exchange(self.comm, piece[0].parameter.data)
            loans = [loan for place in piece if (loan := self.loans.get(id(place.parameter)))]
            becomes = [act(loan, exchange) for loan in loans]
            exchange.run()
            for loan, of in zip(loans, becomes, strict=True):
                _set(loan.place.parameter, *of)

    def _lend(self, loan: Loan, exchange: Exchange) -> tuple[Tensor, Tensor | None]:
        place, *own = loan
        for t in own:
            exchange.send(place.owner, t)
        if place.owner != self.comm.rank:
            return loan.values, None
        values, gradient = (t.new_empty(place.shape) for t in own)
        for whole in (values, gradient):
            parts = whole.view(-1).split_with_sizes([*place.parts.values()])
            for rank, part in zip(place.parts, parts, strict=True):
                exchange.receive(rank, part)
        return values, gradient

    def _return(self, loan: Loan, exchange: Exchange) -> tuple[Tensor, Tensor | None]:
        place, values, gradient = loan
        if place.owner == self.comm.rank:
            whole = place.parameter.data.reshape(-1)
            parts = whole.split_with_sizes([*place.parts.values()])
            for rank, part in zip(place.parts, parts, strict=True):
                exchange.send(rank, part)
        exchange.receive(place.owner, values)
        return values, gradient


def _check_state(optimizer: Optimizer, places: Iterable[Place], rank: int) -> None:
    """Raise UsageError for state of what others own: the next `_forget` would drop it."""
    for place in places:
        if place.owner != rank and optimizer.state.get(place.parameter):
            raise UsageError(
                f"the {type(optimizer).__name__} steps whole parameters, and has state, made "
                f"between its steps, of this rank's flat slice of one of shape {[*place.shape]}, "
                f"whose state is on rank {place.owner}. What wraps it, as Lookahead does, must "
                "keep its own state elsewhere"
            )


def _set(p: nn.Parameter, values: Tensor, gradient: Tensor | None) -> None:
    p.grad = None  # first, since it must have the shape of the values
    set_data(p, values)
    p.grad = gradient
    increment_version(p)


def _pieces(places: Iterable[Place]) -> list[list[Place]]:
    """Of one dtype, and of up to PIECE bytes of values and gradients. All ranks find the same."""
    pieces, held = list[list[Place]](), 0
    for place in places:
        p = place.parameter
        size = 2 * place.shape.numel() * p.element_size()
        if not pieces or held + size > PIECE or p.dtype != pieces[-1][0].parameter.dtype:
            pieces.append([])
            held = 0
        pieces[-1].append(place)
        held += size
    return pieces
