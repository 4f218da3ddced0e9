"""For torch's `register_fsdp_forward_method`: another method of a module than its forward gathers,
casts and frees as that does."""

from __future__ import annotations

from typing import Any

from torch import nn

from ringdp.parallel.guards.copies import EngineHook


class AroundMethod:
    """Runs the engine's hooks of a module before and after one call of the method. torch's function
    calls these two."""

    def __init__(self) -> None:
        self._kwargs: dict[str, Any] = {}

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        for key, hook in module._forward_pre_hooks.items():
            if isinstance(hook, EngineHook):
                if key in module._forward_pre_hooks_with_kwargs:
                    args, kwargs = hook(module, args, kwargs)
                else:
                    hook(module, args)
        self._kwargs = kwargs
        return args, kwargs

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        for key, hook in module._forward_hooks.items():
            if isinstance(hook, EngineHook):
                named = [self._kwargs] if key in module._forward_hooks_with_kwargs else []
                changed = hook(module, args, *named, output)
                output = output if changed is None else changed
        return output
