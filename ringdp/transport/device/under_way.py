"""A collective that has been issued, until its end on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ringdp.transport.device.stamp import Stamped
from ringdp.transport.device.streams import End

Met = tuple[Tensor, End]  # the stamp of the rank before, there from then on


@dataclass(eq=False)
class UnderWay:
    """Its stamps are compared when they have met, which is before its end and though that may
    never come: ranks that call different things can hang on the device."""

    ticket: int
    until: float  # when it has failed, if it has not ended
    ours: Stamped
    kept: object  # None once a wait for it has returned
    met: Met | None  # None once they agree
    end: End | None = None  # None while it is being issued
