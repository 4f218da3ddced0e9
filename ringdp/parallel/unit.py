"""One unit's tensors: how they are gathered and freed. `gathering` decides when."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ringdp.comm import Communicator, Work
from ringdp.kernels import flatten
from ringdp.parallel import layout
from ringdp.parallel.accounting.memory import Ledger, widths_of
from ringdp.parallel.cut import Cut
from ringdp.parallel.gradients import Gradients
from ringdp.parallel.guards import assigned, resting
from ringdp.parallel.guards.computed import (
    ComputeParam,
    GatheredParam,
    Place,
    WholeParam,
    put,
    set_data,
)
from ringdp.parallel.piece import Piece
from ringdp.parallel.pool import beside, show
from ringdp.parallel.stages import Stage
from ringdp.parallel.state import State
from ringdp.parallel.units import UnitSpec


class FlatUnit:
    """The flat buffers behind one unit's parameters.

    full      [padded] in the compute dtype: what is gathered, of which `views` are the parameters
    coming    stage 3: what an all_gather fills, whose memory `full` gets; see below
    shard     [shard] in the compute dtype: what this rank contributes to the gather; not used if
              parameters are offloaded
    piece     stage 3: what this rank keeps of `full` from the unit's forward to its backward
    master    [shard] (stage 0: [padded]) in the master dtype: what the optimizer steps
    computed  the modules' parameters while UNSHARDED

    Note [masters apart]
        If parameters compute in another dtype than the optimizer steps, or are offloaded, `full`
        and `master` are different memory. Then the modules hold other nn.Parameters (`computed`)
        while the unit is UNSHARDED, and autograd accumulates gradients there. A single nn.Parameter
        does not do: a tensor whose dtype changes gets a new gradient accumulator, and the gradients
        that a backward has yet to make could not be counted.

    Note [views outlive their memory]
        Autograd saves views of a weight for backward (`weight.t()` of a linear layer). They would
        keep the memory alive if the full tensor were merely dropped. So freeing empties its storage
        and gathering fills it again: the saved views see the new values. On CPUs it stays empty
        until all values have come: an operation that reads weights too early, since the engine did
        not foresee its backward, is an error of torch's rather than silently wrong.
    """

    def __init__(
        self,
        index: int,
        plan: layout.Unit,
        spec: UnitSpec,
        places: Sequence[Sequence[Place]],
        stage: Stage,
        ledger: Ledger,
    ) -> None:
        """Takes over the parameters, with rank 0's values. Collective: a broadcast."""
        ranks, offload, dtypes = ledger.ranks, ledger.offload, spec.dtypes
        parameters = [p for _, p in spec.parameters]
        self.parameters: Sequence[nn.Parameter] = parameters
        self.index, self.plan, self.module, self.stage = index, plan, spec.module, stage
        self.places, self.dtypes, self.ledger = places, dtypes, ledger
        self.divisor: float = ranks.every.size  # of its gradients' sums
        self.sync = True  # whether backwards reduce its gradients, outside of no_sync
        self.widths = widths_of(dtypes, offload, trainable=spec.trained)
        self.apart = self.widths.apart  # See Note [masters apart]
        self.freed, self.slices = stage.freed, stage.slices
        self.piece = Piece(ranks.near, ledger)
        self.cut = Cut(plan, [p.shape for p in parameters], ranks.shards.rank, slices=self.slices)
        ledger.pool.let_go()  # the previous unit's memory
        whole = torch.empty(plan.padded, dtype=dtypes.master, device=ledger.device)
        flatten(parameters, whole, offsets=[e.offset for e in plan.entries])
        ranks.every.broadcast(whole)

        self.full = whole
        if self.apart:
            self.full = torch.empty(plan.padded, dtype=dtypes.compute, device=ledger.device)
        self.bytes = plan.padded * dtypes.compute.itemsize
        self.shard = self.full[self.cut.part]
        if self.freed and not offload.parameters:
            self.shard = ledger.make(plan.shard, dtypes.compute)
            self.shard.copy_(whole[self.cut.part])
        self.master = self._master(whole)
        self.views = self.cut.whole(self.full)
        self.computed: Sequence[nn.Parameter] = parameters
        if self.apart:
            self.computed = [
                ComputeParam.of(p, v) for p, v in zip(parameters, self.views, strict=True)
            ]
        self.gradients = self._gradients()
        ledger.take("parameters", self.widths.parameters(plan, stage))
        self.state = State.UNSHARDED
        self.gathered = list[int]()  # the versions of `parameters` that were gathered last
        self.versions = list[int]()  # see `lost`
        self.work: Work | None = None
        self.reader: torch.cuda.Stream | None = None  # copies the master from the host
        self._settle_in(self.views if self.static else self.rest)
        if not self.static:
            if self.freed:
                self.coming = beside(self.full)  # what `work` fills
                ledger.take("gathered", self.bytes)
            self.reshard()

    @property
    def static(self) -> bool:
        """Whether it is always whole: never SHARDED."""
        return not self.slices and not self.apart

    def gather(self, comm: Communicator) -> None:
        """SHARDED -> GATHERING: start the all_gather. Collective."""
        assert self.state is State.SHARDED
        if self.is_stale():
            self.piece.forget()
        self.settle()
        before, self.gathered = self.gathered, self._versions()
        if self.apart and self.gathered != before:
            increment_version(self.computed)  # autograd may have saved the old values
        if self.freed:
            full = self.coming
            if not full.untyped_storage().nbytes():  # else Ctrl-C ended a gather that may go on
                self.ledger.pool.fill(full.untyped_storage(), self.bytes)
                self.ledger.take("gathered", self.bytes)
        else:
            full = self.full.data  # whose writes do not invalidate views that autograd has saved
        shard = full[self.cut.part] if self.ledger.offload.parameters else self.shard
        if not self.slices:
            full.copy_(self.master)
            resting.become(self.parameters, resting.RestingParam)
        elif (work := self.piece.gather(full, self.index)) is not None:
            self.work = work
        else:
            if self.apart:
                shard.data.copy_(self.master, non_blocking=True)
                if full.is_cuda and self.ledger.offload.any:
                    self.reader = torch.cuda.current_stream(full.device)
            if self.plan.padded:  # the root may have no parameters
                self.work = comm.all_gather(full, shard, async_op=True, tag=self.index)
        self.state = State.GATHERING

    def is_stale(self) -> bool:
        """Whether the slices were written to, or assigned, since the last gather began, as where a
        model's forward averages weights before it calls the units. Does not see writes through the
        `.data` of a slice, or by numpy."""
        return self.gathered != self._versions() or self._has_moved()

    @resting.unguarded
    def _versions(self) -> list[int]:
        return [p._version for p in self.parameters]

    @resting.unguarded
    def unshard(self) -> None:
        """GATHERING -> UNSHARDED: wait; the parameters are whole and in their shapes."""
        assert self.state is State.GATHERING
        if self.work is not None:
            self.work.wait()
            self.work = None
            if self.freed:
                show(self.coming, self.full)
        kind: type[nn.Parameter] = GatheredParam if self.freed else WholeParam
        if self.apart:
            kind = resting.ShardedParam if self.slices else resting.RestingParam
            for c, p in zip(self.computed, self.parameters, strict=True):
                c.requires_grad_(p.requires_grad)
            put(self.places, self.computed)
        resting.become(self.parameters, kind)
        self._point(self.computed, self.views)
        self.state, self.versions = State.UNSHARDED, [p._version for p in self.computed]

    def reshard(self, *, again: bool = False) -> None:
        """UNSHARDED -> SHARDED: the parameters are slices again; stage 3 frees the full buffer, but
        keeps a piece if it will be gathered `again` with the same values."""
        if again:
            self.piece.keep(self.full)
        self._lay_down()
        if self.freed:
            self._free()
            self.ledger.give("gathered", self.bytes)
        self.state = State.SHARDED

    def set_aside(self) -> None:
        """UNSHARDED -> GATHERING: the parameters are slices; the full buffer is kept."""
        self._lay_down()
        self.state = State.GATHERING

    @resting.unguarded
    def drop(self) -> None:
        """GATHERING -> SHARDED: wait, and forget what was gathered. Slices keep what was written to
        them meanwhile, or assigned."""
        given = [p.data for p in self.parameters]
        self.unshard()
        self.reshard()
        self._point(self.parameters, given)

    def _lay_down(self) -> None:
        assert self.state is State.UNSHARDED
        if self.apart:
            put(self.places, self.parameters)
        else:
            self._point(self.parameters, self.rest)
        self._guard()

    def _guard(self) -> None:
        resting.become(self.parameters, resting.ShardedParam if self.slices else nn.Parameter)

    def lost(self) -> list[str]:
        """UNSHARDED: the names of parameters that were written to where it will be lost. Does not
        see writes through the `.data` of a view, or by numpy."""
        kept = not (self.apart or self.freed)  # the master is a part of what was gathered
        return [
            entry.name
            for p, view, version, entry in zip(
                self.computed, self.views, self.versions, self.plan.entries, strict=True
            )
            if p.data_ptr() != view.data_ptr() or not (kept or p._version == version)
        ]

    def summon(self, comm: Communicator) -> None:
        """SHARDED (or static) -> SUMMONED: gather the masters into new memory. Collective."""
        assert self.static or self.state is State.SHARDED
        self.rested = self.rest
        self.summoned = torch.empty_like(self.master).resize_(self.plan.padded)
        views = self.cut.whole(self.summoned)
        if self.slices:
            comm.all_gather(self.summoned, self.master, tag=self.index)
        else:
            _copy(views, self.rested)
        resting.become(self.parameters, nn.Parameter)
        self._point(self.parameters, views)
        self.state = State.SUMMONED

    def dismiss(self, *, write: bool) -> None:
        """SUMMONED -> SHARDED (or static). `write`: keep what was written to the parameters, or
        assigned to p.data."""
        assert self.state is State.SUMMONED
        kept = zip(self.rested, self.parameters, self.cut.parts, strict=True)
        for rested, p, (begin, end) in kept if write else ():
            rested.copy_(p.data.reshape(-1)[begin:end] if self.slices else p.data)
        self._point(self.parameters, self.rested)
        self._guard()
        del self.summoned, self.rested
        self.state = State.UNSHARDED if self.static else State.SHARDED

    def settle(self) -> None:
        """At rest: take in tensors that the user has assigned to `p.data` (a static unit's
        parameters may lie anywhere). The unit moves to new memory, as the user may hold tensors in
        the old one. Raises UsageError for another shape or dtype."""
        if self.static:
            self.check(self.views)
        elif self._has_moved():
            self.check(self.rest)
            given = [p.data for p in self.parameters]
            self._move()
            _copy(self.rest, given)
            self._settle_in(self.rest)

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raise UsageError if a parameter has another shape or dtype than its tensor."""
        assigned.check(self.parameters, tensors, [e.name for e in self.plan.entries])

    @torch.inference_mode(False)  # inference tensors cannot train
    def _move(self) -> None:
        """Move the buffer behind the parameters to new memory."""
        if self.apart:
            was = self.master
            self.master = torch.empty_like(was, pin_memory=was.is_pinned()).copy_(was)
        elif self.freed:
            made = self.ledger.make(self.plan.shard, self.dtypes.compute)
            self.master = self.shard = made.copy_(self.master)
        else:
            self.full = self.full.clone()
            self.views = self.cut.whole(self.full)
            self.master = self.shard = self.full[self.cut.part]

    def _settle_in(self, tensors: Sequence[Tensor]) -> None:
        """Point the parameters to these tensors, at rest."""
        self._point(self.parameters, tensors)
        self._homes = assigned.homes(tensors)

    @resting.unguarded
    def _has_moved(self) -> bool:
        """Whether the user has assigned to a parameter's `.data`. Runs in every gather."""
        dtype = self.dtypes.master
        return assigned.homes(self.parameters) != self._homes or any(
            p.dtype != dtype for p in self.parameters
        )

    @property
    def rest(self) -> list[Tensor]:
        """What the parameters are between uses: views of the master."""
        if self.static:
            return [p.data for p in self.parameters]  # the user may assign to p.data
        return self.cut.kept(self.master)

    def _master(self, whole: Tensor) -> Tensor:
        """What the optimizer steps: everything in stage 0, else this rank's shard."""
        if not self.slices:
            return whole
        if not self.apart:
            return self.shard
        own, offload = whole[self.cut.part], self.ledger.offload
        return offload.empty(own.numel(), own.dtype).copy_(own) if offload.any else own.clone()

    def _gradients(self) -> Gradients:
        return Gradients(self.cut, self.stage, self.dtypes, self.widths, self.ledger)

    @torch.inference_mode(False)  # as for `_move`
    def thaw(self) -> None:
        """A parameter trains that was frozen: allocate gradients if there are none."""
        if not self.widths.trainable:
            self.widths = self.widths._replace(trainable=True)
            self.gradients = self._gradients()

    def renew_gradients(self) -> None:
        """Move to other memory, as the user holds tensors in this one."""
        self.ledger.give("gradients", self.widths.gradients(self.plan, self.stage))
        self.gradients = self._gradients()

    @torch.inference_mode(False)  # as for `_move`
    def _free(self) -> None:
        """See Note [views outlive their memory]."""
        if not self.full.untyped_storage().resizable():  # a numpy array shares it
            self.full = torch.empty_like(self.full)
            self.views, self.coming = self.cut.whole(self.full), beside(self.full)
        self.ledger.pool.empty(self.full.untyped_storage())

    def _point(self, parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor]) -> None:
        for parameter, tensor in zip(parameters, tensors, strict=True):
            set_data(parameter, tensor)


def _copy(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, new in zip(tensors, values, strict=True):
        tensor.copy_(new)
