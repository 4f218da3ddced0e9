"""WHEN gradients are reduced in DDP: as soon as a bucket is complete, while backward goes on.

    forward ends        every bucket waits for its gradients
    a gradient is made  it moves into its bucket, times 1/n; a complete bucket's all_reduce starts
                        once those before it have, so that all ranks start them in one order
    backward ends       wait; p.grad is the average

This is stage 0 of `stages.STAGES`, but not `shard`'s engine, since torch's class promises more: a
gradient is in p.grad, and in its bucket, as soon as it exists; buckets are cut by bytes, in the
order in which gradients come, not by modules; the previous p.grad is reduced along (`shard` adds
the average of the new gradients to it); and some gradients may never come. In return nothing is
gathered, so hooks on parameters suffice, without any on the model's forward.

Note [gradients that never come]
    By default every parameter must get a gradient: an incomplete bucket is an error at the start of
    the next iteration. With find_unused_parameters a gradient missing at the end of backward counts
    as zero; a map, also reduced, says which parameters no rank has used, whose p.grad stays as it
    is. With static_graph the unused parameters of the first backward, which reduces everything at
    its end, are those of all; so is the number of parts in which each gradient is made (reentrant
    checkpointing makes several).
    A backward without gradients on any rank, such as autograd.grad with respect to inputs, does not
    count: the next one reduces. Inside `join` it does, since other ranks shadow one backward per
    forward. Where the end of backward must be known, hooks on the outputs, which run first, queue a
    callback; by default the start of the last bucket does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from ringdp.comm import Communicator
from ringdp.errors import CommunicationError, ModelError
from ringdp.parallel.ddp.arguments import Settings, Trainable
from ringdp.parallel.ddp.bucket import Bucket, FlatBucket, SparseBucket
from ringdp.parallel.ddp.bucketing import Gradient, assign, at_first
from ringdp.parallel.ddp.comm_hooks import Hook
from ringdp.parallel.ddp.error_messages import again, once_more, unfinished
from ringdp.parallel.ddp.grad_hooks import (
    GradHooks,
    distributed_autograd_error,
    raiser,
    take_off_optimizers,
)
from ringdp.parallel.ddp.mixed_precision import MixedPrecision
from ringdp.parallel.ddp.profiling import all_reduce, broadcast, span
from ringdp.parallel.ddp.runtime_log import GRADIENT, GRADIENTS, REDUCING, RuntimeLog
from ringdp.parallel.ddp.state import ARMED, ENDING, RESTING, RUNNING, UNDER_WAY
from ringdp.parallel.ddp.uneven_inputs import UnevenInputs


class Reducer:
    """The reducer of one DDP, over a communicator of its own."""

    @torch.inference_mode(False)  # a copy may be made in it, and trained later
    def __init__(
        self,
        parameters: Sequence[Trainable],
        comm: Communicator,
        settings: Settings,
        mixed_precision: MixedPrecision,
        runtime_log: RuntimeLog,
    ) -> None:
        self.parameters, self.comm, self.settings = parameters, comm, settings
        self.mixed_precision, self.runtime_log = mixed_precision, runtime_log
        self.uneven: UnevenInputs | None = None  # inside a join, where shadows reduce every bucket
        self.hook: Hook | None = None
        self.layouts: list[list[list[int]]] = []  # parameters by bucket: at first, and rebuilt
        self._build()
        self.begun = False  # whether there was a forward
        self._stepping: list[nn.Parameter] = []  # those whose optimizers step in backward
        # This backward, or the last.
        self.state = RESTING
        self.flights: list[Callable[[], object]] = []  # waits for the end of backward
        self.started = 0  # buckets
        self._left: list[int] = []  # of each gradient: parts still to come
        self._order: dict[int, None] = {}  # parameters in the order of gradients
        self._again = False  # whether another backward has reached the outputs since
        # Learned from all of them.
        self._learning = settings.static_graph
        self._expected = [1] * len(parameters)  # parts; 0: unused (static_graph)
        self._used: set[int] = set()  # with gradients not reduced yet
        self._users = [0] * len(parameters)  # ranks that use each parameter
        self.unused: list[int] | None = None  # here, in the last backward
        self._steady = True  # whether they were the same in every backward
        self.grad_hooks = GradHooks(self, [t.parameter for t in parameters])

    def _build(self, order: Sequence[int] = ()) -> None:
        """Make the buckets. `order`: that of the gradients, once it is known."""
        caps, shared = self.settings.caps, self.settings.gradient_as_bucket_view
        facts = [Gradient(p.nbytes, (p.dtype, p.device), alone) for _, p, alone in self.parameters]
        stays = self.settings.seeks_unused
        layout = assign(facts, order, caps) if order else at_first(facts, caps, stays=stays)
        self.layouts.append(layout)
        self.buckets, self._places = list[Bucket](), dict[int, tuple[Bucket, int]]()
        for index, members in enumerate(layout):
            own = [self.parameters[i] for i in members]
            bucket: Bucket = (
                SparseBucket(index, own[0], self.comm)
                if own[0].sparse
                else FlatBucket(index, own, self.comm, shared=shared)
            )
            self.buckets.append(bucket)
            self._places |= {i: (bucket, place) for place, i in enumerate(members)}

    @property
    def rebuilt(self) -> bool:
        return len(self.layouts) > 1

    # ---- forward

    def begin_forward(self, *, reduces: bool) -> None:
        """`reduces`: its backward will. Collective once: see `_rebuild_buckets`."""
        self._again = False
        if not self.begun:
            self._stepping = take_off_optimizers(t.parameter for t in self.parameters)
        self.begun = True
        if reduces:
            self.runtime_log.begin()
            self.grad_hooks.let_go()
            self._rebuild_buckets()

    def end_forward(self, outputs: Iterable[Tensor], *, reduces: bool) -> None:
        if reduces:
            self.prepare_for_backward(outputs)
        elif self.state is ARMED and self._seeks_unused:
            self.grad_hooks.listen_to(outputs)  # their backward is the next: it reduces

    def _check_reducer_finalized(self) -> None:
        """Raise ModelError if the last backward did not finish its reductions."""
        if self.state in UNDER_WAY:
            lost = {i: self.parameters[i].name for i, left in enumerate(self._left) if left > 0}
            raise self._failed(unfinished(self.settings, self.comm.rank, lost))

    def _failed(self, why: str) -> ModelError:
        return self.runtime_log.failed(ModelError(why))

    def _rebuild_buckets(self) -> bool:
        """Once, after the first backward: rebuild the buckets in the order of its gradients.

        All take rank 0's order. Collective. Not with find_unused_parameters, as no order is stable.
        Returns whether it did. Raises ModelError if the last backward did not finish.
        """
        self._check_reducer_finalized()
        if self.rebuilt or not self._order or self.settings.seeks_unused:
            return False
        order = torch.tensor(
            [*(self._order | dict.fromkeys(range(len(self.parameters))))], device="cpu"
        )
        with broadcast():
            self.comm.broadcast(order)
        self._build(order.tolist())
        return True

    def prepare_for_backward(self, outputs: Iterable[Tensor]) -> None:
        """A forward has ended: the next backward reduces."""
        self.state = ARMED
        self._next = self.started = 0
        self._left = list(self._expected)
        self._order.clear()
        for bucket in self.buckets:
            bucket.arm()
        if self._seeks_unused:
            self.grad_hooks.listen_to(outputs)

    # ---- backward

    def made(self, index: int) -> None:
        """A gradient, or a part of one, has been added to p.grad."""
        if self.settings.has_unused and self.parameters[index].parameter.grad is None:
            return  # autograd called the hook without a gradient
        if self.state is RESTING:
            if self._again and index in (self.unused or ()):
                raise self._failed(again(self.parameters[index].name))
            self._used.add(index)
            self.mixed_precision.restore(self.parameters[index].parameter)
            return
        self.runtime_log.mark(GRADIENT)
        if self.state is ARMED:
            self._begin(index)
        self._left[index] -= 1
        self._order.pop(index, None)  # its last part counts
        self._order[index] = None
        if self._learning:
            return  # everything is reduced at the end
        if self._left[index] < 0:
            raise self._failed(once_more(self.parameters[index].name, self.settings))
        if self._left[index] == 0:
            self._ready(index)

    def _begin(self, first: int) -> None:
        missing = self.parameters[first].parameter.grad is None
        if missing and (error := distributed_autograd_error()):
            self.flights.append(raiser(error))
        self.state = RUNNING
        for index, parts in enumerate(self._expected):
            if parts == 0:
                self._ready(index, unused=True)

    def _ready(self, index: int, *, unused: bool = False) -> None:
        """All parts of a gradient are in p.grad, or it is `unused` in this backward."""
        bucket, place = self._places[index]
        self.mixed_precision.restore(self.parameters[index].parameter)
        bucket.take(place, self._scale, unused=unused)
        bucket.pending -= 1
        if bucket.pending == 0:
            self._issue()

    @property
    def _scale(self) -> float:
        """The factor of gradients before the sum."""
        if self.hook:
            return 1.0
        return 1 / (self.uneven.divisor if self.uneven else self.comm.size)

    def _issue(self) -> None:
        """Start every complete bucket that has no incomplete one before it."""
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.pending:
                return
            if not self._skips(bucket):
                self._start(bucket)
            self._next += 1
        self.end_later()

    def _skips(self, bucket: Bucket) -> bool:
        """Whether all of it is unused on every rank (promised by skip_all_reduce_unused_params)."""
        if not self.settings.skip_all_reduce_unused_params or self.uneven:
            return False
        members = self.layouts[-1][bucket.index]
        return all(self._lacks(i) and i not in self._used for i in members)

    def _start(self, bucket: Bucket) -> None:
        self.started += 1
        self.runtime_log.mark(REDUCING)
        last = bucket.index == len(self.buckets) - 1
        try:
            flight = self.hook.start(bucket, last=last) if self.hook else bucket.start()
        except CommunicationError as error:
            flight = raiser(error)
        self.flights.append(flight)

    def end_later(self) -> None:
        """Queue `_end` for the end of this backward."""
        self._again |= self.state is RESTING
        if self.state in (ARMED, RUNNING):
            self.state = ENDING
            Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        """Autograd is through: reduce without the gradients that need not come."""
        self.runtime_log.mark(GRADIENTS)
        with span("search_unused_parameters") if self.settings.seeks_unused else nullcontext():
            members = range(len(self.parameters)) if self.settings.has_unused else ()
            missing = [i for i in members if self._lacks(i)]
        if self._learning:
            for index in self._order:
                self._ready(index)
        if self._seeks_unused:
            for index in missing:
                self._ready(index, unused=True)
            any_came = self._ask_users(missing)()
            if not any_came and self.uneven is None:
                if error := distributed_autograd_error():
                    raise error
                self._land()
                self.prepare_for_backward(())
                return
            self._steady &= self.unused in (None, missing)
            self.unused = missing
        self._rest(missing)

    def _rest(self, missing: Sequence[int]) -> None:
        """Wait until all is reduced. Of gradients that are `missing` here, others may have some."""
        self._land()
        if self._learning:
            self._expected, self._learning = [1 - left for left in self._left], False
        self.runtime_log.end(self._order)
        self.mixed_precision.restore_all()
        for index in missing:
            if self._users[index]:
                bucket, place = self._places[index]
                bucket.hand_out(place)
        for p in self._stepping:
            for optimizer in p._in_backward_optimizers:  # type: ignore[attr-defined]
                optimizer.step()
            p.grad = None
        self.grad_hooks.let_go()
        self._used.clear()
        self.state = RESTING

    @property
    def _seeks_unused(self) -> bool:
        """Whether the end of this backward determines the unused parameters."""
        return self._learning or self.settings.seeks_unused

    def _lacks(self, index: int) -> bool:
        """Whether the parameter got no gradient in this backward (or never does: static_graph)."""
        return self._left[index] == self._expected[index]

    def _ask_users(self, missing: Sequence[int]) -> Callable[[], bool]:
        """Count the ranks that use each parameter. Returns a function that waits, and tells whether
        any rank got a gradient in this backward."""
        used = torch.ones(len(self.parameters) + 1, dtype=torch.int32, device="cpu")
        used[[i for i in missing if i not in self._used]] = 0
        used[-1] = len(missing) < len(self.parameters)
        wait = all_reduce(self.comm, used, tag=len(self.buckets))

        def any_came() -> bool:
            wait()
            *self._users, came = used.tolist()
            return bool(came)

        return any_came

    def _land(self) -> None:
        while self.flights:
            self.flights.pop(0)()

    def shadow(self) -> None:
        """Take part in the other ranks' backward with zeros, until `_land`. Collective."""
        for bucket in self.buckets:
            bucket.arm()
            bucket.blank()
            self._start(bucket)
        if self._seeks_unused:
            self.flights.append(self._ask_users(range(len(self.parameters))))
        self._learning = False
        self._order = self._order or dict.fromkeys(reversed(range(len(self.parameters))))

    # ---- of torch's Reducer

    def _get_local_used_map(self) -> Tensor:
        """How many ranks used each parameter, in the last backward that counted them."""
        return torch.tensor(self._users, dtype=torch.int32, device="cpu")

    def _ddp_graph_static(self) -> bool:
        """Whether every backward so far left the same parameters unused on this rank."""
        return self._steady

    def _remove_autograd_hooks(self) -> None:
        """From now on backwards reduce nothing."""
        self.grad_hooks.remove()
