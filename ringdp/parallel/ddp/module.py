"""DistributedDataParallel with torch's signature: the module around the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import group
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel.distributed import DistributedDataParallel as _Torchs
from torch.nn.parallel.distributed import _BufferCommHookLocation

from ringdp.comm import communicator_of
from ringdp.errors import ModelError
from ringdp.parallel import replicas
from ringdp.parallel.autograd_state import in_backward
from ringdp.parallel.ddp import arguments, unreduced
from ringdp.parallel.ddp.bucketing import MIB
from ringdp.parallel.ddp.comm_hooks import (
    BufferHook,
    BuiltIn,
    CommHook,
    NotAHook,
    built_in,
    checked,
)
from ringdp.parallel.ddp.join import ALONE, Joining
from ringdp.parallel.ddp.mixed_precision import MixedPrecision
from ringdp.parallel.ddp.nested import EnclosingDDPs
from ringdp.parallel.ddp.profiling import broadcast, span
from ringdp.parallel.ddp.runtime_log import RuntimeLog
from ringdp.parallel.ddp.settings import Settings
from ringdp.parallel.ddp.state import ARMED, RESTING, UNDER_WAY
from ringdp.parallel.ddp.torch_api import TorchAPI
from ringdp.parallel.ddp.uneven_inputs import UnevenInputs
from ringdp.parallel.guards import copies
from ringdp.parallel.mesh import localize, of_mesh
from ringdp.parallel.refuse import refuse
from ringdp.parallel.values.tensor_tree import tensors


class DistributedDataParallel(nn.Module, Joining, TorchAPI):
    """Averages `module`'s gradients over all ranks while backward runs, as torch's class does.

    Parameters and buffers take rank 0's values at construction, buffers again before every forward.
    After `loss.backward()` every p.grad is the average over the ranks, with the same bits on each.
    Construction, forward and backward are collective: all ranks must run them equally often.

    process_group: a `ringdp.Communicator` or a torch.distributed group; by default what
    `ringdp.init` made last, or else torch's default group, of which only the store is used.
    bucket_cap_mb: MiB of gradients reduced at once: by default 25, over a network 2; the first
    bucket has 1. device_ids, output_device: name the GPU of all parameters, to which inputs are
    moved. The other arguments are torch's; those for delayed reductions, and
    lazy_bucket_allocation, are refused.
    Raises ModelError (a RuntimeError) if the ranks' models differ or nothing trains, UsageError (a
    ValueError) for an argument.
    """

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
        at_first, self.forward_sync_buffers = arguments.syncs(
            broadcast_buffers, forward_sync_buffers
        )
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._started = False  # whether there was a forward
        self._reducing = False  # whether a forward runs whose backward reduces
        self._hook = None
        self._uneven: UnevenInputs | None = None
        self._authoritative_rank: int | None = None
        process_group = of_mesh(process_group, device_mesh)
        localize(module, device_mesh)
        self._group = process_group  # as given
        self._buffer_hook: BufferHook | None = None
        self._trainable = arguments.trainables(module, self.parameters_to_ignore)
        self._place = place = arguments.place(self._state(), device_ids, output_device)
        self.device_ids = None if place is None else [place.index]
        self.dim, self.output_device = dim, None if place is None else place.index
        self._enclosing = EnclosingDDPs(self._trainable)
        self._reducer = None
        self._comm = communicator_of(process_group, module.parameters())
        self.settings = Settings(
            caps=arguments.caps(bucket_cap_mb, bucket_cap_mb_list or (), self.comm),
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
        )
        self.bucket_bytes_cap_list = [int(cap * MIB) for cap in bucket_cap_mb_list or ()]
        self.mixed_precision, self._runtime_log = mixed_precision, RuntimeLog()
        if init_sync:
            if at_first:
                replicas.check_places(self.named_module_buffers.items())
            facts = [(t.name, replicas.facts_of(t.parameter)) for t in self._trainable]
            replicas.check_equal(self.comm, facts)
            self._broadcast(buffers=at_first)
        self._mixed_precision = MixedPrecision(module, self.parameters_to_ignore, mixed_precision)
        self._make_reducer()

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
        outer, _Torchs._active_ddp_module = _Torchs._active_ddp_module, self  # type: ignore
        lowered: list[nn.Parameter] = []
        try:
            with span("DistributedDataParallel.forward"):
                if lowered := self._mixed_precision.cast_down():
                    self.reducer.grad_hooks.listen()
                with self._mixed_precision.inputs(args, kwargs, self._place) as given:
                    yield given
        finally:
            _Torchs._active_ddp_module, self._reducing = outer, False
            if not torch.is_grad_enabled():
                self._mixed_precision.restore_all(lowered)

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _before_forward(self) -> None:
        """Decide whether this forward's backward reduces; synchronize buffers. Collective."""
        reducer = self.reducer
        self._enclosing.note(_Torchs._active_ddp_module)
        recomputed = reducer.state in UNDER_WAY and in_backward()
        reduces = self._averages and not recomputed and not self._enclosing.reduces()
        if reduces:
            unreduced.check_autograd()
            if not self._started or reducer.state is ARMED:
                unreduced.check(self.module, reducer)
        buffers = self.named_module_buffers if self._syncs(before=True) else {}
        root = self._joined_forward(
            reduces=reduces, broadcasts=bool(buffers) and self._buffer_hook is None
        )
        reducer.begin_forward(reduces=reduces)
        if buffers and self._buffer_hook:
            reducer.flights += self._buffer_hook.run(buffers)
        elif buffers:
            with broadcast():
                replicas.broadcast(self.comm, buffers.values(), root)
        self._reducing = reduces

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _after_forward(self, output: Any) -> None:
        self.reducer.end_forward(tensors(output), reduces=self._reducing)
        if self._buffer_hook and self._syncs(before=False):
            self.reducer.flights += self._buffer_hook.run(self.named_module_buffers)
        self.require_forward_param_sync, self._started = self._averages, True

    @property
    def _averages(self) -> bool:
        """Whether a forward now would have its gradients averaged."""
        return torch.is_grad_enabled() and self.require_backward_grad_sync

    @property
    def _reduces(self) -> bool:
        """Whether the backward of the running or last forward reduces."""
        reducer = self._reducer
        return self._reducing or (reducer is not None and reducer.state is not RESTING)

    def _syncs(self, *, before: bool) -> bool:
        """Whether buffers are synchronized before the forward, or else after it."""
        there = self._buffer_hook.before if self._buffer_hook else True
        return there == before and self.will_sync_module_buffers()

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

    # ---- hooks, copies

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """`hook(state, bucket)` reduces each bucket instead of the average; see `comm_hooks`."""
        checked(hook, self._runtime_log)
        self._register(CommHook(state, hook))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """A torch.distributed.BuiltinCommHookType: see `comm_hooks`."""
        self._register(built_in(comm_hook_type))

    def _register(self, hook: CommHook | BuiltIn) -> None:
        if self.reducer.hook is not None:
            why = (
                "register_comm_hook or register_builtin_comm_hook can only be called once, and "
                f"not with mixed_precision: there is {self.reducer.hook.name}"
            )
            raise self._runtime_log.failed(ModelError(why))
        self._hook = self.reducer.hook = hook

    def _register_buffer_comm_hook(
        self,
        state: object,
        hook: Callable[[Any, dict[str, Tensor]], Any],
        comm_hook_location: Any = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """`hook(state, buffers)` synchronizes buffers instead of rank 0's broadcast."""
        if not callable(hook):
            raise NotAHook(hook)
        before = comm_hook_location == _BufferCommHookLocation.PRE_FORWARD
        self._buffer_hook = BufferHook(state, hook, before)

    def __getstate__(self) -> dict[str, Any]:
        if self._group not in (None, group.WORLD):
            raise ModelError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default "
                "process group, that is without process_group=; so is deepcopy"
            )
        state = copy.copy(self.__dict__)
        state["_comm"] = state["_reducer"] = state["_uneven"] = state["_group"] = None
        state["_join_config"] = ALONE
        return state


_Torchs.register(DistributedDataParallel)  # isinstance() of torch's class, as libraries check
