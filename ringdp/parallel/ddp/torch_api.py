"""DistributedDataParallel: the undocumented names of torch's class too, which frameworks use.

    read    its arguments, devices and buffers
    call    _set_static_graph, _get_ddp_logging_data, _check_reducer_finalized, ...

Left out: what is for GPUs only (`to_kwargs`, `scatter`, `gather`), and torch's C++ `logger`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.distributed import DistributedDataParallel as _Torchs
from torch.nn.parallel.distributed import _BufferCommHookLocation

from ringdp.errors import ModelError, UsageError
from ringdp.parallel import replicas
from ringdp.parallel.ddp import comm_hooks, logging_data
from ringdp.parallel.ddp.module import Replica


class DistributedDataParallel(Replica):
    """Averages `module`'s gradients over all ranks while backward runs, as torch's class does.

    Parameters and buffers take rank 0's values at construction, buffers again before every forward.
    After `loss.backward()` every p.grad is the average over the ranks, with the same bits on each.
    Construction, forward and backward are collective: all ranks must run them equally often.
    """

    broadcast_bucket_size = replicas.PIECE
    require_manual_backward_finalization = False

    # ---- read

    @property
    def broadcast_buffers(self) -> bool:
        """The older name of forward_sync_buffers."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def find_unused_parameters(self) -> bool:
        return self.settings.find_unused_parameters

    @property
    def static_graph(self) -> bool:
        return self.settings.static_graph

    @property
    def gradient_as_bucket_view(self) -> bool:
        return self.settings.gradient_as_bucket_view

    @property
    def bucket_bytes_cap(self) -> int:
        """The cap of all buckets but the first; torch.compile splits graphs by it."""
        return self.settings.caps[-1]

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def device_type(self) -> str:
        return self.device.type

    @property
    def modules_buffers(self) -> list[Tensor]:
        return list(self.named_module_buffers.values())

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward, or the running one, synchronizes buffers."""
        return bool(self._synced_buffers)

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self.reducer.rebuilt

    @property
    def _distributed_rank(self) -> int:
        return self.comm.rank

    @property
    def _authoritative_rank(self) -> int | None:
        """Whose parameters and buffers all took in the last join."""
        return self._uneven.root if self._uneven else None

    @staticmethod
    def _get_data_parallel_params(
        module: nn.Module, named_params: bool = False
    ) -> Iterator[nn.Parameter | tuple[str, nn.Parameter]]:
        """The parameters that a DistributedDataParallel around `module` does not ignore."""
        for name, p in module.named_parameters():
            if not hasattr(p, "_ddp_ignored"):
                yield (name, p) if named_params else p

    # ---- call

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """A torch.distributed.BuiltinCommHookType: see `comm_hooks`."""
        self._register(comm_hooks.built_in(comm_hook_type))

    def _register_buffer_comm_hook(
        self,
        state: object,
        hook: Callable[[Any, dict[str, Tensor]], Any],
        comm_hook_location: Any = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """`hook(state, buffers)` synchronizes buffers instead of rank 0's broadcast."""
        if not callable(hook):
            raise comm_hooks.NotAHook(hook)
        before = comm_hook_location == _BufferCommHookLocation.PRE_FORWARD
        self._buffer_hook = comm_hooks.BufferHook(state, hook, before)

    def _set_static_graph(self) -> None:
        """torch's older name for static_graph=True. Before the first forward. Collective."""
        if self.static_graph:
            warnings.warn(
                "static_graph is True already: no need to set it again", UserWarning, stacklevel=2
            )
            return
        if self.reducer.begun:
            self._log_and_throw(
                ModelError, "_set_static_graph() should be called before training loop starts"
            )
        self.settings = self.settings._replace(static_graph=True)
        self._make_reducer()

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """See `logging_data`."""
        return logging_data.facts(self)

    def _register_fused_optim(
        self, optim: type[torch.optim.Optimizer], *args: Any, **kwargs: Any
    ) -> None:
        """Register a hook that steps an `optim(params, *args, **kwargs)` on each bucket once it is
        reduced. As in torch, for types with a functional form, over torch's default group. Raises
        UsageError unless this DDP is over that group."""
        if not dist.is_initialized() or self._group not in (None, dist.group.WORLD):
            raise UsageError(
                f"_register_fused_optim reduces over torch's default group; this one is over "
                f"{self.process_group}: make the default group, and give no process_group"
            )
        _Torchs._register_fused_optim(self, optim, *args, **kwargs)  # type: ignore[arg-type]

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Time every `sample_rate`-th iteration beyond the tenth. See `runtime_log`."""
        self._runtime_log.sample(sample_rate)

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether the caller must call `finalize_backward` after backward."""
        return self.require_manual_backward_finalization

    def finalize_backward(self) -> None:
        """No effect: everything is reduced when backward returns."""

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """Broadcast `bufs`, by default all buffers, from that rank, in messages of `bucket_size`
        bytes, by default `broadcast_bucket_size`. Collective."""
        tensors = self.modules_buffers if bufs is None else bufs
        piece = bucket_size or self.broadcast_bucket_size
        replicas.broadcast(self.comm, tensors, authoritative_rank, piece)

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """The reduced parameters in the order of their indices, and whether each is sparse."""
        return [t.parameter for t in self._trainable], [t.sparse for t in self._trainable]

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> NoReturn:
        raise self._runtime_log.failed(err_type(err_msg))

    # ---- torch's own, which use no more than the names above

    _set_params_and_buffers_to_ignore_for_model = staticmethod(
        _Torchs._set_params_and_buffers_to_ignore_for_model
    )
    _build_debug_param_to_name_mapping = _Torchs._build_debug_param_to_name_mapping
    _check_reducer_finalized = _Torchs._check_reducer_finalized
    _remove_autograd_hooks = _Torchs._remove_autograd_hooks
    # No effect: outputs can be changed in place here without the clone that torch makes.
    _set_ddp_sink_clone = _Torchs._set_ddp_sink_clone


# The name in Python's errors for a missing or unexpected argument.
Replica.__init__.__qualname__ = f"{DistributedDataParallel.__name__}.__init__"
_Torchs.register(DistributedDataParallel)  # isinstance() of torch's class, as libraries check
