"""state_dict and load_state_dict of a sharded model and of its modules.

From stage 1 on the parameters are slices: both raise an error unless the parameters are whole and,
for loading, writes are kept. In stage 0 both use the masters, even during an iteration, when the
modules hold the parameters that compute (see Note [masters apart] in `unit`): those have less
precision, and what is loaded into them would be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ringdp.errors import UsageError
from ringdp.parallel.gathering import Gathering
from ringdp.parallel.guards.copies import Own
from ringdp.parallel.guards.unmanaged import Unmanaged
from ringdp.parallel.unit import FlatUnit, State


def guard(
    model: nn.Module, may_save: Callable[[], bool], may_load: Callable[[], bool], own: Own
) -> list[RemovableHandle]:
    """Hooks that raise UsageError in state_dict unless `may_save`, in load_state_dict unless
    `may_load`."""

    def refuse(what: str, allowed: bool, instead: str) -> None:
        if not allowed:
            raise UsageError(
                f"{what} of a sharded model: its parameters are this rank's flat slices{instead}"
            )

    save = ". Call it within full_parameters(), or use ringdp.save or ringdp.export."
    load = ", or only read. Call it within full_parameters(write=True), or use ringdp.load."
    handles: list[RemovableHandle] = []
    for module in model.modules():
        handles += [
            module.register_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                own(lambda *_: refuse("state_dict", may_save(), save))
            ),
            module.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                own(lambda *_: refuse("load_state_dict", may_load(), load))
            ),
        ]
    return handles


def of_masters(
    model: nn.Module, gathering: Gathering, given: Unmanaged, own: Own
) -> list[RemovableHandle]:
    """For stage 0: hooks that put units to rest for the time of the call."""
    units = [unit for unit in gathering.units if not unit.static]
    if not units:
        return []
    resting: dict[nn.Module, list[FlatUnit]] = {}  # by the outermost module called

    def rest(module: nn.Module, *_: Any) -> None:
        resting[module] = [u for u in units if u.state is State.UNSHARDED]
        if any(u.state is not State.SHARDED for u in units):
            gathering.reshard_all()

    def resume(module: nn.Module, *_: Any) -> None:
        for unit in resting.pop(module, ()):
            if unit.state is State.SHARDED:
                unit.gather(gathering.comm)
                unit.unshard()

    def loaded(module: nn.Module, *_: Any) -> None:
        if resting.get(module):
            given.check()
            resume(module)

    handles: list[RemovableHandle] = []
    for module in model.modules():
        handles += [
            module.register_state_dict_pre_hook(own(rest)),  # type: ignore[no-untyped-call]
            module.register_state_dict_post_hook(own(resume)),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(own(rest)),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_post_hook(own(loaded)),  # type: ignore[no-untyped-call]
        ]
    return handles
