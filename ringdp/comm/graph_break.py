"""Keeps torch.compile out of a class: calls of its methods break the graph and run uncompiled.

There is nothing to compile in them, and a graph break at a method in C++ loses its `self` (torch
2.13). torch.compiler.disable does the same, but adds a wrapper to every call, which takes a
microsecond, and imports torch._dynamo, which takes seconds.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

from torch._C._dynamo import eval_frame

C = TypeVar("C", bound=type)


def uncompiled(kind: C) -> C:
    """Class decorator, for a class's methods and those that it inherits from classes of ringdp."""
    for function in _functions(kind):
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
    as_they_are(kind)
    return kind


def as_they_are(*classes: type) -> None:
    """Run the methods of `classes`, and all that they call, untraced.

    This alone suffices for methods that compiled functions do not call themselves, such as those of
    a group, which C++ calls while a compiled function runs.
    """
    skip = eval_frame._FrameAction.SKIP
    plain = eval_frame._FrameExecStrategy(skip, skip)
    for function in (f for kind in classes for f in _functions(kind)):
        eval_frame.set_code_exec_strategy(function.__code__, plain)


def _functions(kind: type) -> list[FunctionType]:
    ours = [base for base in kind.__mro__ if base.__module__.startswith("ringdp.")]
    members = [member for base in ours for member in vars(base).values()]
    functions = [getattr(member, "__wrapped__", member) for member in members]
    return [function for function in functions if isinstance(function, FunctionType)]
