"""Arguments that a front takes for its signature's sake: anything but the default is an error."""

from __future__ import annotations

from ringdp.errors import UsageError


def refuse(front: str, given: dict[str, tuple[object, object]]) -> None:
    """`given`: name -> (value, the one that is allowed)."""
    for name, (value, allowed) in given.items():
        if value is not allowed and value != allowed:
            raise UsageError(f"{front}: {name}={value!r} is not implemented; allowed: {allowed!r}")
