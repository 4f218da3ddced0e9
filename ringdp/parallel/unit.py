"""One unit's tensors and its state. It knows how to be gathered and freed, not when."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import torch
from torch import Tensor, nn

from ringdp.comm import Communicator, Work
from ringdp.kernels import flatten
from ringdp.parallel import layout
from ringdp.parallel.memory import Ledger
from ringdp.parallel.stages import Keep, Stage


class State(Enum):
    """
    SHARDED --gather--> GATHERING --unshard--> UNSHARDED --reshard--> SHARDED

    Stage 0 is always UNSHARDED.
    """

    SHARDED = auto()
    """The parameters are flat slices of this rank's shard; the optimizer may step them. Stages 1
    and 2 keep the full buffer, whose other shards are out of date; stage 3 has freed it."""
    GATHERING = auto()
    """As SHARDED, and an all_gather is filling the full buffer."""
    UNSHARDED = auto()
    """The parameters are views of the full buffer, in their own shapes."""


class FlatUnit:
    """The flat buffers behind one unit's parameters.

    Note [views outlive their memory]
        Autograd saves views of a weight (`weight.t()` of a linear layer) for backward. If freeing
        meant dropping the full tensor, those views would keep its memory alive; so freeing resizes
        its storage to zero and gathering resizes it back: the saved views find the values again.
    """

    def __init__(
        self,
        index: int,
        plan: layout.Unit,
        parameters: Sequence[nn.Parameter],
        stage: Stage,
        comm: Communicator,
        ledger: Ledger,
        like: Tensor,
    ) -> None:
        """Lays out `parameters` with rank 0's values. Collective: a broadcast."""
        self.index, self.plan, self.parameters, self.stage = index, plan, parameters, stage
        self.ledger, self.rank = ledger, comm.rank
        self.full = like.new_empty(plan.padded)
        flatten(list(parameters), self.full, offsets=[e.offset for e in plan.entries])
        comm.broadcast(self.full)
        self.bytes = plan.padded * like.element_size()
        self.part = slice(comm.rank * plan.shard, (comm.rank + 1) * plan.shard)
        self.views = self._views(self.full, [p.shape for p in parameters])
        self.freed = stage.parameters is Keep.SHARD
        self.shard = self.full[self.part]
        if self.freed:
            self.shard = ledger.make(plan.shard, like).copy_(self.shard)
        self.gradient = ledger.empty("gradients", self._kept(stage.gradients), like)
        ledger.take("parameters", self._kept(stage.parameters) * like.element_size())
        self.state = State.UNSHARDED
        self.work: Work | None = None
        if stage.optimizer is Keep.FULL:
            self._point(self.views)
        else:
            if self.freed:
                ledger.take("gathered", self.bytes)
            self.reshard()

    def gather(self, comm: Communicator) -> None:
        """SHARDED -> GATHERING: start to fill the full buffer."""
        assert self.state is State.SHARDED
        if self.freed:
            self.ledger.take("gathered", self.bytes)
            self.full.untyped_storage().resize_(self.bytes)
        self.work = comm.all_gather(self.full, self.shard, async_op=True, tag=self.index)
        self.state = State.GATHERING

    def unshard(self) -> None:
        """GATHERING -> UNSHARDED: the parameters have their shapes and all ranks' values."""
        assert self.state is State.GATHERING
        assert self.work is not None
        self.work.wait()
        self.work = None
        self._point(self.views)
        self.state = State.UNSHARDED

    def reshard(self) -> None:
        """UNSHARDED -> SHARDED: the parameters are this rank's slices again."""
        assert self.state is State.UNSHARDED
        self._point(self.slices(self.shard))
        if self.freed:
            self._free()
            self.ledger.give("gathered", self.bytes)
        self.state = State.SHARDED

    def slices(self, shard: Tensor) -> list[Tensor]:
        """This rank's part of every parameter, as views of a shard-shaped buffer."""
        spans = (self.plan.local(e, self.rank) for e in self.plan.entries)
        return [shard[begin:end] for begin, end in spans]

    @property
    def own_gradient(self) -> Tensor:
        """What the optimizer reads: the full gradient in stage 0, else this rank's shard of it."""
        if self.stage.gradients is Keep.FULL and self.stage.optimizer is Keep.SHARD:
            return self.gradient[self.part]
        return self.gradient

    def gradient_views(self) -> list[Tensor]:
        """The gradient of each parameter, in the shape that it has between steps."""
        if self.stage.optimizer is Keep.SHARD:
            return self.slices(self.own_gradient)
        return self._views(self.gradient, [v.shape for v in self.views])

    def _views(self, full: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """The unit's parameters, in their shapes, as views of a flat buffer."""
        return [
            full[e.offset : e.offset + e.elements].view(shape)
            for e, shape in zip(self.plan.entries, shapes, strict=True)
        ]

    def _free(self) -> None:
        """See Note [views outlive their memory]."""
        if not self.full.untyped_storage().resizable():  # somebody holds it as a numpy array
            self.full = torch.empty_like(self.full)
            self.views = self._views(self.full, [v.shape for v in self.views])
        self.full.untyped_storage().resize_(0)

    def _kept(self, keep: Keep) -> int:
        return self.plan.padded if keep is Keep.FULL else self.plan.shard

    def _point(self, tensors: Sequence[Tensor]) -> None:
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.data = tensor
