"""Copies of a sharded model have its values, and nothing of its engine.

`copy.deepcopy` copies a module's hooks. An engine's hooks in a copy would gather and reduce the
original's units whenever the copy is called, perhaps on some ranks only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn
from weakref import WeakSet

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ringdp.comm.graph_break import uncompiled
from ringdp.errors import UsageError
from ringdp.parallel.guards.resting import ShardedParam

_SHARDED: WeakSet[nn.Module] = WeakSet()  # all modules of sharded models; no copies
# Parameter -> weak reference to its sharded model. Since a weak reference to it exists, torch
# refuses to swap it for another, as .to() and load_state_dict do where
# set_swap_module_params_on_conversion() says so: the engine's hooks would be gone.
_MODELS: Any = WeakIdKeyDictionary()


# Where torch.compile compiles a module's call with its hooks (`block.compile()`), these run eagerly
# between graphs. If they were traced, they would gather during compilation, not when run.
@uncompiled
class EngineHook:
    """An engine's hook on a module. In a copy of the module it does nothing.

    `may_copy`: whether parameters are whole; otherwise deepcopy raises UsageError.
    """

    def __init__(self, call: Callable[..., Any], may_copy: Callable[[], bool]) -> None:
        self.call, self.may_copy = call, may_copy

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        if not self.may_copy():
            raise UsageError(
                "a sharded model is copied: its parameters are this rank's flat slices. Copy it "
                "within full_parameters(), or before shard()"
            )
        return _nothing

    def __reduce__(self) -> NoReturn:
        refuse_pickle()


# (register, call, **options): makes `call` a hook of one engine, by a module's method `register`
AddHook = Callable[..., None]


def refuse_pickle() -> NoReturn:
    raise UsageError(
        "a sharded model is pickled, and its engine with it. Use ringdp.save or ringdp.export, or "
        "pickle a copy.deepcopy that is made within full_parameters()"
    )


def _nothing(*_: object) -> None:
    """A hook's replacement in a copy."""


def mark(model: nn.Module) -> None:
    _SHARDED.update(model.modules())
    _MODELS.update(dict.fromkeys(model.parameters(), weakref.ref(model)))


def unmark(model: nn.Module) -> None:
    _SHARDED.difference_update(model.modules())


def check(model: nn.Module) -> None:
    """Raise UsageError if the model, a part of it, a model around it, or one of its parameters is
    sharded, or if it has slices left by a shard() that failed."""
    for name, module in model.named_modules():
        if module in _SHARDED:
            what = f"module {name} of this model" if name else "this model"
            raise UsageError(
                f"{what} is sharded already, or lies in a module that is: shard() takes a model "
                "once, fully_shard inner modules before those around them, and "
                "DistributedDataParallel none that is sharded"
            )
    for name, p in model.named_parameters():
        if _MODELS.get(p, lambda: None)() in _SHARDED or isinstance(p, ShardedParam):
            raise UsageError(
                f"parameter {name} is sharded already. If a module sharded before has it, too, "
                "shard one around both in place of each; if a shard() failed on its way, make the "
                "model anew"
            )
