"""The state_dict of a FullyShardedDataParallel: names and dtypes are the unwrapped model's, and
torch's configs say on which ranks and where it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ringdp.errors import UsageError
from ringdp.parallel.engine import Engine


@contextmanager
def whole(engines: Iterable[Engine], *, write: bool) -> Iterator[None]:
    """`full_parameters` of them all."""
    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(engine.full_parameters(write=write))
        yield


def check_configs(model: object, optimizer: object) -> None:
    """Raise UsageError for other configs than those of whole state."""
    for argument, given, allowed in (
        ("state_dict_config", model, "FullStateDictConfig"),
        ("optim_state_dict_config", optimizer, "FullOptimStateDictConfig"),
    ):
        if given is not None and type(given).__name__ != allowed:
            raise UsageError(
                f"state_dict_type: {argument}={given!r}; allowed: a {allowed}, or None"
            )


def configure(state: dict[str, Any], own: Iterable[str], config: object, rank: int) -> None:
    """Do with `own` entries of the state what its config says."""
    if getattr(config, "rank0_only", False) and rank > 0:
        for name in own:
            del state[name]
    elif getattr(config, "offload_to_cpu", False):
        state.update({n: x.cpu() for n in own if isinstance(x := state[n], torch.Tensor)})


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
