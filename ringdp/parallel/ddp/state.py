"""Where a reducer stands, from a forward to the end of its backward."""

from __future__ import annotations

from enum import Enum, auto


class State(Enum):
    """
    RESTING --forward--> ARMED --first gradient--> RUNNING --last bucket--> ENDING --end--> RESTING
    ARMED --outputs' gradient--> ENDING    where the end of backward must be known
    ENDING --end--> ARMED                  of a backward that brought no rank a gradient

    A backward that raises, or leaves a bucket incomplete, stays RUNNING or ENDING: the next forward
    tells of it.
    """

    RESTING = auto()
    """A backward reduces nothing: it adds to p.grad, as within no_sync."""
    ARMED = auto()
    """The next backward reduces: every bucket waits for its gradients."""
    RUNNING = auto()
    """Buckets are being filled; those that are whole are being reduced."""
    ENDING = auto()
    """As RUNNING, and autograd has been asked to say when it is through."""


# As State.RESTING each costs 0.1 us on Python 3.11, and every gradient asks for two.
RESTING, ARMED, RUNNING, ENDING = State
UNDER_WAY = (RUNNING, ENDING)  # a backward that reduces
