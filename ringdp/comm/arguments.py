"""Checks of arguments to communicators, which raise UsageError before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from math import inf, isnan
from numbers import Real
from operator import index

import torch
from torch import Tensor

from ringdp.errors import UsageError
from ringdp.transport.base import DTYPES, Link

MOST = 1 << 56  # elements: csrc counts their bytes in 63 bits


def check_tensor(collective: str, given: object, name: str = "tensor") -> None:
    """Check that `given` is a dense torch tensor of a dtype that collectives take."""
    if not isinstance(given, Tensor):
        found = type(given).__name__
        raise UsageError(f"{collective}: {name} is a {found}; allowed: a torch.Tensor")
    if given.layout is not torch.strided or given.is_nested:
        layout = "nested" if given.is_nested else given.layout
        raise UsageError(f"{collective}: {name} is {layout}; allowed: a dense one")
    if real_dtype(given) not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise UsageError(
            f"{collective}: {name} is of {given.dtype}; allowed: {names}, complex dtypes; to move "
            "another, pass its bytes: view(torch.uint8)"
        )


def real_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype that is moved, of half the width of a complex one."""
    return tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype


def check_algorithm(collective: str, given: object) -> None:
    """Check that `given` is a name, or a hashable callable: programs are cached by it."""
    if not (isinstance(given, str) or (callable(given) and isinstance(given, Hashable))):
        raise UsageError(
            f"{collective}: algorithm is {given!r}; allowed: a name of `ringdp show --list`, or a "
            "function n -> Schedule that can be hashed"
        )


def check_async(collective: str, given: object) -> None:
    """Check for a bool: any other truthy value could start a call that nobody waits for."""
    if not isinstance(given, bool):
        raise UsageError(f"{collective}: async_op is {given!r}; allowed: True or False")


def index_of(given: object) -> int | None:
    """Return a whole number as an int, or None if `given` is not one."""
    try:
        return index(given)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # RuntimeError: a torch tensor without memory
        return None


def check_int(collective: str, name: str, given: int, most: int, what: str, least: int = 0) -> int:
    """Return `given` as an int. Raises UsageError unless it is one from `least` to `most`.

    `what` is the plural noun for the message, such as "ranks".
    """
    found = index_of(given)
    if found is None or not least <= found <= most:
        raise UsageError(f"{collective}: {name} is {given!r}; {what} are {least}..{most}")
    return found


def check_float(
    name: str, given: object, allowed: str, within: Callable[[float], bool] = lambda _: True
) -> float:
    """Return a real number, or a tensor with one element, as a float.

    Raises UsageError, which says what is `allowed`, unless it is one and `within` accepts it.
    """
    found = None
    if isinstance(given, Real | Tensor):
        with suppress(OverflowError, RuntimeError, ValueError):  # too large, or not one element
            found = float(given)
    if found is None or not within(found):
        raise UsageError(f"{name} is {given!r}; allowed: {allowed}")
    return found


def check_timeout(timeout: float) -> float:
    """Check a communicator's timeout."""
    allowed = "seconds, above 0 and below 1e13"  # a timedelta has room for 8e13
    return check_float("timeout", timeout, allowed, lambda s: 0 < s < 1e13)


def check_wait_timeout(timeout: float) -> float:
    """Check the timeout of one `wait`."""
    return check_float("wait: timeout", timeout, "seconds, or None", lambda s: not isnan(s))


def check_warn_after(warn_after: float) -> float:
    allowed = "seconds above 0, inf for never"
    return check_float("warn_after", warn_after, allowed, lambda s: s > 0)


def check_link(link: Link | None) -> Link | None:
    if link is None:
        return None
    if not isinstance(link, Link):
        raise UsageError(f"link is {link!r}; allowed: ringdp.Link(latency, bandwidth), or None")
    seconds, speed = "seconds, 0 or more and finite", "bytes/s above 0 and finite"
    return Link(
        check_float("link: latency", link.latency, seconds, lambda s: 0 <= s < inf),
        check_float("link: bandwidth", link.bandwidth, speed, lambda b: 0 < b < inf),
    )
