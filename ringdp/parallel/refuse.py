"""Errors for what another library's interface has and ringdp does not: arguments and attributes."""

from __future__ import annotations

from reprlib import Repr

from torch import nn

from ringdp.errors import UsageError

_repr = Repr()  # one line of what may be a model's parameters
_repr.maxother = _repr.maxstring = 100


class MissingAttribute(UsageError, AttributeError):
    """An attribute of the other library that a front does not have: hasattr() is False."""

    def __init__(self, front: str, name: str, instead: str) -> None:
        super().__init__(f"{front}: {name} is not implemented; use {instead}")


def refuse(front: str, **given: tuple[object, object]) -> None:
    """`given`: argument=(its value, the only value allowed). Raises UsageError for others."""
    for name, (value, allowed) in given.items():
        if value is not allowed and value != allowed:
            shown = " ".join(_repr.repr(value).split())
            raise UsageError(f"{front}: {name}={shown} is not implemented; allowed: {allowed!r}")


def checked_module(front: str, given: object) -> nn.Module:
    if not isinstance(given, nn.Module):
        raise UsageError(f"{front} takes a module; this is a {type(given).__name__}")
    return given


def check_whole(what: str, module: object, model: object) -> None:
    """Raise UsageError unless the module is the whole model that was sharded."""
    if module is not model:
        raise UsageError(
            f"{what} is not implemented for a part of a model; allowed: on the module that was "
            "sharded last, for all of it"
        )
