"""What a reducer is told: which parameters are trained, and DDP's arguments."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn


class Trainable(NamedTuple):
    """A parameter that is trained; `sparse`: its gradient will be."""

    name: str
    parameter: nn.Parameter
    sparse: bool


class Settings(NamedTuple):
    """DDP's arguments of the same names; `caps` of buckets in bytes, see `bucketing`."""

    caps: tuple[int, ...]
    find_unused_parameters: bool
    static_graph: bool
    gradient_as_bucket_view: bool
    skip_all_reduce_unused_params: bool = False

    @property
    def seeks_unused(self) -> bool:
        """In every backward anew."""
        return self.find_unused_parameters and not self.static_graph

    @property
    def has_unused(self) -> bool:
        """Parameters may have no gradient."""
        return self.find_unused_parameters or self.static_graph
