"""WHEN collectives happen in training: one engine for DDP and ZeRO-1, 2, 3.

It hangs on the model's hooks:

    before a unit's forward    gather it (and start the gathers of the next ones), wait
    after its forward          stage 3: free it, but for the root
    before its backward        gather it again where it was freed
    when a gradient exists     move it into the unit's bucket, times 1/n
    when all of a unit's do    start the reduction
    before another's backward  start it where no more will come; stage 3: free the unit, unless the
                               other lies inside it
    at the end of backward     wait for the reductions; p.grad is ready for the optimizer

The reduction of one unit runs beside the backward of the next, and gathers have a communicator of
their own, so that neither queues behind the other (but see Note [gathers yield to reductions], in
`prefetch`). Nothing here looks at the stage's number: what differs is data (`stages.STAGES`). What
concerns backwards is in `backward`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ringdp.errors import UsageError
from ringdp.parallel import optim_state
from ringdp.parallel.accounts import Accounts
from ringdp.parallel.autograd_state import in_backward, transformed
from ringdp.parallel.backward import Backwards
from ringdp.parallel.gathering import Gathering
from ringdp.parallel.guards import copies, sliced, state_dict, steps
from ringdp.parallel.guards.unmanaged import Unmanaged
from ringdp.parallel.memory import Ledger
from ringdp.parallel.precision import Precision, cast_at
from ringdp.parallel.reducing import Reducing
from ringdp.parallel.stages import Keep, Stage
from ringdp.parallel.tracing.engine import EngineTracer
from ringdp.parallel.tracing.patching import Traced
from ringdp.parallel.unit import FlatUnit, State
from ringdp.parallel.values import outputs
from ringdp.parallel.values.devices import move_inputs
from ringdp.tape import recorder


class Engine(Accounts, Traced):
    """Keeps one model's parameters and gradients as its stage says. Made by `shard`."""

    tracer = EngineTracer

    def __init__(
        self,
        model: nn.Module,
        stage: Stage,
        units: Sequence[FlatUnit],
        modules: Sequence[nn.Module],
        ledger: Ledger,
        precision: Precision,
        *,
        prefetch_bytes: int | None,
        overlap: bool,
    ) -> None:
        """`modules`: of every unit. Collective: it makes two communicators."""
        self.model, self.stage, self.units, self.ledger = model, stage, units, ledger
        self.comm = comm = ledger.comm
        of: dict[nn.Module, list[int]] = {}
        for index, module in enumerate(modules):
            of.setdefault(module, []).append(index)
        self.groups = list(of.values())
        self.roots = self.groups[0]
        self.reducing = Reducing(comm.duplicate(), stage, ledger, overlap=overlap)
        self.yields = not (comm.wired or any(u.full.is_cuda for u in units))
        turns = self.reducing if self.yields else None
        self.gathering = Gathering(units, self.groups, comm.duplicate(), prefetch_bytes, turns)
        for each in (self.reducing.comm, self.gathering.comm):
            each.name_tags([unit.plan.name or "root" for unit in units])
        self._unmanaged = Unmanaged(model, units)

        self._writes = True  # whether what is written to whole parameters is kept
        self._emptied: sliced.Emptied = []  # while an optimizer steps
        self.always_gathers_state = False  # of an optimizer, and not in full_parameters() alone
        self.closed = False
        # Weakly, for what torch holds where no garbage collector looks.
        self._handles: list[Any] = steps.listen(weakref.proxy(self))
        weakref.finalize(self, _remove, self._handles)
        self.backwards = Backwards(self.gathering, self.reducing, self._handles)

        whole = self._rests_whole
        own = partial(copies.Hook, may_copy=whole)
        self._outputs = outputs.of_units(of, units, self.gathering.callers)
        for module, indices in of.items():
            self._hook(module, indices, own)
        self._handles += move_inputs(model, self.device, own)
        self._handles += cast_at(model, list(of), precision, lambda: not self._summoned, own)
        self._handles += state_dict.guard(model, whole, lambda: whole() and self._writes, own)
        if stage.optimizer is Keep.SHARD:
            sliced.register((p for u in units for p in u.parameters), self)
        else:
            self._handles += state_dict.of_masters(model, self.gathering, self._unmanaged, own)
        recorder.join(self)

    # ---- forward

    def _hook(self, module: nn.Module, indices: list[int], own: copies.Own) -> None:
        outputs, gathering = self._outputs[indices[0]], self.gathering
        before = own(lambda *_: self._before_forward(indices))
        after = own(lambda _, *args: self._after_forward(indices, *args))
        end = own(lambda *_: gathering.leave(indices) if outputs.end() else None)
        self._handles += [
            module.register_forward_pre_hook(before, prepend=True),
            module.register_forward_hook(after, with_kwargs=True),
            module.register_forward_hook(end, always_call=True),
        ]

    def _before_forward(self, indices: list[int]) -> None:
        if transformed(self._is_whole):
            return
        for index in indices if not self._summoned else ():
            if in_backward():
                self.backwards.recompute(index)
            else:
                self.backwards.settle()
                alone = self._is_alone()
                if index == 0 or alone or self.gathering.over:  # a new iteration
                    self._unmanaged.begin()
                    self.gathering.begin(foreseen=index == 0 or not alone)
                self.gathering.callers[index].update(self.gathering.in_use)
                self.gathering.use(index)
                self.backwards.register_grad_hooks(index)
        self._outputs[indices[0]].begin()

    def _after_forward(self, indices: list[int], args: Any, named: Any, output: Any) -> Any:
        if transformed(self._is_whole):
            return output
        output, starts = self._outputs[indices[0]].returned(output, (*args, *named.values()))
        if not self._summoned:
            for index in indices:
                free = index not in self.roots and not self.backwards.running
                self.gathering.done_with(index, free=free)
        backwards = weakref.proxy(self.backwards)  # as the model may keep what it returns
        for t in starts:
            t.register_hook(lambda _: backwards.reach(indices))  # type: ignore[no-untyped-call]
        ends = indices is self.roots or self._is_alone()
        if ends and not (starts or self._summoned or self.gathering.again):
            self.gathering.end(learn=False)
        return output

    def _is_alone(self) -> bool:
        """Whether what is called now lies in no unit's call and has no backward."""
        return not (self.gathering.in_use or torch.is_grad_enabled() or in_backward())

    @property
    def _summoned(self) -> bool:
        return self.units[0].state is State.SUMMONED

    @property
    def gathers_state(self) -> bool:
        """Whether the state_dict of an optimizer is now gathered, and not an error."""
        return self.always_gathers_state or self._summoned

    def _rests_whole(self) -> bool:
        return self._summoned or self.stage.optimizer is Keep.FULL

    def _is_whole(self) -> bool:
        """Always, and not only at rest."""
        return self._summoned or all(u.static for u in self.units)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Any optimizer's. A forward may be left open: by an exception, or without its backward."""
        if not steps.has_any(optimizer, self.units):
            return  # other ranks may not step it: what is gathered must not depend on it
        steps.check(optimizer, self.stage, summoned=self._summoned)
        self.take(optimizer)
        self.check_reduced("the optimizer steps")
        self.backwards.settle()
        self.gathering.end(learn=False)
        self.gathering.let_write()
        sliced.restore(self._emptied)  # after a step that has raised
        self._emptied = steps.release(self.units)

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """It steps these parameters, or has state of them: from now on its state_dict is whole."""
        if self.stage.optimizer is Keep.SHARD:
            optim_state.take(optimizer, self)

    def check_reduced(self, what: str) -> None:
        """Raises UsageError, which begins with `what`, while gradients of no_sync wait."""
        self.reducing.unreduced.check_none_waits(self.units, what)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Any optimizer's."""
        steps.restore(self.units, self._emptied)

    # ---- for the user

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards within it keep their gradients to themselves; the next one outside reduces all.

        In every stage a rank then holds whole gradients, until that one, in the masters' dtype. So
        it saves traffic, not memory. zero_grad(), the model's or the optimizer's, clears them, as
        in torch's DDP (torch's FSDP2 keeps them); an optimizer's step, clipping, or a change of
        p.grad before they are reduced raises UsageError.
        """
        before, self.backwards.sync = self.backwards.sync, False
        try:
            yield
        finally:
            self.backwards.sync = before

    @contextmanager
    def full_parameters(self, *, write: bool = False) -> Iterator[None]:
        """Within it every parameter has its shape and all values, as at rest. Collective.

        For reading, as in evaluation (without gradients) or saving: what is written is lost. With
        `write` it is kept, for which every rank must write the same. It takes a whole model more,
        which `memory` leaves out, and which stays with who takes a state_dict. To keep the model
        whole, `close` within it.
        """
        if self._summoned:
            self._writes |= write
            yield
            return
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
        """Take off the hooks and stop the engine's communicators, when nothing is in flight there.

        The parameters stay as they are: slices from stage 1 on, with which the model cannot run;
        within `full_parameters`, or in stage 0, whole, so that the model is an ordinary one again.
        """
        if self.closed:
            return
        self.closed = True
        recorder.leave(self)
        whole = self._rests_whole()
        if whole:
            copies.unmark(self.model)
        _remove(self._handles)
        with closing(self.reducing.comm), closing(self.gathering.comm):
            ended = self.reducing.comm.ended or self.gathering.comm.ended
            if not ended:
                self.backwards.settle()
            if whole or not ended:  # what is whole at rest gets there by itself
                self.gathering.end(learn=False)


def check_engine(function: str, given: object) -> None:
    """Raise UsageError for anything else, such as what torch's functions of that name take."""
    if not isinstance(given, Engine):
        found = type(given).__name__
        raise UsageError(
            f"{function}: engine is a {found}; allowed: what ringdp.shard returns, or the .engine "
            "of what another library's name returns"
        )


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
