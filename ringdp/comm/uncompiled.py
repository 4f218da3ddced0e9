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
    for member in vars(kind).values():
        function = getattr(member, "__wrapped__", member)
        if isinstance(function, FunctionType):
            function._torchdynamo_disable = True  # type: ignore[attr-defined]
            _run_as_it_is(function)
    return kind


def _run_as_it_is(function: FunctionType) -> None:
    """With all that it calls."""
    if hasattr(eval_frame, "set_code_exec_strategy"):  # not in older ones
        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
