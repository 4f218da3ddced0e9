"""Factories for `FILE.py:factory`: models that can be planned, and some that cannot."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 37  # odd, so parameters cross the borders of shards


def net() -> nn.Module:
    """A parameter in the root, and three blocks, one of them frozen."""
    model = nn.Module()
    model.embed = nn.Parameter(torch.randn(WIDTH, WIDTH))
    model.blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(3)
    )
    model.blocks[1].requires_grad_(False)
    return model


def huge() -> nn.Module:
    """4e11 parameters, which only the meta device can hold."""
    return nn.Sequential(*(nn.Linear(200_000, 1_000_000, bias=False) for _ in range(2)))


def number() -> int:
    return 7


def lazy() -> nn.Module:
    return nn.LazyLinear(4)


def needs(width: int) -> nn.Module:
    return nn.Linear(width, width)


def raising() -> nn.Module:
    raise KeyError("no such shape")


def empty() -> nn.Module:
    return nn.Embedding(0, 3)
