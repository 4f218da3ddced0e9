"""Nested DDPs: the outermost one that reduces does so alone, so each gradient is reduced once.

The hooks of both fire for the same gradients. In torch each reduces a copy of its own. Here p.grad
is the bucket's memory, and the outer DDP would reduce again what the inner one is reducing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from ringdp.errors import ModelError
from ringdp.parallel.ddp.settings import Trainable

SHOWN = 3  # names in an error


class EnclosingDDPs:
    """The DDPs in whose forwards one DDP has been called.

    They are noted when that happens, since they may be constructed later than the inner one. A
    recomputation during backward runs inside no forward.
    """

    def __init__(self, trainable: Iterable[Trainable]) -> None:
        self._trainable = list(trainable)
        self._train: WeakKeyDictionary[Any, bool] = (
            WeakKeyDictionary()
        )  # DDP -> whether it trains our parameters

    def __reduce__(self) -> tuple[type[EnclosingDDPs], tuple[list[Trainable]]]:
        """A copy starts without any."""
        return EnclosingDDPs, (self._trainable,)

    def note(self, active: Any) -> None:
        """Record `active`, the DDP whose forward is running, or None.

        Raises ModelError if each would have gradients of its own to reduce besides shared ones, or
        if the outer one is torch's.
        """
        if active is None or active in self._train:
            return
        mine = [t for t in self._trainable if t.parameter.requires_grad]
        ours = isinstance(getattr(active, "_enclosing", None), EnclosingDDPs)
        theirs = {t.parameter for t in active._trainable} if ours else {*active._module_parameters}
        both = [t.name for t in mine if t.parameter in theirs]
        if both and not (ours and len(both) == len(mine)):
            some = ", ".join(both[:SHOWN]) + f" and {len(both) - SHOWN} more" * (len(both) > SHOWN)
            raise ModelError(
                f"a DistributedDataParallel is called within another, a {type(active)}, and both "
                f"would reduce {some}: take one alone, as where a library wraps the model once "
                "more; or ringdp's for both, and let the outer one train all of the inner one's "
                "parameters, or none of them"
            )
        self._train[active] = bool(both)

    def reduces(self) -> bool:
        """Whether one of them reduces in the next backward."""
        return any(
            outer._reduces or outer._enclosing.reduces()
            for outer, train in self._train.items()
            if train
        )
