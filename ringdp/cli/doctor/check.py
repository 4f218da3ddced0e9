"""The result of a check of `ringdp doctor`."""

from __future__ import annotations

from typing import NamedTuple


class Check(NamedTuple):
    """`advice` says what to do, if anything. ringdp cannot run without what is `needed`."""

    what: str
    found: str
    well: bool
    needed: bool = False
    advice: str = ""
