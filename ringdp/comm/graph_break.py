"""Keeps torch.compile out of a class: a graph ends at a call of its methods, which run as they are.

Tracing them would find nothing to compile, and what it cuts at a call of a method in C++ loses the
method's `self` (torch 2.13). torch.compiler.disable does the same at the price of a wrapper around
every call, a microsecond, and of torch._dynamo's import, seconds.
"""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

from torch._C._dynamo import eval_frame

C = TypeVar("C", bound=type)


def uncompiled(kind: C) -> C:
    """The class itself. For its own methods; those that it inherits are their class's."""
    for function in _functions(kind):
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
    as_they_are(kind)
    return kind


def as_they_are(*classes: type) -> None:
    """Run their methods, and all that these call, untraced. By itself it is for what no compiled
    function calls by name: C++ calls a group's methods while a compiled function runs."""
    skip = eval_frame._FrameAction.SKIP
    plain = eval_frame._FrameExecStrategy(skip, skip)
    for function in (f for kind in classes for f in _functions(kind)):
        eval_frame.set_code_exec_strategy(function.__code__, plain)


def _functions(kind: type) -> list[FunctionType]:
    members = [getattr(member, "__wrapped__", member) for member in vars(kind).values()]
    return [member for member in members if isinstance(member, FunctionType)]
