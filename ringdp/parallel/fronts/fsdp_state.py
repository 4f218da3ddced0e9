"""The state_dict of a FullyShardedDataParallel: names and dtypes are the unwrapped model's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn


def save_as_unwrapped(wrapper: Any, dtypes: Mapping[str, torch.dtype]) -> None:
    """`dtypes`: of buffers, by name, that have another one now."""
    without, back = partial(_rename, "module.", ""), partial(_rename, "", "module.")
    wrapper.register_state_dict_post_hook(without)
    wrapper.register_state_dict_post_hook(partial(_cast, dtypes))
    wrapper.register_load_state_dict_pre_hook(back)


def _rename(
    old: str, new: str, _: nn.Module, state: dict[str, Any], prefix: str, *_others: Any
) -> None:
    """Replace `old` by `new` after the prefix of all keys, at once: a new key may be an old one."""
    before, old, new = [*state.items()], prefix + old, prefix + new
    state.clear()
    state.update({k.replace(old, new, 1) if k.startswith(old) else k: v for k, v in before})


def _cast(
    to: Mapping[str, torch.dtype], _: nn.Module, state: dict[str, Any], prefix: str, *_others: Any
) -> None:
    for name, dtype in to.items():
        if (key := prefix + name) in state:  # others are not persistent
            state[key] = state[key].to(dtype)
