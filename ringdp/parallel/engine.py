"""WHEN collectives happen in training: one engine for DDP and ZeRO-1, 2, 3.

It hangs on the model's hooks:

    before a unit's forward    gather it (and start the gathers of the next ones), wait
    after its forward          stage 3: free it, but for the root
    before its backward        gather it again where it was freed
    when its gradients exist   flatten, scale by 1/n, start the reduction
    before another's backward  stage 3: free it, unless the other lies inside it
    at the end of backward     wait for the reductions; p.grad is ready for the optimizer

The reduction of one unit runs beside the backward of the next, and gathers have a communicator of
their own, so that neither waits for the other. Nothing here looks at the stage's number: what
differs between stages is data (`stages.STAGES`).

A parameter that got no gradient in a backward counts as zero there. A backward that raises loses
the gradients accumulated so far; the next forward starts afresh. Stage 3 refuses `create_graph`.
The loss must be made of what units return, as tensors in containers or dataclasses: the hooks that
tell the engine that a unit's backward starts hang on those.

Note [nodes run in reverse]
    Autograd runs the nodes that are ready in the reverse order of their making. So once the
    backward of one unit starts, the last call of any unit after it is through, whether or not it
    had gradients to make, and its weights (frozen ones too) may go. Only units around it still have
    nodes to run, and one called before as well is gathered again by that call's hook. The hooks of
    units that return the same tensor run the inner one's first, so that one stays too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ringdp.comm import Communicator, world
from ringdp.errors import UsageError
from ringdp.parallel import memory
from ringdp.parallel.gathering import Gathering
from ringdp.parallel.layout import layout
from ringdp.parallel.memory import Ledger, Memory
from ringdp.parallel.outputs import tensors
from ringdp.parallel.reducing import Reducing
from ringdp.parallel.replicas import broadcast
from ringdp.parallel.stages import Keep, stage_of
from ringdp.parallel.unit import FlatUnit, State
from ringdp.parallel.units import UnitRule, find_units, like


class Engine:
    """Keeps one model's parameters and gradients as its stage says. Made by `shard`."""

    def __init__(
        self,
        model: nn.Module,
        stage: int,
        unit: UnitRule | None,
        comm: Communicator,
        prefetch_bytes: int | None,
    ) -> None:
        self.stage, self.model, self.comm = stage_of(stage), model, comm
        found = find_units(model, unit)
        self.plan = layout(
            [(f.name, [(n, p.numel()) for n, p in f.parameters]) for f in found], comm.size
        )
        self.ledger, empty = Ledger(comm), like(model)
        self.units = [
            FlatUnit(i, plan, [p for _, p in f.parameters], self.stage, comm, self.ledger, empty)
            for i, (plan, f) in enumerate(zip(self.plan, found, strict=True))
        ]
        broadcast(comm, model.buffers())
        self.ledger.peak = self.ledger.now.copy()
        self.itemsize = empty.element_size()
        self.gathering = Gathering(self.units, comm.duplicate(), prefetch_bytes)
        self.reducing = Reducing(comm.duplicate(), self.stage, self.ledger)

        self._around: list[set[int]] = [set() for _ in self.units]  # units whose forward calls it
        self._awaiting: dict[int, int] = {}  # unit -> gradients that its backward still owes
        self._accumulate: dict[int, bool] = {}
        self._reduced: set[int] = set()
        self._held = self._closed = False  # held by full_parameters
        # An optimizer may step with a forward left open: by an exception, or without its backward.
        self._handles: list[Any] = [
            register_optimizer_step_pre_hook(lambda *_: self._rest(learn=False))
        ]
        for index, f in enumerate(found):
            self._hook(index, f.module)

    # ---- forward

    def _hook(self, index: int, module: nn.Module) -> None:
        self._handles += [
            module.register_forward_pre_hook(lambda *_: self._before_forward(index), prepend=True),
            module.register_forward_hook(lambda _m, _i, out: self._after_forward(index, out)),
        ]
        for p in self.units[index].parameters:
            if p.requires_grad:
                self._handles.append(
                    p.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                        lambda _p: self._gradient_made(index)
                    )
                )

    def _before_forward(self, index: int) -> None:
        if torch._C._current_graph_task_id() == -1:  # not a recomputation within backward
            if self._awaiting:
                self._abandon_backward()
            if index == 0:  # a new iteration
                self.gathering.begin()
            self._around[index].update(self.gathering.in_use)
        self._use(index)

    def _after_forward(self, index: int, output: Any) -> None:
        made = [t for t in tensors(output) if t.requires_grad]
        free = index != 0 and not self._awaiting and not self._held
        self.gathering.done_with(index, free=free)
        for t in made:
            t.register_hook(  # type: ignore[no-untyped-call]
                lambda _g: self._before_backward(index)
            )
        if index == 0 and not made and not self._held:
            self._rest(learn=False)

    def _use(self, index: int) -> None:
        if self._awaiting:  # See Note [nodes run in reverse]
            for other in list(self.gathering.in_use):
                nested = other in self._around[index] or index in self._around[other]
                if other != index and not nested:
                    self.gathering.done_with(other, free=True)
        self.gathering.use(index)

    # ---- backward

    def _before_backward(self, index: int) -> None:
        if index in self._awaiting:
            if self.units[index].state is not State.UNSHARDED:
                self._use(index)
            return
        if self.stage.parameters is Keep.SHARD and torch.is_grad_enabled():
            raise UsageError("stage 3 frees weights that create_graph=True needs; use stage 2")
        if self._held:
            raise UsageError("backward within full_parameters(), which is for reading only")
        if not self._awaiting:
            Variable._execution_engine.queue_callback(self._after_backward)
        self._await_gradients(index)
        self._use(index)

    def _await_gradients(self, index: int) -> None:
        unit = self.units[index]
        trainable = [p for p in unit.parameters if p.requires_grad]
        self._awaiting[index] = len(trainable)
        self._accumulate[index] = any(p.grad is not None for p in trainable)
        for p, kept in zip(unit.parameters, unit.gradient_views(), strict=True):
            if self._accumulate[index]:
                if p.grad is None:
                    kept.zero_()
                elif p.grad.data_ptr() != kept.data_ptr():  # the user has put another one there
                    kept.copy_(p.grad)
            p.grad = None

    def _gradient_made(self, index: int) -> None:
        if index not in self._awaiting:
            raise UsageError(
                f"a parameter of unit {self.plan[index].name!r} got a gradient, but none of the "
                "unit's outputs did: the engine could not prepare its backward. Return the tensors "
                "that the loss is made of from the unit's forward."
            )
        if index in self._reduced:
            raise UsageError(
                f"a parameter of unit {self.plan[index].name!r} got a second gradient in one "
                "backward, as a module does that is used twice under reentrant checkpointing. "
                "Pass use_reentrant=False to torch.utils.checkpoint."
            )
        self._awaiting[index] -= 1
        if self._awaiting[index] == 0 and index != 0:
            self._reduce(index)

    def _reduce(self, index: int) -> None:
        self.reducing.start(self.units[index], accumulate=self._accumulate[index])
        self._reduced.add(index)

    def _after_backward(self) -> None:
        # Units that got some gradients or none, in one order on every rank: the root is last.
        for index in reversed(range(len(self.units))):
            if index not in self._awaiting:
                self._await_gradients(index)
            if index not in self._reduced:
                self._reduce(index)
        self._end_backward(learn=True)
        for unit in self.units:
            for p, gradient in zip(unit.parameters, unit.gradient_views(), strict=True):
                if p.requires_grad and gradient.numel():
                    p.grad = gradient

    def _abandon_backward(self) -> None:
        """Clear what a backward that raised has left."""
        self._end_backward(learn=False)
        for p in self.model.parameters():
            p.grad = None

    def _end_backward(self, *, learn: bool) -> None:
        self.reducing.finish()
        self._awaiting.clear()
        self._reduced.clear()
        self._rest(learn=learn)

    def _rest(self, *, learn: bool) -> None:
        """Between iterations: every unit sharded, nothing in flight."""
        if self.stage.optimizer is Keep.SHARD and not self._held:
            self.gathering.reshard_all()
        self.gathering.end(learn=learn)

    # ---- for the user

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """Within it every parameter has its shape and all values, on every rank. Collective.

        For reading, as in evaluation (without gradients) or saving: what is written is lost.
        `memory` leaves out what it gathers. To keep the model whole, `close` within it.
        """
        if self._held:
            yield
            return
        peak = self.ledger.peak["gathered"]
        self.gathering.gather_all()
        self._held = True
        try:
            yield
        finally:
            self._held = False
            if not self._closed:
                self._rest(learn=False)
            self.ledger.peak["gathered"] = peak

    def memory(self, optimizer: torch.optim.Optimizer) -> Memory:
        """Bytes on this rank as counted so far; peaks are over the whole run."""
        now, peak = self.ledger.now, self.ledger.peak
        return Memory(
            parameters=now["parameters"],
            gathered_peak=peak["gathered"],
            gradients=now["gradients"],
            buckets=peak["buckets"],
            optimizer=memory.state_bytes(optimizer),
        )

    def memory_formula(self, *, per_element: int = 8, per_parameter: int = 4) -> Memory:
        """What `memory` must say. The defaults are Adam's in float32; see `memory.formula`."""
        return memory.formula(
            self.plan,
            self.stage,
            self.comm.rank,
            itemsize=self.itemsize,
            limit=self.gathering.limit,
            per_element=per_element,
            per_parameter=per_parameter,
        )

    def sent_bytes(self) -> int:
        """Bytes that this rank has sent for gathers and reductions so far."""
        return self.gathering.comm.sent_bytes() + self.reducing.comm.sent_bytes()

    def traffic_formula(self) -> int:
        """Bytes that this rank sends in a step: one forward and one backward."""
        return memory.traffic(self.plan, self.stage, itemsize=self.itemsize)

    def close(self) -> None:
        """Take off the hooks and stop the engine's communicators. Not collective.

        The parameters stay as they are: slices from stage 1 on, with which the model cannot run;
        within `full_parameters`, or in stage 0, whole, so that the model is an ordinary one again.
        """
        if self._closed:
            return
        if self._held or self.stage.optimizer is Keep.FULL:
            del self.model._ringdp_sharded
        self._closed = True
        for handle in self._handles:
            handle.remove()
        self.gathering.comm.close()
        self.reducing.comm.close()


def shard(
    model: nn.Module,
    *,
    stage: int,
    unit: UnitRule | None = None,
    comm: Communicator | None = None,
    prefetch_bytes: int | None = None,
) -> Engine:
    """Train `model` over the ranks of `comm`, in place. Collective.

    stage: 0 DDP, 1 ZeRO-1, 2 ZeRO-2, 3 ZeRO-3 (see `stages`). unit: which modules are gathered and
    reduced together (see `find_units`). comm: by default the one that `ringdp.init` made last.
    prefetch_bytes: what stage 3 may gather ahead of its use; by default one unit, the largest.

    Parameters and buffers take rank 0's values. From stage 1 on a parameter is, between steps, the
    flat part of it that this rank owns, possibly empty: make the optimizer after this call, with
    any element-wise optimizer on `model.parameters()`. After `loss.backward()` the gradients are
    averaged over the ranks.
    """
    if getattr(model, "_ringdp_sharded", False):
        raise UsageError("this model is sharded already; shard() takes a model once")
    if prefetch_bytes is not None and prefetch_bytes < 0:
        raise UsageError(f"prefetch_bytes is {prefetch_bytes}; it must be at least 0")
    engine = Engine(model, stage, unit, comm or world(), prefetch_bytes)
    model._ringdp_sharded = True  # type: ignore[assignment]
    return engine
