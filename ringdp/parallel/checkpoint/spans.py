"""The elements of each parameter that this rank keeps, and those it writes to a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ringdp.errors import CheckpointError, UsageError
from ringdp.parallel.engine import Engine, check_engine
from ringdp.parallel.optimizer.kinds import needs_whole
from ringdp.parallel.optimizer.owners import places


class Piece(NamedTuple):
    """A parameter on this rank."""

    name: str
    parameter: nn.Parameter
    shape: list[int]  # of the whole
    rest: Tensor  # what the rank keeps: elements kept[0]..kept[1] of the whole
    kept: tuple[int, int]
    writes: tuple[int, int]  # of these; in every stage one rank writes each element

    def own(self, values: Tensor) -> Tensor:
        """The values that this rank writes, out of those of its kept elements."""
        begin = self.kept[0]
        return values.detach().reshape(-1)[self.writes[0] - begin : self.writes[1] - begin]


Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


def optimizers_given(
    function: str, engine: object, optimizer: object
) -> list[torch.optim.Optimizer]:
    """The optimizers. Raises UsageError unless they are an Engine, and an optimizer, or what wraps
    one and has its state, or several of different parameters, or None."""
    check_engine(function, engine)
    several: list[Any] = []
    if optimizer is not None:
        several = [*optimizer] if isinstance(optimizer, list | tuple) else [optimizer]
    for one in several:
        if not hasattr(one, "param_groups"):
            raise UsageError(
                f"{function}: optimizer is a {type(one).__name__}; allowed: a torch.optim."
                "Optimizer of the engine's model, a list of some, or None. A scheduler's "
                "state_dict goes into extra"
            )
        for name, value in vars(one).items():  # as in timm's Lookahead
            for inner in value if isinstance(value, list | tuple) else (value,):
                if isinstance(inner, torch.optim.Optimizer) and inner.state is not one.state:
                    raise UsageError(
                        f"{function}: the {type(one).__name__} wraps an optimizer whose state is "
                        f"not its own; give its .{name} instead"
                    )
    stepped = [id(p) for group in groups_in(several) for p in group["params"]]
    if len({*stepped}) < len(stepped):
        raise UsageError(f"{function}: two optimizers have the same parameter")
    return several


def groups_in(optimizers: Iterable[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """Their parameter groups, in order."""
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def pieces(engine: Engine) -> list[Piece]:
    """Every parameter, with all units at rest, which no gather reads any more. Raises UsageError
    inside full_parameters(), and after a close() there."""
    if engine.gathering.summoned:
        raise UsageError(
            "the engine was closed within full_parameters(): the model is an ordinary one, whose "
            "state_dict torch saves and loads"
            if engine.closed
            else "within full_parameters() no checkpoint is saved or loaded; leave it first"
        )
    engine.backwards.check_over("a checkpoint is saved or loaded")
    engine.stepping.undo()
    engine.gathering.reshard(engine.units)
    engine.gathering.let_write()
    found, ranks = [], engine.ledger.ranks
    for unit in engine.units:
        unit.settle()
        cut = unit.cut
        for entry, p, shape, rest, part in zip(
            unit.plan.entries, unit.parameters, cut.shapes, unit.rest, cut.parts, strict=True
        ):
            kept = part if unit.slices else (0, entry.elements)
            writes = _split(part, ranks.replica, ranks.replica_count)
            found.append(Piece(entry.name, p, list(shape), rest, kept, writes))
    return found


def _split(span: tuple[int, int], at: int, parts: int) -> tuple[int, int]:
    begin, end = span
    size = end - begin
    return begin + size * at // parts, begin + size * (at + 1) // parts


def stepped(
    engine: Engine, optimizers: Sequence[torch.optim.Optimizer], found: list[Piece]
) -> Iterator[tuple[torch.optim.Optimizer, Piece]]:
    """The parameters of which this rank may have an optimizer's state. Where whole ones are
    stepped, those that it owns, of which it has all state. The first replica writes it."""
    of = {id(p): one for one in optimizers for group in one.param_groups for p in group["params"]}
    rank = engine.shards.rank
    owned = {
        id(place.parameter): place.owner
        for one in optimizers
        if engine.stage.slices and needs_whole(one)
        for place in places(one, engine.units, rank)
    }
    for piece in found:
        if not (optimizer := of.get(id(piece.parameter))):
            continue
        owner = owned.get(id(piece.parameter))
        if owner is None:
            yield optimizer, piece
        elif owner == rank:
            every = 0, math.prod(piece.shape)
            like = piece.rest.new_empty(()).expand(piece.shape)  # which holds no memory
            writes = every if engine.ledger.ranks.replica == 0 else (0, 0)
            yield optimizer, piece._replace(rest=like, kept=every, writes=writes)


def groups_of(
    optimizers: Iterable[torch.optim.Optimizer], found: list[Piece]
) -> list[dict[str, Any]]:
    """Their groups as JSON. Raises CheckpointError for a parameter of another model."""
    names = {id(piece.parameter): piece.name for piece in found}
    groups = []
    for group in groups_in(optimizers):
        if any(id(p) not in names for p in group["params"]):
            raise CheckpointError("the optimizer has a parameter that is not of the sharded model")
        options = {key: _option(value) for key, value in group.items() if key != "params"}
        groups.append({"names": [names[id(p)] for p in group["params"]], "options": options})
    return groups


def _option(value: Any) -> Any:
    """An option as JSON: a tensor, such as lr or one of the betas, as its number."""
    if isinstance(value, (tuple, list)):
        return [_option(v) for v in value]
    return float(value) if isinstance(value, Tensor) else value


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers in its state_dict."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
