"""A sharded model within torch's DistributedDataParallel, where libraries put it, is an error.

DDP would give all ranks rank 0's slices; where slices differ in size, its own error does not say
why. In stage 0 its reducer would leave the engine without gradients. Before DDP does anything it
asks the module that it is given for the names of parameters to ignore. A module around a sharded
one has no such names: that is found in the first forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringdp.errors import UsageError
from ringdp.parallel.unit import FlatUnit

_ASKED = "_ddp_params_and_buffers_to_ignore"


def check(units: Sequence[FlatUnit]) -> None:
    """At the start of an iteration. Raises UsageError within a DDP that trains these units."""
    outer: Any = DistributedDataParallel._active_ddp_module
    theirs = {id(p) for p in getattr(outer, "_module_parameters", ())}
    if theirs and any(id(p) in theirs for unit in units for p in unit.parameters):
        raise _error("a module with a sharded one within it")


class Refusal:
    """Refuses to let the model be wrapped, until it is removed. Has only a weak reference: an
    engine's handles may be kept for longer than its model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._before = vars(model).get(_ASKED)
        vars(model)[_ASKED] = _Refused()

    def remove(self) -> None:
        if (model := self._model()) is None:
            return
        vars(model).pop(_ASKED, None)
        if self._before is not None:
            vars(model)[_ASKED] = self._before


class _Refused:
    def __iter__(self) -> Iterator[str]:
        raise _error("a sharded model")

    def __deepcopy__(self, memo: object) -> tuple[()]:
        """A copy of the model may be wrapped."""
        return ()


def _error(what: str) -> UsageError:
    return UsageError(
        f"{what} is in torch's DistributedDataParallel, which would reduce its gradients once "
        "more. Leave it unwrapped, and pass it to no function that wraps it, such as accelerate's "
        "prepare; or give such a function a model that is not sharded"
    )
