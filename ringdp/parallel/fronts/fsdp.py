"""`FullyShardedDataParallel` with torch's signature: a wrapper around a module.

Modules inside it that were wrapped before become its units, as with `fully_shard`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map_only

from ringdp.comm import Communicator
from ringdp.errors import UsageError
from ringdp.parallel.engine import Engine
from ringdp.parallel.entry import shard
from ringdp.parallel.fronts.fsdp2 import take_in
from ringdp.parallel.fronts.fsdp_arguments import (
    cast_buffers,
    device_of,
    field,
    init_of,
    precision_of,
    ranks_for,
    strategy_of,
    units_of,
)
from ringdp.parallel.fronts.fsdp_optim import by_name, by_number, names_of
from ringdp.parallel.fronts.fsdp_state import check_configs, configure, save_as_unwrapped, whole
from ringdp.parallel.offload import Offload
from ringdp.parallel.optimizer.clip import clip_grad_norm_
from ringdp.parallel.precision import Precision
from ringdp.parallel.refuse import MissingAttribute, check_whole, checked_module, refuse

WHOLE_STATE = "ringdp.save and ringdp.load, or state_dict() and optim_state_dict(), which are whole"
# Attributes of torch's class that are not implemented, and what to use.
ABSENT = {
    "check_is_root": "engine.model, the module that was sharded last",
    "flatten_sharded_optim_state_dict": WHOLE_STATE,
    "fsdp_modules": "engine.units, one of which each module gathers",
    "full_optim_state_dict": WHOLE_STATE,
    "register_comm_hook": "mixed_precision, whose reduce_dtype compresses gradients",
    "rekey_optim_state_dict": WHOLE_STATE,
    "scatter_full_optim_state_dict": WHOLE_STATE,
    "shard_full_optim_state_dict": WHOLE_STATE,
    "sharded_optim_state_dict": WHOLE_STATE,
}


def _absent(name: str) -> MissingAttribute:
    return MissingAttribute("FullyShardedDataParallel", name, ABSENT[name])


class _Named(type):
    """Reports missing static methods on the class."""

    def __getattr__(cls, name: str) -> Any:
        if name in ABSENT:
            raise _absent(name)
        raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")


class FullyShardedDataParallel(nn.Module, metaclass=_Named):
    """Shards the module that it wraps, in place. Collective.

    sharding_strategy: torch's FULL_SHARD (stage 3), SHARD_GRAD_OP (stage 2) or NO_SHARD (stage 0);
    with HYBRID_SHARD (stage 3) and _HYBRID_SHARD_ZERO2 (stage 2) the ranks of each host hold a
    replica, or those of a pair of groups, shards and replicas, or of a device_mesh of replicas and
    shards. auto_wrap_policy: torch's, such as a partial of transformer_auto_wrap_policy; None makes
    one unit, apart from modules wrapped by hand. mixed_precision, cpu_offload: torch's classes;
    with a policy, batch norms and the other modules that mixed_precision names compute in float32,
    as in torch. device_mesh: otherwise of one dimension. device_id: the GPU that a model on the CPU
    is moved to, by default that of the ranks. param_init_fn: allocates and fills the own tensors of
    the module on the meta device that it gets.
    Parameters and buffers always take rank 0's values (sync_module_states), and parameters stay the
    model's own (use_orig_params). The other arguments tune what is always on here; values that ask
    for more are errors.
    """

    module: nn.Module
    engine: Engine

    def __init__(
        self,
        module: nn.Module,
        process_group: Communicator | ProcessGroup | None = None,
        sharding_strategy: Any = None,
        cpu_offload: Any = None,
        auto_wrap_policy: Callable[..., bool] | None = None,
        backward_prefetch: Any = None,
        mixed_precision: Any = None,
        ignored_modules: object = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = True,
        forward_prefetch: bool = True,
        limit_all_gathers: bool = True,
        use_orig_params: bool = True,
        ignored_states: object = None,
        device_mesh: Any = None,
    ) -> None:
        super().__init__()
        module = checked_module("FullyShardedDataParallel", module)
        name, stage = strategy_of(sharding_strategy)
        prefetch = getattr(backward_prefetch, "name", backward_prefetch) or "BACKWARD_PRE"
        refuse(
            "FullyShardedDataParallel",
            ignored_modules=(ignored_modules or None, None),
            backward_prefetch=(prefetch, "BACKWARD_PRE"),
            limit_all_gathers=(limit_all_gathers, True),
            ignored_states=(ignored_states or None, None),
        )
        offloads = cpu_offload is not None and field("cpu_offload", cpu_offload, "offload_params")
        precision = precision_of(mixed_precision, wraps=auto_wrap_policy is not None)
        offload = Offload(parameters=stage == 3, optimizer=True) if offloads else None
        self._asked, self._precision = (name, offload), precision or Precision()
        inner = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        if any(auto_wrap_policy or m._asked != self._asked for m in inner):
            raise UsageError(
                "FullyShardedDataParallel: modules within are wrapped already; allowed around them:"
                " the same sharding_strategy and cpu_offload, no auto_wrap_policy"
            )
        given = {m.module: m._precision for m in inner if next(m.parameters(), None) is not None}
        units = {unit.module for m in inner for unit in m.engine.units}
        if auto_wrap_policy is not None:
            units = units_of(module, auto_wrap_policy)
        device, init = device_of(device_id, module), init_of(param_init_fn, module)
        group, shard_size, gpu = ranks_for(name, process_group, device_mesh)
        comm = take_in(inner, module, group, shard_size, device or gpu)
        self.module = module
        self._state_configs: tuple[Any, Any] = (None, None)  # the model's, the optimizer's
        self.engine = shard(
            module,
            stage=stage,
            unit=units,
            precision=given | {module: self._precision},
            offload=offload,
            init=init,
            comm=comm,
            shard_size=shard_size,
        )
        self.engine.always_gathers_state = True
        dtype = getattr(mixed_precision, "buffer_dtype", None)
        dtypes = cast_buffers(module, dtype, self._precision, inner)
        for m in inner:
            m.engine = self.engine
        save_as_unwrapped(self, dtypes)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ABSENT and not hasattr(self.module, name):
                raise _absent(name) from None
            return getattr(self.module, name)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Uses the unwrapped model's names; so do named_parameters and named_buffers, then."""
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tells torch.distributed.checkpoint.state_dict to leave "module" out of names."""
        return {"": "module"}

    def __getitem__(self, key: Any) -> Any:
        """An item of the module, if it is a sequence."""
        return self.module[key]  # type: ignore[index]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy of the module, without the wrapper; see `guards.copies`."""
        return copy.deepcopy(self.module, memo)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Apply to the module and all within, with whole parameters. Collective."""
        with self.engine.full_parameters(write=True):
            return super().apply(fn)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """A whole copy: torch's FULL_STATE_DICT, its default. See state_dict_type. Buffers have the
        dtypes that they had before buffer_dtype. Collective."""
        destination = args[0] if args else kwargs.get("destination")
        others = {*(destination or ())}  # of modules beside this one
        with self.engine.full_parameters():
            state: dict[str, Any] = super().state_dict(*args, **kwargs)
        config, _ = self._state_configs
        configure(state, state.keys() - others, config, self.engine.comm.rank)
        return state

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a whole state_dict, the same on every rank. Collective."""
        with self.engine.full_parameters(write=True):
            return super().load_state_dict(*args, **kwargs)

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: Any,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> Iterator[None]:
        """set_state_dict_type inside the context."""
        before = [(m, m._state_configs) for m in _wrappers(module)]
        FullyShardedDataParallel.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for wrapper, configs in before:
                wrapper._state_configs = configs

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: Any,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> Any:
        """Set torch's FULL_STATE_DICT configs for state_dict() and optim_state_dict(), of all that
        are wrapped in the module. Returns the settings before, as get_state_dict_type."""
        before = FullyShardedDataParallel.get_state_dict_type(module)
        kind = getattr(state_dict_type, "name", state_dict_type)
        refuse("state_dict_type", state_dict_type=(kind, "FULL_STATE_DICT"))
        check_configs(state_dict_config, optim_state_dict_config)
        for wrapper in _wrappers(module):
            wrapper._state_configs = state_dict_config, optim_state_dict_config
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> Any:
        """torch's StateDictSettings, of the first that is wrapped in the module."""
        from torch.distributed import fsdp  # who calls this has it

        if not (wrappers := _wrappers(module)):
            name = type(module).__name__
            raise UsageError(f"state_dict_type: neither {name} nor a part of it is wrapped")
        model, optimizer = wrappers[0]._state_configs
        return fsdp.StateDictSettings(
            fsdp.StateDictType.FULL_STATE_DICT,
            model or fsdp.FullStateDictConfig(),
            optimizer or fsdp.FullOptimStateDictConfig(),
        )

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: object = None,
    ) -> dict[str, Any]:
        """The optimizer's state of whole parameters, by their names. Collective."""
        refuse("optim_state_dict", group=(group, None))
        wrapper = _wrapper("optim_state_dict", model)
        names = names_of(wrapper, optim)
        wrapper.engine.take(optim)  # one that has not stepped may have state, as Adagrad
        state = optim.state_dict() if optim_state_dict is None else optim_state_dict
        _, config = wrapper._state_configs
        if getattr(config, "rank0_only", False) and wrapper.engine.comm.rank > 0:
            return {}
        if getattr(config, "offload_to_cpu", False):
            state = tree_map_only(torch.Tensor, torch.Tensor.cpu, state)
        return by_name(names, state)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: object = None,
    ) -> dict[str, Any]:
        """Turns the result of optim_state_dict() into what optim.load_state_dict() takes. It stays
        whole, the same on every rank; the optimizer keeps its slices."""
        refuse(
            "optim_state_dict_to_load",
            is_named_optimizer=(is_named_optimizer, False),
            group=(group, None),
        )
        wrapper = _wrapper("optim_state_dict_to_load", model)
        if "param_groups" not in optim_state_dict:
            raise UsageError(
                "optim_state_dict_to_load: the optim_state_dict has no param_groups, as that of "
                "ranks other than 0 with rank0_only=True; allowed: rank 0's, on every rank"
            )
        state = by_number(names_of(wrapper, optim), optim_state_dict)
        if load_directly:
            optim.load_state_dict(state)
        return state

    def no_sync(self) -> AbstractContextManager[None]:
        """See Engine.no_sync."""
        check_whole("no_sync", self.module, self.engine.model)
        return self.engine.no_sync()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of all gradients over all ranks, before they were clipped. Collective."""
        check_whole("clip_grad_norm_", self.module, self.engine.model)
        refuse("clip_grad_norm_", norm_type=(norm_type, 2.0))
        return torch.tensor(clip_grad_norm_(self.engine, max_norm), device=self.engine.device)

    @staticmethod
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> AbstractContextManager[None]:
        """Inside it all parameters of the module are whole. `writeback`: keep writes, which all
        ranks must make."""
        refuse(
            "summon_full_params",
            recurse=(recurse, True),
            rank0_only=(rank0_only, False),
            offload_to_cpu=(offload_to_cpu, False),
            with_grads=(with_grads, False),
        )
        return whole(dict.fromkeys(m.engine for m in _wrappers(module)), write=writeback)


def _wrapper(caller: str, module: nn.Module) -> FullyShardedDataParallel:
    if not isinstance(module, FullyShardedDataParallel):
        raise UsageError(f"{caller}: {type(module).__name__} is not wrapped")
    return module


def _wrappers(module: nn.Module) -> list[FullyShardedDataParallel]:
    """All in the module, outer ones first."""
    return [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
