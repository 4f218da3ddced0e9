"""state_dict and load_state_dict of a sharded model and of its modules.

From stage 1 on the parameters are slices: both raise an error unless the parameters are whole and,
for loading, writes are kept. In stage 0 both use the masters, even during an iteration, when the
modules hold the parameters that compute (see Note [masters apart] in `unit`): those have less
precision, and what is loaded into them would be lost.

The tensors of a state_dict lie in their unit's memory, as the parameters do, but each has a storage
of its own. Libraries take tensors of one storage for tied ones, and leave all but one out of a
file; and torch.save of a few tensors would write all of their units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ringdp.errors import UsageError
from ringdp.parallel.gathering import Gathering
from ringdp.parallel.guards.copies import AddHook
from ringdp.parallel.guards.unmanaged import Unmanaged
from ringdp.parallel.state import State
from ringdp.parallel.unit import FlatUnit


def guard(
    model: nn.Module, may_save: Callable[[], bool], may_load: Callable[[], bool], add_hook: AddHook
) -> None:
    """Raise UsageError in state_dict unless `may_save`, in load_state_dict unless `may_load`."""

    def check(what: str, allowed: Callable[[], bool], instead: str, *_: object) -> None:
        if not allowed():
            raise UsageError(
                f"{what} of a sharded model: its parameters are this rank's flat slices{instead}"
            )

    save = ". Call it within full_parameters(), or use ringdp.save or ringdp.export."
    load = ", or only read. Call it within full_parameters(write=True), or use ringdp.load."
    saves = partial(check, "state_dict", may_save, save)
    loads = partial(check, "load_state_dict", may_load, load)
    for module in model.modules():
        add_hook(module.register_state_dict_pre_hook, saves)
        add_hook(module.register_load_state_dict_pre_hook, loads)


def own_storages(model: nn.Module, units: Sequence[FlatUnit], add_hook: AddHook) -> None:
    """Tied parameters have one storage."""
    tied = {
        (place.module, place.name)
        for unit in units
        for places in unit.places
        if len(places) > 1
        for place in places
    }

    def saved(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        for name in module._parameters:
            value = state.get(prefix + name)
            if type(value) is Tensor and value.is_contiguous():  # no parameter, as with keep_vars
                others = state.values() if (module, name) in tied else ()
                state[prefix + name] = _in_own_storage(value, others)

    for module in model.modules():
        add_hook(module.register_state_dict_post_hook, saved)


def _in_own_storage(value: Tensor, others: Iterable[Any]) -> Tensor:
    """`value` in a storage of its size in the same memory, or that of `others` which has it. A
    storage keeps the one alive that it is a part of."""
    memory, begin = value.untyped_storage(), value.storage_offset() * value.element_size()
    if memory.nbytes() == value.nbytes:
        return value
    for other in others:
        if (
            type(other) is Tensor
            and other.data_ptr() == value.data_ptr()
            and other.untyped_storage().nbytes() == value.nbytes
            and other.shape == value.shape
        ):
            return other
    own: Any = memory[begin : begin + value.nbytes]
    return torch.empty(0, dtype=value.dtype, device=value.device).set_(
        own, 0, value.shape, value.stride()
    )


def of_masters(model: nn.Module, gathering: Gathering, given: Unmanaged, add_hook: AddHook) -> None:
    """For stage 0: put units to rest for the time of the call."""
    units = [unit for unit in gathering.units if not unit.static]
    if not units:
        return
    resting: dict[nn.Module, list[FlatUnit]] = {}  # by the outermost module called

    def rest(module: nn.Module, *_: Any) -> None:
        resting[module] = [u for u in units if u.state is State.UNSHARDED]
        if any(u.state is not State.SHARDED for u in units):
            gathering.reshard(gathering.units)

    def resume(module: nn.Module, *_: Any) -> None:
        for unit in resting.pop(module, ()):
            if unit.state is State.SHARDED:
                unit.gather(gathering.comm)
                unit.unshard()

    def loaded(module: nn.Module, *_: Any) -> None:
        if resting.get(module):
            given.check()
            resume(module)

    for module in model.modules():
        add_hook(module.register_state_dict_pre_hook, rest)
        add_hook(module.register_state_dict_post_hook, resume)
        add_hook(module.register_load_state_dict_pre_hook, rest)
        add_hook(module.register_load_state_dict_post_hook, loaded)
