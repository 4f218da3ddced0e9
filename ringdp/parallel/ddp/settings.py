"""What a reducer is given: the trained parameters, and DDP's arguments."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn


class Trainable(NamedTuple):
    """A parameter that trains; `sparse`: its gradient will be sparse."""

    name: str
    parameter: nn.Parameter
    sparse: bool


class Settings(NamedTuple):
    """DDP's arguments of the same names; `caps`: bytes of buckets, see `bucketing`."""

    caps: tuple[int, ...]
    find_unused_parameters: bool
    static_graph: bool
    gradient_as_bucket_view: bool
    skip_all_reduce_unused_params: bool = False

    @property
    def seeks_unused(self) -> bool:
        """Unused parameters are determined in every backward."""
        return self.find_unused_parameters and not self.static_graph

    @property
    def has_unused(self) -> bool:
        """Parameters may lack a gradient."""
        return self.find_unused_parameters or self.static_graph
