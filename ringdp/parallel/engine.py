"""WHEN collectives happen in training: one engine for DDP and ZeRO-1, 2, 3.

Hooks on the model drive it:

    before a unit's forward    gather it (and start the gathers of the next ones), wait
    after its forward          stage 3: free it, unless it is the root or to be kept
    before its backward        gather it again if it was freed
    when a gradient is made    move it into the unit's bucket, times 1/n
    when all of them are       start the reduction
    before another's backward  start it if no more gradients will come; stage 3: free the unit,
                               unless it encloses the other one
    at the end of backward     wait for the reductions; p.grad is ready for the optimizer

The reduction of one unit overlaps with the backward of the next. Gathers have a communicator of
their own, so that neither queues behind the other (but see Note [gathers yield to reductions] in
`prefetch`). Nothing here looks at the stage's number: stages differ in data (`stages.STAGES`). See
`forward` and `backward` for the hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from ringdp.errors import UsageError
from ringdp.parallel.accounting.formula import Sharding, formula, traffic
from ringdp.parallel.accounting.memory import Ledger, Memory, state_bytes
from ringdp.parallel.backward import Backwards
from ringdp.parallel.forward import Forwards
from ringdp.parallel.gathering import Gathering
from ringdp.parallel.guards import copies, sliced, state_dict, steps, wrapped
from ringdp.parallel.guards.unmanaged import Unmanaged
from ringdp.parallel.optimizer import state as optim_state
from ringdp.parallel.optimizer.kinds import check_slices
from ringdp.parallel.reducing import Reducing
from ringdp.parallel.stages import Stage
from ringdp.parallel.unit import FlatUnit
from ringdp.parallel.values.outputs import UnitOutputs
from ringdp.tape import recorder


class Engine:
    """Shards one model's parameters and gradients as its stage says. Created by `shard`."""

    def __init__(
        self,
        model: nn.Module,
        stage: Stage,
        units: Sequence[FlatUnit],
        ledger: Ledger,
        *,
        kept: Iterable[int],
        prefetch_bytes: int | None,
        overlap: bool,
    ) -> None:
        """Collective: creates two communicators. `kept`: see `Gathering`."""
        self.model, self.stage, self.units, self.ledger = model, stage, units, ledger
        ranks = ledger.ranks
        self.comm, self.shards = ranks.every, ranks.shards  # all, and those that hold one model
        of: dict[nn.Module, list[int]] = {}
        for unit in units:
            of.setdefault(unit.module, []).append(unit.index)
        self.groups = list(of.values())
        duplicate = ranks.shards.duplicate
        self.reducing = Reducing(duplicate(), ledger, ranks.replicas, overlap=overlap)
        beside = ranks.every.wired or any(u.full.is_cuda for u in units)
        turns = None if beside else self.reducing
        self.gathering = Gathering(units, self.groups, duplicate(), prefetch_bytes, turns, kept)
        comms = self.reducing.comm, self.gathering.comm, ranks.replicas, ranks.near
        for each in filter(None, comms):
            each.name_tags([unit.plan.name or "root" for unit in units])
        if ranks.made:  # a rank that dies is in some of them, but all ranks wait for it
            self.reducing.comm.end_with(self.gathering.comm, *ranks.made)
        self._unmanaged = Unmanaged(model, units)

        self._writes = True  # whether full_parameters keeps what is written
        self.stepping = steps.Stepping(ranks.shards, units)
        self.always_gathers_state = False  # optimizers' state_dict, also outside full_parameters
        self.closed = False
        me = weakref.proxy(self)  # torch holds it where the garbage collector cannot see it
        self._handles = steps.listen(me)
        self._handles.append(wrapped.Refusal(model))
        weakref.finalize(self, _remove, self._handles)
        self.backwards = Backwards(self.gathering, self.reducing, self._handles)
        self.forwards = Forwards(model, self.gathering, self.backwards, self._begin)

        whole, add_hook = self._rests_whole, self.add_hook
        for module, indices in of.items():
            outputs = UnitOutputs(module, [units[i] for i in indices], of)
            self.forwards.follow(module, indices, outputs, add_hook)
        state_dict.guard(model, whole, lambda: whole() and self._writes, add_hook)
        state_dict.own_storages(model, units, add_hook)
        parameters = [p for unit in units for p in unit.parameters]
        if stage.slices:
            sliced.register(parameters, self)
        else:
            sliced.forget(parameters)
            state_dict.of_masters(model, self.gathering, self._unmanaged, add_hook)

    def add_hook(
        self, register: Callable[..., Any], call: Callable[..., Any], **options: Any
    ) -> None:
        """A `guards.copies.AddHook`."""
        hook = copies.EngineHook(call, may_copy=self._rests_whole)
        self._handles.append(register(hook, **options))

    def __deepcopy__(self, memo: object) -> None:
        """A copy of a model that has its engine as an attribute has None there."""

    def __reduce__(self) -> NoReturn:
        copies.refuse_pickle()

    def _begin(self) -> None:
        """An iteration begins."""
        self.stepping.undo()
        self._unmanaged.begin()
        wrapped.check(self.units)

    @property
    def gathers_state(self) -> bool:
        """Whether an optimizer's state_dict is gathered now, rather than an error."""
        return self.always_gathers_state or self.gathering.summoned

    def computes(self) -> bool:
        """Whether parameters are in the dtype that they compute in, not their masters'."""
        return not self.gathering.summoned

    def _rests_whole(self) -> bool:
        return self.gathering.summoned or not self.stage.slices

    def before_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Before any optimizer's step, of which it returns whether it is of parameters here. A
        forward may lack its backward, or have raised."""
        if not steps.has_any(optimizer, self.units):
            return False  # other ranks may not step it, so no collective may depend on it
        if self.gathering.summoned:
            steps.refuse_within()
        if self.stage.slices:
            check_slices(optimizer, f"in stage {self.stage.number}", "or stage 0")
        self.check_reduced("the optimizer steps")
        self.take(optimizer)
        self.backwards.settle()
        self.gathering.end(learn=False)
        self.gathering.let_write()
        self.stepping.begin()
        return True

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has these parameters: from now on its state_dict is of whole ones."""
        if self.stage.slices:
            optim_state.take(optimizer, self)

    def check_reduced(self, what: str) -> None:
        """Raise UsageError, which begins with `what`, within backward, or if gradients of no_sync
        are not reduced."""
        self.backwards.check_over(what)
        self.reducing.unreduced.check_none_waits(self.units, what)

    # ---- for the user

    @property
    def device(self) -> torch.device:
        """Where the model computes; if that is a GPU, inputs are moved there."""
        return self.ledger.device

    def memory(self, optimizer: torch.optim.Optimizer) -> Memory:
        """Bytes on this rank as counted so far; peaks are over the whole run."""
        now, peak = self.ledger.now, self.ledger.peak
        return Memory(
            parameters=now["parameters"],
            gathered_peak=peak["gathered"],
            gradients=now["gradients"],
            buckets=peak["passing"] - peak["gathered"],
            optimizer=state_bytes(optimizer.state.values()),
        )

    def memory_formula(self, *, per_element: int = 8, per_parameter: int = 4) -> Memory:
        """What `memory` must be. The defaults are the optimizer bytes of Adam in float32."""
        return formula(
            self._sharding,
            self.shards.rank,
            overlap=self.reducing.overlap,
            yields=self.gathering.reducing is not None,
            per_element=per_element,
            per_parameter=per_parameter,
        )

    def sent_bytes(self) -> int:
        """Bytes this rank has sent for gathers and reductions so far."""
        near = self.ledger.ranks.near
        gathers = self.gathering.comm.sent_bytes() + (near.sent_bytes() if near else 0)
        return gathers + self.reducing.sent_bytes()

    def traffic_formula(self) -> int:
        """Bytes this rank sends in a step of one forward and one backward."""
        return traffic(self._sharding)

    @property
    def _sharding(self) -> Sharding:
        units, widths = [u.plan for u in self.units], [u.widths for u in self.units]
        g, replicas = self.gathering, self.ledger.ranks.replica_count
        near = [u.piece.near.size if u.piece.near else 0 for u in self.units]
        return Sharding(units, widths, self.groups, self.stage, g.limit, g.kept, replicas, near)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them; the next backward outside reduces all.

        Until then a rank holds whole gradients in the masters' dtype, in every stage: this saves
        traffic, not memory. zero_grad() of the model or the optimizer clears them, as in torch's
        DDP (torch's FSDP2 keeps them). An optimizer's step, clipping, or a change of p.grad before
        they are reduced raises UsageError.
        """
        before, self.backwards.sync = self.backwards.sync, False
        try:
            yield
        finally:
            self.backwards.sync = before

    @contextmanager
    def full_parameters(self, *, write: bool = False) -> Iterator[None]:
        """Inside it every parameter is whole, as at rest: in its shape and dtype. Collective.

        For reading, such as evaluation without gradients, or saving: writes are lost. With `write`
        they are kept; every rank must write the same. Takes the memory of one more whole model,
        which `memory` does not count, and which a state_dict taken here keeps. To leave the model
        whole, call `close` inside.
        """
        if self.gathering.summoned:
            self._writes |= write
            yield
            return
        self.backwards.check_over("full_parameters() is entered")
        self.stepping.undo()
        self.backwards.settle()
        self.gathering.summon_all()
        self._writes = write
        try:
            yield
        finally:
            write, self._writes = self._writes, True
            if not self.closed:
                self.gathering.dismiss_all(write=write)
                self._unmanaged.check()
                self.gathering.end(learn=False)

    def close(self) -> None:
        """Remove the hooks, and close the engine's communicators once nothing is in flight.

        From stage 1 on the parameters stay slices, with which the model cannot run. Inside
        `full_parameters`, or in stage 0, they stay whole: the model is an ordinary one again.
        Gradients that are slices are dropped then, and an optimizer whose state is of slices
        refuses to step, until it loads whole state or the model is sharded again alike.
        """
        if self.closed:
            return
        self.closed = True
        recorder.leave(self)
        whole = self._rests_whole()
        if whole:
            copies.unmark(self.model)
            if self.stage.slices:
                optim_state.leave(self)
        _remove(self._handles)
        with closing(self.ledger.ranks), closing(self.reducing.comm), closing(self.gathering.comm):
            ended = self.reducing.ended or self.gathering.comm.ended
            if not ended:
                self.backwards.settle()
            if whole or not ended:  # a whole model needs no collective
                self.gathering.end(learn=False)


def check_engine(function: str, given: object) -> None:
    """Raise UsageError if `given` is no Engine (torch's functions of that name take others)."""
    if not isinstance(given, Engine):
        found = type(given).__name__
        raise UsageError(
            f"{function}: engine is a {found}; allowed: what ringdp.shard returns, or the .engine "
            "of what another library's name returns; with DistributedDataParallel use torch's own"
        )


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()
