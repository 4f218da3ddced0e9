"""torch.compile traces no call of a group: C++ makes them while a compiled function runs.

torch.compiler.disable would import the compiler, which takes seconds, and wrap every call.
"""

from __future__ import annotations

from types import FunctionType

import torch._C._dynamo.eval_frame as eval_frame


def leave_alone(*classes: type) -> None:
    """Run the methods of the classes, and all that these call, as they are."""
    if not hasattr(eval_frame, "set_code_exec_strategy"):
        return  # a torch before 2.7, which does not compile around collectives from C++
    skip = eval_frame._FrameAction.SKIP
    plain = eval_frame._FrameExecStrategy(skip, skip)
    for each in classes:
        for method in vars(each).values():
            if isinstance(method, FunctionType):
                eval_frame.set_code_exec_strategy(method.__code__, plain)
