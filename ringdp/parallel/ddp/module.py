"""A rank's replica of the model: DistributedDataParallel but for the names only frameworks use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed import group
from torch.distributed.algorithms.join import Joinable, JoinHook, _JoinConfig

from ringdp.comm import Communicator, communicator_of
from ringdp.errors import ModelError
from ringdp.parallel import replicas
from ringdp.parallel.autograd_state import in_backward
from ringdp.parallel.ddp import arguments, comm_hooks, guards
from ringdp.parallel.ddp.mixed_precision import MixedPrecision
from ringdp.parallel.ddp.profiling import broadcast, span
from ringdp.parallel.ddp.reducer import Reducer
from ringdp.parallel.ddp.runtime_log import RuntimeLog
from ringdp.parallel.ddp.state import ARMED, RESTING, UNDER_WAY
from ringdp.parallel.ddp.tracing import ReducerTracer
from ringdp.parallel.ddp.uneven_inputs import Status, UnevenInputs
from ringdp.parallel.guards import copies
from ringdp.parallel.join import JoinableOverGroup, Shadow
from ringdp.parallel.mesh import localize, of_mesh
from ringdp.parallel.refuse import refuse
from ringdp.parallel.values.tensor_tree import tensors
from ringdp.tape import recorder

ALONE = _JoinConfig(False, False, False)  # outside any join


class Replica(nn.Module, JoinableOverGroup):
    """A rank's replica of a model, whose gradients are averaged over all ranks in backward."""

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Any = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
    ) -> None:
        """process_group: a `ringdp.Communicator` or a torch.distributed group; by default what
        `ringdp.init` made last, or else torch's default group, of which only the store is used.
        bucket_cap_mb: MiB of gradients reduced at once: by default 25, over a network 2; the first
        bucket has 1. device_ids, output_device: name the GPU of all parameters, to which inputs are
        moved. The other arguments are torch's; those for delayed reductions, and
        lazy_bucket_allocation, are refused.
        Raises ModelError (a RuntimeError) if the ranks' models differ or nothing trains, UsageError
        (a ValueError) for an argument.
        """
        super().__init__()
        Joinable.__init__(self)
        refuse(
            "DistributedDataParallel",
            delay_all_reduce_named_params=(delay_all_reduce_named_params or None, None),
            param_to_hook_all_reduce=(param_to_hook_all_reduce, None),
            lazy_bucket_allocation=(lazy_bucket_allocation, False),
        )
        copies.check(module)
        self.module, self.device_mesh = module, device_mesh
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        first, self.forward_sync_buffers = arguments.syncs(broadcast_buffers, forward_sync_buffers)
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True  # whether the last forward reduced
        self._reducing = False  # whether a forward runs whose backward reduces
        self._uneven: UnevenInputs | None = None  # of the last join
        self._group = of_mesh(process_group, device_mesh)  # as given
        localize(module, device_mesh)
        self._buffer_hook: comm_hooks.BufferHook | None = None
        self._trainable = arguments.trainables(module, self.parameters_to_ignore)
        if mixed_precision is not None:
            arguments.check_dense(self._trainable)
        parameters, buffers = self._state(), self.named_module_buffers if first else {}
        replicas.check_writable((*parameters.items(), *buffers.items()))
        self._place = place = arguments.place(parameters.values(), device_ids, output_device)
        self.device_ids = None if place is None else [place.index]
        self.dim, self.output_device = dim, None if place is None else place.index
        self._outer: Collection[Any] = ()  # weak: DDPs around this one, which may be made later
        self._reducer: Reducer | None = None
        self._comm: Communicator | None = communicator_of(self._group, module.parameters())
        self.settings = arguments.Settings(
            caps=arguments.caps(bucket_cap_mb, bucket_cap_mb_list or (), self.comm),
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
        )
        self.bucket_bytes_cap_list = list(self.settings.caps) if bucket_cap_mb_list else []
        self.mixed_precision, self._runtime_log = mixed_precision, RuntimeLog()
        if init_sync:
            arguments.check_values(self._trainable)
            if first:
                replicas.check_places(self.named_module_buffers.items())
            facts = [(t.name, replicas.facts_of(t.parameter)) for t in self._trainable]
            replicas.check_equal(self.comm, facts)
            self._broadcast(buffers=first)
        self._mixed_precision = MixedPrecision(module, self.parameters_to_ignore, mixed_precision)
        self._hook: comm_hooks.Hook | None = self._mixed_precision.hook
        self._make_reducer()

    # ---- the model's state, the communicator, the reducer

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The buffers to synchronize. Looked up each time, since a model may replace a buffer."""
        ignored = self.parameters_to_ignore
        return {name: b for name, b in self.module.named_buffers() if name not in ignored}

    @property
    def _synced_buffers(self) -> dict[str, Tensor]:
        """The buffers that the running forward, or the next one, synchronizes."""
        syncs = self.require_forward_param_sync and self.forward_sync_buffers
        return self.named_module_buffers if syncs else {}

    def _state(self) -> dict[str, nn.Parameter]:
        ignored = self.parameters_to_ignore
        return {name: p for name, p in self.module.named_parameters() if name not in ignored}

    def _broadcast(self, *, buffers: bool, root: int = 0) -> None:
        """Broadcast parameters, and `buffers` too, from rank `root`. Collective."""
        state = [*self._state().values(), *(self.named_module_buffers.values() if buffers else ())]
        replicas.broadcast(self.comm, state, root)

    @property
    def comm(self) -> Communicator:  # type: ignore[override]
        """A copy of the module gets the default one."""
        if self._comm is None:
            self._comm = communicator_of(None, (t.parameter for t in self._trainable))
        return self._comm

    @property
    def reducer(self) -> Reducer:
        """A copy of the module makes its own when it is first read. Collective then."""
        try:
            return self._reducer or self._make_reducer()
        except AttributeError as error:  # nn.Module would report a missing attribute
            raise RuntimeError(f"the reducer could not be made: {error}") from error

    def _make_reducer(self) -> Reducer:
        comm = self.comm.duplicate()
        made = Reducer(
            self._trainable, comm, self.settings, self._mixed_precision, self._runtime_log
        )
        recorder.join(made, ReducerTracer)
        made.hook, self._reducer = self._hook, made
        return made

    # ---- forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._inside(inputs, kwargs) as (args, named):
            output = self.module(*args, **named)
            self._after_forward(output)
        return output

    @contextmanager
    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
    def _inside(self, args: Any, kwargs: Any) -> Iterator[Any]:
        """Around the module's call: yields its inputs, moved and cast. Collective."""
        self._before_forward()
        lowered: list[nn.Parameter] = []
        try:
            with guards.forward_of(self), span("DistributedDataParallel.forward"):
                if (lowered := self._mixed_precision.cast_down()) and torch.is_grad_enabled():
                    self.reducer.grad_hooks.listen()
                with self._mixed_precision.inputs(args, kwargs, self._place) as given:
                    yield given
        finally:
            self._reducing = False
            if not torch.is_grad_enabled():
                self._mixed_precision.restore_all(lowered)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _before_forward(self) -> None:
        """Decide whether this forward's backward reduces; synchronize buffers. Collective."""
        reducer, outer = self.reducer, guards.around()
        if outer is not None and outer not in self._outer and guards.trains(outer, self._trainable):
            # Noted, since a recomputation in backward runs inside no forward.
            self._outer = WeakSet([*self._outer, outer])
        recomputed = reducer.state in UNDER_WAY and in_backward()
        reduces = self._averages and not recomputed and not any(o._reduces for o in self._outer)
        if reduces:
            guards.check_autograd()
            if not reducer.begun or reducer.state is ARMED:
                guards.check_parameters(self.module, reducer)
        hook = self._buffer_hook
        buffers = self._synced_buffers if hook is None or hook.before else {}
        root = self._announce(reduces=reduces, broadcasts=bool(buffers) and hook is None)
        reducer.begin_forward(reduces=reduces)
        if buffers and hook:
            reducer.flights += hook.run(buffers)
        elif buffers:
            with broadcast():
                replicas.broadcast(self.comm, buffers.values(), root)
        self._reducing = reduces

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _after_forward(self, output: Any) -> None:
        self.reducer.end_forward(tensors(output), reduces=self._reducing)
        hook = self._buffer_hook
        if hook and not hook.before and (buffers := self._synced_buffers):
            self.reducer.flights += hook.run(buffers)
        self.require_forward_param_sync = self._averages

    @property
    def _averages(self) -> bool:
        """Whether a forward now would have its gradients averaged."""
        return torch.is_grad_enabled() and self.require_backward_grad_sync

    @property
    def _reduces(self) -> bool:
        """Whether the backward of the running or last forward reduces, here or in a DDP around."""
        reducer = self._reducer
        armed = reducer is not None and reducer.state is not RESTING
        return self._reducing or armed or any(outer._reduces for outer in self._outer)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forwards inside it accumulate in this rank's p.grad, which the next backward
        outside reduces. What counts is where the forward runs, not its backward.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def sent_bytes(self) -> int:
        """Bytes this rank has sent to reduce gradients so far."""
        return self.reducer.comm.sent_bytes()

    # ---- ranks with unequal numbers of batches

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Inside it ranks may have unequal numbers of batches: see `uneven_inputs`. Collective.
        With `throw_on_early_termination` every rank raises ModelError once one has run out."""
        if not enable:
            yield
            return
        self.reducer.uneven = None  # a copy makes its reducer here, on all ranks
        uneven = self._uneven = UnevenInputs(
            self.comm, initial_size=divide_by_initial_world_size, throw=throw_on_early_termination
        )
        self._join_config = _JoinConfig(True, throw_on_early_termination, False)
        try:
            yield
            while (status := uneven.exchange(Status())).trains:
                self._shadow(uneven, status)
            self._agree(uneven)
        finally:
            self._join_config = ALONE

    def join_hook(self, *, divide_by_initial_world_size: bool = True, **_: Any) -> JoinHook:
        """For torch's Join, over a torch.distributed group. `_`: arguments of other joinables."""
        self.reducer.uneven = None  # a copy makes its reducer here, on all ranks
        uneven = UnevenInputs(self.comm, initial_size=divide_by_initial_world_size, throw=False)
        self._uneven = uneven
        return Shadow(
            lambda: self._shadow(uneven, uneven.exchange(Status())), lambda: self._agree(uneven)
        )

    def _announce(self, *, reduces: bool, broadcasts: bool) -> int:
        """Announce this forward to ranks that have run out. Returns the rank whose buffers count.
        Collective."""
        uneven = self._uneven if self._join_config.enable else None
        self._notify()
        if uneven is not None:
            waits = self.reducer.state is not RESTING
            uneven.exchange(Status(1, int(reduces), int(broadcasts), int(waits)))
        self.reducer.uneven = uneven
        return uneven.root if uneven else 0

    def _agree(self, uneven: UnevenInputs) -> None:
        """Take parameters and buffers of a rank that trained last. Collective."""
        self.reducer._land()
        self._broadcast(buffers=self.forward_sync_buffers, root=uneven.root)

    def _shadow(self, uneven: UnevenInputs, status: Status) -> None:
        """Take part in one forward and backward of the others, without inputs.

        Reductions are waited for when the next ones start, as the others may run forwards first.
        """
        reducer = self.reducer
        begins = status.reduces and not status.waits
        if begins:
            reducer._land()
            reducer._rebuild_buckets()
        if status.broadcasts:
            replicas.broadcast(self.comm, self.named_module_buffers.values(), uneven.root)
        if begins:
            reducer.shadow()
            if any(t.sparse for t in reducer.parameters):
                reducer._land()  # these begin there
        self.require_forward_param_sync = bool(status.reduces)

    # ---- hooks, copies

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """`hook(state, bucket)` reduces each bucket instead of the average; see `comm_hooks`."""
        if error := comm_hooks.fault(hook):
            raise self._runtime_log.failed(error)
        self._register(comm_hooks.CommHook(state, hook))

    def _register(self, hook: comm_hooks.Hook) -> None:
        if self._hook is not None:
            why = (
                "register_comm_hook or register_builtin_comm_hook can only be called once, and "
                f"not with mixed_precision: there is {self._hook.name}"
            )
            raise self._runtime_log.failed(ModelError(why))
        self._hook = self.reducer.hook = hook

    def __getstate__(self) -> dict[str, Any]:
        if self._group not in (None, group.WORLD):
            raise ModelError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default "
                "process group, that is without process_group=; so is deepcopy"
            )
        state = self.__dict__ | dict.fromkeys(("_comm", "_reducer", "_uneven", "_group"))
        return state | {"_join_config": ALONE, "_outer": ()}
