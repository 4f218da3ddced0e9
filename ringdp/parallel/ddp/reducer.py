"""WHEN gradients are reduced in DDP: as soon as a bucket of them is whole, while backward goes on.

    forward ends       every bucket waits for its gradients
    a gradient exists  moved into its bucket, times 1/n; a bucket that is whole is started, once
                       those before it are, so that every rank starts the same ones in one order
    backward ends      wait; p.grad is the average

It does what stage 0 of `stages.STAGES` says, but is not the engine of `shard`, since torch's class
promises more of gradients: they lie in p.grad, and in their bucket, as soon as they exist; a bucket
is cut by bytes, not by modules, in the order in which they come; what p.grad held before is reduced
with them, where `shard` adds the average of the new ones alone; and some may never come. In return
nothing is gathered, so hooks on parameters suffice, and the model's forward need not be known.

Note [gradients that never come]
    By default every parameter must get a gradient; a bucket that stays incomplete is told of when
    the next iteration starts. With find_unused_parameters, what has not come when backward ends
    counts as zero; a map, reduced too, then says which parameters no rank has used, and their
    p.grad stays untouched. With static_graph this is found out in the first backward, in which
    everything is reduced at the end, and holds from then on; so does how often each gradient is
    made (reentrant checkpoints make some in several parts).
    A backward that brings no rank any, as torch.autograd.grad to the inputs, is not the one: the
    next shall reduce. But within `join`, where other ranks shadow one backward of each forward.
    Where the end of backward must be known, the outputs' hooks, which run before all others, ask
    for a callback. By default the start of the last bucket does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from ringdp.comm import Communicator
from ringdp.errors import CommunicationError, ModelError
from ringdp.parallel.ddp.bucket import Bucket
from ringdp.parallel.ddp.buckets import Layout, buckets_of, layout_of
from ringdp.parallel.ddp.builtin_hooks import BuiltIn
from ringdp.parallel.ddp.comm_hooks import CommHook
from ringdp.parallel.ddp.error_messages import again, once_more, unfinished
from ringdp.parallel.ddp.grad_hooks import GradHooks, kept, raiser
from ringdp.parallel.ddp.mixed_precision import MixedPrecision
from ringdp.parallel.ddp.optimizer_in_backward import step, taken_off
from ringdp.parallel.ddp.profiling import all_reduce, broadcast, span
from ringdp.parallel.ddp.runtime_log import GRADIENT, GRADIENTS, REDUCING, RuntimeLog
from ringdp.parallel.ddp.settings import Settings, Trainable
from ringdp.parallel.ddp.state import ARMED, ENDING, RESTING, RUNNING, UNDER_WAY
from ringdp.parallel.ddp.tracing import ReducerTracer, TracedReducer
from ringdp.parallel.ddp.uneven_inputs import UnevenInputs
from ringdp.tape import recorder


class Reducer(TracedReducer):
    """Over a communicator of its own."""

    tracer = ReducerTracer

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
        self.hook: CommHook | BuiltIn | None = None
        self.layouts: list[Layout] = []  # at first, and rebuilt
        self._build()
        # See `optimizer_in_backward`; known in a forward.
        self._stepping: list[nn.Parameter] | None = None
        # This backward, or the last.
        self.state = RESTING
        self.flights: list[Callable[[], object]] = []  # what its end waits for
        self.started = 0  # buckets
        self._left: list[int] = []  # parts of each gradient that are still to come
        self._order: dict[int, None] = {}  # parameters, as gradients came, if it is `_ordering`
        self._ordering = False
        self._again = False  # another has come to outputs since
        # What is learned of them.
        self._learning = settings.static_graph
        self._expected = [1] * len(parameters)  # parts of each gradient; 0: unused (static_graph)
        self._used: set[int] = set()  # parameters with a gradient that no backward has reduced
        self._users = [0] * len(parameters)  # ranks, of each parameter, when it was last asked
        self.unused: list[int] | None = None  # here, as far as it is sought, in the last backward
        self._steady = True  # the same ones in every backward
        self.grad_hooks = GradHooks(self, [t.parameter for t in parameters])
        recorder.join(self)

    def _build(self, order: Sequence[int] = ()) -> None:
        """`order`: that in which gradients come, once it is known."""
        layout = layout_of(self.parameters, self.settings, order)
        self.layouts.append(layout)
        self.buckets = buckets_of(self.parameters, self.settings, layout, self.comm)
        self._places = {
            index: (bucket, place)
            for bucket, members in zip(self.buckets, layout, strict=True)
            for place, index in enumerate(members)
        }

    @property
    def rebuilt(self) -> bool:
        return len(self.layouts) > 1

    # ---- forward

    def begin_forward(self, *, reduces: bool) -> None:
        """`reduces`: its backward shall. Collective once, then: see `_rebuild_buckets`."""
        self._again = False
        if self._stepping is None:
            self._stepping = taken_off(t.parameter for t in self.parameters)
        if reduces:
            self.prepare_for_forward()
            self._rebuild_buckets()

    def prepare_for_forward(self) -> None:
        self.runtime_log.begin()
        self.grad_hooks.let_go()

    def end_forward(self, outputs: Iterable[Tensor], *, reduces: bool) -> None:
        if reduces:
            self.prepare_for_backward(outputs)

    def _check_reducer_finalized(self) -> None:
        """Raise ModelError if the last backward is not through."""
        if self.state in UNDER_WAY:
            lost = {i: self.parameters[i].name for i, left in enumerate(self._left) if left > 0}
            raise self._failed(unfinished(self.settings, self.comm.rank, lost))

    def _failed(self, why: str) -> ModelError:
        return self.runtime_log.failed(ModelError(why))

    def _rebuild_buckets(self) -> bool:
        """Once, after the first backward, buckets follow the order in which gradients came there.

        It is rank 0's order. Collective. With unused parameters no order would be a good one.
        Whether it did so. Raises ModelError if the last backward is not through.
        """
        self._check_reducer_finalized()
        if self.rebuilt or not self._order or self.settings.seeks_unused:
            return False
        order = torch.tensor([*(self._order | dict.fromkeys(range(len(self.parameters))))])
        with broadcast():
            self.comm.broadcast(order)
        self._build(order.tolist())
        return True

    def prepare_for_backward(self, outputs: Iterable[Tensor]) -> None:
        """The next backward, of a forward that has ended, shall reduce."""
        self.state = ARMED
        self._next = self.started = 0
        self._left = list(self._expected)
        self._ordering = self.runtime_log.sampling or not self.rebuilt
        if self._ordering:
            self._order.clear()
        for bucket in self.buckets:
            bucket.arm()
        if self._seeks_unused:
            self.grad_hooks.listen_to(outputs)

    # ---- backward

    def made(self, index: int) -> None:
        """Called when a part of a gradient has been added to p.grad."""
        if self.settings.has_unused and self.parameters[index].parameter.grad is None:
            return  # autograd came by with nothing
        if self.state is RESTING:
            if self._again and index in (self.unused or ()):
                raise self._failed(again(self.parameters[index].name))
            self._used.add(index)
            self.mixed_precision.restore(self.parameters[index].parameter)
            return
        self.runtime_log.mark(GRADIENT)
        if self.state is ARMED:
            self._begin(index)
        if self._ordering:
            self._order.pop(index, None)
            self._order[index] = None
        self._left[index] -= 1
        if self._learning:
            return  # everything is reduced at the end
        if self._left[index] < 0:
            raise self._failed(once_more(self.parameters[index].name, self.settings))
        if self._left[index] == 0:
            self._ready(index)

    def _begin(self, first: int) -> None:
        if self.parameters[first].parameter.grad is None and (error := kept()):
            self.flights.append(raiser(error))
        self.state = RUNNING
        for index, parts in enumerate(self._expected):
            if parts == 0:
                self._ready_unused(index)

    def _ready(self, index: int) -> None:
        bucket, place = self._places[index]
        self.mixed_precision.restore(self.parameters[index].parameter)
        bucket.take(place, self._scale)
        bucket.pending -= 1
        if bucket.pending == 0:
            self._issue()

    def _ready_unused(self, index: int) -> None:
        bucket, place = self._places[index]
        self.mixed_precision.restore(self.parameters[index].parameter)
        bucket.take_unused(place, self._scale)
        bucket.pending -= 1

    @property
    def _scale(self) -> float:
        """What gradients are multiplied by before the sum."""
        if self.hook:
            return 1.0
        return 1 / (self.uneven.divisor if self.uneven else self.comm.size)

    def _issue(self) -> None:
        """Start every bucket that is whole, and has none before it that is not."""
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            if bucket.pending:
                return
            if not self._skips(bucket):
                self._start(bucket)
            self._next += 1
        self.end_later()

    def _skips(self, bucket: Bucket) -> bool:
        """Whether no gradient in it is anything, on any rank, as the user has promised."""
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
        except ModelError as error:
            self.runtime_log.failed(error)
            raise
        self.flights.append(flight)

    def end_later(self) -> None:
        """Ask for `_end` at the end of this backward."""
        self._again |= self.state is RESTING
        if self.state in (ARMED, RUNNING):
            self.state = ENDING
            Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self.runtime_log.mark(GRADIENTS)
        with span("search_unused_parameters") if self.settings.seeks_unused else nullcontext():
            missing = [i for i in range(len(self.parameters)) if self._lacks(i)]
        if self._learning:
            for index in self._order:
                self._ready(index)
        if self._seeks_unused:
            for index in missing:
                self._ready_unused(index)
            self._issue()
        if self._next < len(self.buckets):
            return  # the next forward tells of it
        if self._seeks_unused:
            any_came = self._ask_users(missing)()
            if not any_came and self.uneven is None:
                if error := kept():
                    raise error
                self._land()
                self.prepare_for_backward(())
                return
            self._steady &= self.unused in (None, missing)
            self.unused = missing
        self._land()
        if self._learning:
            self._expected, self._learning = [1 - left for left in self._left], False
        self.runtime_log.end(self._order)
        self.mixed_precision.restore_all()
        for index in missing:
            if self._users[index]:
                bucket, place = self._places[index]
                bucket.hand_out(place)
        step(self._stepping or ())
        self.grad_hooks.let_go()
        self._used.clear()
        self.state = RESTING

    @property
    def _seeks_unused(self) -> bool:
        """Whether the end of this backward says which parameters have no gradient."""
        return self._learning or self.settings.seeks_unused

    def _lacks(self, index: int) -> bool:
        """Whether that parameter has got no gradient in this backward, or never does
        (static_graph)."""
        return self._left[index] == self._expected[index]

    def _ask_users(self, missing: Sequence[int]) -> Callable[[], bool]:
        """What is returned waits, and tells whether any gradient has come in this backward to any
        rank."""
        used = torch.ones(len(self.parameters) + 1, dtype=torch.int32)
        used[[i for i in missing if i not in self._used]] = 0
        used[-1] = len(missing) < len(self.parameters)
        work = all_reduce(self.comm, used, tag=len(self.buckets))

        def any_came() -> bool:
            work.wait()
            *self._users, came = used.tolist()
            return bool(came)

        return any_came

    def _land(self) -> None:
        while self.flights:
            self.flights.pop(0)()

    def shadow(self) -> None:
        """Take part in the backward of the other ranks with zeros, until `_land`. Collective."""
        for bucket in self.buckets:
            bucket.arm()
            bucket.blank()
            self._start(bucket)
        if self._seeks_unused:
            self.flights.append(self._ask_users(range(len(self.parameters))))
        self._learning = False
        self._order = self._order or dict.fromkeys(reversed(range(len(self.parameters))))

    # ---- what torch's Reducer tells when it is asked

    def _get_local_used_map(self) -> Tensor:
        """How many ranks have used each parameter in the last backward that sought the unused."""
        return torch.tensor(self._users, dtype=torch.int32)

    def _ddp_graph_static(self) -> bool:
        """Whether every backward so far has left the same parameters unused on this rank."""
        return self._steady

    def _remove_autograd_hooks(self) -> None:
        """It hears of no gradient any more."""
        self.grad_hooks.remove()
