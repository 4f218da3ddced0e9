"""DistributedDataParallel with torch's signature: the module around the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringdp.comm import Communicator, over, world
from ringdp.errors import ModelError, UsageError
from ringdp.parallel import replicas
from ringdp.parallel.ddp.assign import CAP_BYTES, FIRST_BYTES, MIB
from ringdp.parallel.ddp.hook import CommHook
from ringdp.parallel.ddp.reducer import Reducer, Settings, Trainable
from ringdp.parallel.ddp.uneven import Status, Uneven
from ringdp.parallel.outputs import tensors


class DistributedDataParallel(nn.Module):
    """Averages `module`'s gradients over all ranks while backward runs, as torch's class does.

    Parameters, and buffers, take rank 0's values here; buffers do so again before every forward.
    After `loss.backward()` every p.grad is the average over the ranks, the same bits on each.
    Collective, as are forward and backward: every rank must come there equally often.

    process_group: a `ringdp.Communicator` or a torch.distributed group; by default what
    `ringdp.init` made last, or else torch's default group, of which only the store is used.
    bucket_cap_mb: MiB of gradients reduced at once; by default 2, the first 1 (torch: 25, 1).
    The other arguments are torch's of the same names; those of devices and of mixed_precision,
    delayed reductions and device meshes are refused. Raises ModelError (a RuntimeError) for a model
    that ranks don't share or that has nothing to train, UsageError (a ValueError) for an argument.
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
    ) -> None:
        super().__init__()
        _refuse(
            device_ids=device_ids,
            output_device=output_device,
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            mixed_precision=mixed_precision,
            device_mesh=device_mesh,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            bucket_cap_mb_list=bucket_cap_mb_list,
        )
        if bucket_cap_mb is not None and bucket_cap_mb < 0:
            raise UsageError(f"bucket_cap_mb is {bucket_cap_mb}; it must be at least 0")
        self.module = module
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.settings = Settings(
            first_bucket=FIRST_BYTES if bucket_cap_mb is None else int(bucket_cap_mb * MIB),
            bucket_cap=CAP_BYTES if bucket_cap_mb is None else int(bucket_cap_mb * MIB),
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
        )
        synced = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.broadcast_buffers = synced is not False
        self.require_backward_grad_sync = True
        self._reduced_last = True  # by the last forward: buffers may have changed since
        self._started = False  # with its first forward
        self._hook: CommHook | None = None
        self._uneven: Uneven | None = None
        self._given = process_group is not None
        trainable = self._trainable()
        self.reducer: Reducer | None = None
        self.comm: Communicator | None = _communicator(process_group)
        if init_sync:
            replicas.check_equal(self.comm, [(t.name, t.parameter) for t in trainable])
            buffers = broadcast_buffers is not False or forward_sync_buffers is not None
            self._broadcast(self.comm, buffers=buffers)
        self._reducer()

    # ---- what it works on

    def _trainable(self) -> list[Trainable]:
        found: dict[nn.Parameter, Trainable] = {}
        for prefix, m in self.module.named_modules():
            sparse = isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse
            for name, p in m.named_parameters(prefix, recurse=False):
                if p.requires_grad and name not in self.parameters_to_ignore:
                    found.setdefault(p, Trainable(name, p, sparse))
            if isinstance(m, nn.SyncBatchNorm):
                raise UsageError(
                    f"{prefix}: torch's SyncBatchNorm does not work on the CPU; use "
                    "ringdp.SyncBatchNorm.convert_sync_batchnorm(model)"
                )
        if not found:
            raise ModelError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter "
                "that requires a gradient: this one has no trainable parameter"
            )
        for name, p, _ in found.values():
            if isinstance(p, nn.parameter.UninitializedParameter):
                raise ModelError(f"{name} is uninitialized: run a forward of the model first")
        return list(found.values())

    def _buffers_to_sync(self) -> list[Tensor]:
        """Anew each time: a model may put another tensor in a buffer's place."""
        ignored = self.parameters_to_ignore
        return [b for name, b in self.module.named_buffers() if name not in ignored]

    def _broadcast(self, comm: Communicator, *, buffers: bool, root: int = 0) -> None:
        ignored = self.parameters_to_ignore
        state = [p for name, p in self.module.named_parameters() if name not in ignored]
        replicas.broadcast(comm, state + (self._buffers_to_sync() if buffers else []), root)

    def _reducer(self) -> tuple[Communicator, Reducer]:
        """Made anew for a copy, in its first forward."""
        if self.comm is None:
            self.comm = _communicator(None)
        if self.reducer is None:
            self.reducer = Reducer(self._trainable(), self.comm.duplicate(), self.settings)
            self.reducer.hook = self._hook
        return self.comm, self.reducer

    # ---- forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        reduces = self._before_forward()
        output = self.module(*inputs, **kwargs)
        self._after_forward(output, reduces=reduces)
        return output

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _before_forward(self) -> bool:
        """Whether the backward of this forward shall reduce. Collective."""
        comm, reducer = self._reducer()
        reduces = torch.is_grad_enabled() and self.require_backward_grad_sync
        buffers = self._buffers_to_sync() if self._reduced_last and self.broadcast_buffers else []
        if self._uneven is not None:
            self._uneven.exchange(Status(1, int(reduces), int(bool(buffers))))
            reducer.divisor = self._uneven.divisor
        if reduces:
            reducer.before_forward()
        if buffers:
            replicas.broadcast(comm, buffers, self._uneven.root if self._uneven else 0)
        return reduces

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _after_forward(self, output: Any, *, reduces: bool) -> None:
        if reduces:
            self._reducer()[1].arm(tensors(output))
        self._reduced_last, self._started = reduces, True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forwards within it only add to this rank's p.grad; the next backward reduces all of it.

        What counts is where the forward is, not its backward.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Within it ranks may have inputs of unequal length: see `uneven`. Collective.

        With `throw_on_early_termination` every rank raises ModelError once one has ended.
        """
        if not enable:
            yield
            return
        comm, reducer = self._reducer()
        uneven = self._uneven = Uneven(
            comm, initial_size=divide_by_initial_world_size, throw=throw_on_early_termination
        )
        try:
            yield
            uneven.shadow(self._shadow)
            self._broadcast(comm, buffers=self.broadcast_buffers, root=uneven.root)
        finally:
            self._uneven, reducer.divisor = None, comm.size

    def _shadow(self, status: Status) -> None:
        """What the others do in one forward and backward, without inputs."""
        comm, reducer = self._reducer()
        assert self._uneven is not None
        if status.reduces:
            reducer.rebuild()
        if status.broadcasts:
            replicas.broadcast(comm, self._buffers_to_sync(), self._uneven.root)
        if status.reduces:
            reducer.shadow()
        self._reduced_last = bool(status.reduces)

    def sent_bytes(self) -> int:
        """Bytes that this rank has sent to reduce gradients so far."""
        return self._reducer()[1].comm.sent_bytes()

    # ---- hooks, copies

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """`hook(state, bucket)` reduces each bucket instead of the average; see `hook`."""
        if not callable(hook):
            raise UsageError(f"a communication hook must be callable; this one is {hook!r}")
        if self._hook is not None:
            raise ModelError("register_comm_hook can only be called once")
        self._hook = CommHook(state, hook)
        _, reducer = self._reducer()
        reducer.hook = self._hook

    def __getstate__(self) -> dict[str, Any]:
        if self._given:
            raise ModelError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default "
                "process group, that is without process_group=; so is deepcopy"
            )
        state = copy.copy(self.__dict__)
        state["comm"] = state["reducer"] = state["_uneven"] = None
        return state

    def _set_static_graph(self) -> None:
        """torch's older name for static_graph=True. Before the first forward. Collective."""
        if self._started:
            raise ModelError("_set_static_graph() should be called before training loop starts")
        self.settings = self.settings._replace(static_graph=True)
        self.reducer = None
        self._reducer()

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """What torch's class tells of itself, as far as it applies here; bytes."""
        comm, reducer = self._reducer()
        sizes = [sum(s.parameter.nbytes for s in b.slots) for b in reducer.buckets]
        return {
            "world_size": comm.size,
            "rank": comm.rank,
            "module_name": type(self.module).__name__,
            "num_parameter_tensors": len(reducer.parameters),
            "total_parameter_size_bytes": sum(sizes),
            "bucket_cap_bytes": self.settings.bucket_cap,
            "bucket_sizes": ", ".join(map(str, sizes)),
            "has_rebuilt_buckets": int(reducer.rebuilt),
            "find_unused_parameters": int(self.settings.find_unused_parameters),
            "static_graph": int(self.settings.static_graph),
            "gradient_as_bucket_view": int(self.settings.gradient_as_bucket_view),
            "broadcast_buffers": int(self.broadcast_buffers),
            "comm_hook": "" if self._hook is None else self._hook.name,
        }

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: list[str]
    ) -> None:
        """Names that a DistributedDataParallel around `module` shall leave alone."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value not in (None, False, []):
            raise UsageError(f"{name} is {value!r}; only CPU modules are trained, without {name}")


def _communicator(group: Any) -> Communicator:
    if isinstance(group, Communicator):
        return group
    if group is None:
        try:
            return world()
        except UsageError:
            if not (dist.is_available() and dist.is_initialized()):
                raise
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(
            f"process_group is {group!r}; it must be a ringdp.Communicator or a "
            "torch.distributed group"
        )
    return over(group)
