"""The tensors in the state_dict of a `fully_shard`ed model: whole, and with full_tensor().

Scripts for FSDP2 call full_tensor() on each. What is computed from one, copied, saved, or assigned
to a model is of torch's classes.
"""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ringdp.parallel.refuse import MissingAttribute


class FullTensor(Tensor):
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def full_tensor(self) -> Tensor:
        """The tensor itself, as a torch.Tensor (the name is DTensor's)."""
        return self.as_subclass(Tensor)

    def __getattr__(self, name: str) -> NoReturn:
        whole = "load_state_dict with whole tensors, such as this one"
        raise MissingAttribute("fully_shard, whose state_dict has no DTensors", name, whole)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.full_tensor(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full_tensor().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    # nn.Parameter(data), as in load_state_dict(assign=True), expects data.detach() to be of data's
    # class, and then sets _is_param: this makes it an nn.Parameter.

    def detach(self) -> FullTensor:
        return self.full_tensor().detach().as_subclass(FullTensor)

    def _become_parameter(self, _: bool) -> None:
        self.__class__ = nn.Parameter  # type: ignore[assignment]

    _is_param = property(fset=_become_parameter)
