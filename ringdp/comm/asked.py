"""What is asked of a communicator, checked before anything is sent: else a UsageError."""

from __future__ import annotations

from math import inf
from numbers import Real
from operator import index

import torch
from torch import Tensor

from ringdp.errors import UsageError
from ringdp.transport.base import Link


def check_tensor(collective: str, given: object) -> None:
    """A torch tensor whose elements lie in memory one by one."""
    if not isinstance(given, Tensor):
        found = type(given).__name__
        raise UsageError(f"{collective}: tensor is a {found}; allowed: a torch.Tensor")
    if given.layout is not torch.strided or given.is_nested:
        layout = "nested" if given.is_nested else given.layout
        raise UsageError(f"{collective}: tensor is {layout}; allowed: a dense one")


def whole(collective: str, name: str, given: int, most: int, what: str) -> int:
    """A whole number from 0 to `most`, as an int; `what`: are there."""
    try:
        found = index(given)
    except TypeError:
        found = -1
    if not 0 <= found <= most:
        raise UsageError(f"{collective}: {name} is {given!r}; {what} are 0..{most}")
    return found


def check_times(timeout: float, warn_after: float, link: Link | None) -> None:
    """Of `init`."""
    if not (isinstance(timeout, Real) and 0 < timeout < inf):
        raise UsageError(f"timeout is {timeout!r}; allowed: seconds, above 0 and finite")
    if not (isinstance(warn_after, Real) and warn_after > 0):
        raise UsageError(f"warn_after is {warn_after!r}; allowed: seconds above 0, inf for never")
    if link is None:
        return
    if not (isinstance(link, Link) and 0 <= link.latency < inf and 0 < link.bandwidth < inf):
        raise UsageError(
            f"link is {link!r}; allowed: ringdp.Link(latency, bandwidth), in s from 0 on and in "
            "bytes/s above 0"
        )
