"""What a copy of a sharded model takes along: its values, and nothing of the engine.

`copy.deepcopy` copies a module's hooks with it. Those of an engine would gather and reduce the
units of the model that was copied whenever the copy is called, on some ranks perhaps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn
from weakref import WeakSet

from torch import nn

from ringdp.comm.graph_break import uncompiled
from ringdp.errors import UsageError
from ringdp.parallel.guards.resting import Sharded

_SHARDED: WeakSet[nn.Module] = WeakSet()  # every module of every sharded model; no copy of one


# Where torch.compile compiles a module's call with its hooks (`block.compile()`), these run as they
# are, between graphs. Traced, they would gather when they are compiled, not when they are run.
@uncompiled
class Hook:
    """An engine's, on a module. What a copy of the module has in its place does nothing.

    `may_copy`: whether parameters are whole.
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
        raise UsageError(
            "a sharded model is pickled, and its engine with it. Use ringdp.save or ringdp.export, "
            "or pickle a copy.deepcopy that is made within full_parameters()"
        )


Own = Callable[[Callable[..., Any]], Hook]  # makes a function a Hook of one engine


def _nothing(*_: object) -> None:
    """In the place of a hook."""


def mark(model: nn.Module) -> None:
    _SHARDED.update(model.modules())


def unmark(model: nn.Module) -> None:
    _SHARDED.difference_update(model.modules())


def check(model: nn.Module) -> None:
    """Raises UsageError if it is sharded, or a part of it, or what it is a part of, or if it has
    slices of a shard() that did not come to its end."""
    for name, module in model.named_modules():
        if module in _SHARDED:
            what = f"module {name} of this model" if name else "this model"
            raise UsageError(
                f"{what} is sharded already, or lies in a module that is: shard() takes a model "
                "once, fully_shard inner modules before those around them, and "
                "DistributedDataParallel none that is sharded"
            )
    for name, p in model.named_parameters():
        if isinstance(p, Sharded):
            raise UsageError(
                f"parameter {name} is this rank's slice. If a module sharded before has it, too, "
                "shard one around both in place of each; if a shard() failed on its way, make the "
                "model anew"
            )
