"""Runs functions on the pool's ranks with a communicator over another transport:
over_nccl(2)(function, *arguments)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.ranks import Pool
from tests.transport.nccl.faults import only_with_host_nccl
from tests.transport.over import over

Ranks = Callable[[int], Callable[..., list[Any]]]


@pytest.fixture
def over_gloo(ranks: Callable[[int], Pool]) -> Ranks:
    return lambda n: partial(ranks(n), over, "c10d")


@pytest.fixture
def over_nccl(ranks: Callable[[int], Pool]) -> Ranks:
    only_with_host_nccl()
    return lambda n: partial(ranks(n), over, "nccl-host")


@pytest.fixture
def over_peer(ranks: Callable[[int], Pool]) -> Ranks:
    return lambda n: partial(ranks(n), over, "peer-host")
