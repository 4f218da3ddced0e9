"""A DDP within another: gradients are reduced once, by the outermost whose backward shall.

Both hear of the same gradients. torch's reduce a copy each, and both get the average; here what is
being reduced lies in p.grad, where the outer one would find it halfway and reduce it again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from ringdp.errors import ModelError
from ringdp.parallel.ddp.settings import Trainable

SHOWN = 3  # names in an error


class Outers:
    """The DDPs in whose forward one has been called. It hears of them there, as they may be made
    later; a recomputation in backward is in none."""

    def __init__(self, trainable: Iterable[Trainable]) -> None:
        self._trainable = list(trainable)
        self._train: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # its parameters, too

    def __reduce__(self) -> tuple[type[Outers], tuple[list[Trainable]]]:
        """A copy has been called in none."""
        return Outers, (self._trainable,)

    def meet(self, active: Any) -> None:
        """The one whose forward is under way, or None. Raises ModelError where each would reduce
        some gradients alone, or the outer one is torch's."""
        if active is None or active in self._train:
            return
        mine = [t for t in self._trainable if t.parameter.requires_grad]
        ours = isinstance(getattr(active, "_outers", None), Outers)
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
        """Whether one of them does so in the next backward."""
        return any(
            outer._reduces or outer._outers.reduces()
            for outer, train in self._train.items()
            if train
        )
