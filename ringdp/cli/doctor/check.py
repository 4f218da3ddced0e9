"""What a check of `ringdp doctor` finds."""

from __future__ import annotations

from typing import NamedTuple


class Check(NamedTuple):
    """`advice` says what to do, empty if nothing; `needed`: without it, ringdp cannot run."""

    what: str
    found: str
    well: bool
    needed: bool = False
    advice: str = ""
