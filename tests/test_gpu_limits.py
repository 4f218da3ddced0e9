"""The time limits of `make gpu`: of its parts, and within them of what its tests wait for."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from bench import gpu
from tests.transport import test_peer, test_peer_gpu
from tests.transport.nccl import test_gpu, test_meeting


def test_limits_of_all_parts_sum_to_less_than_ten_minutes() -> None:
    assert sum(p.limit for p in gpu.PARTS) <= gpu.SECONDS - 50  # which the build may take
    # 60 s for what has no limit: make's own check for a GPU, and writing the report
    assert gpu.SECONDS + 60 < 600
    assert all("{out}" in p.command for p in gpu.PARTS[1:])


def test_peer_memory_tests_time_out_before_their_part_is_killed() -> None:
    """Otherwise the error that says who waits for whom would never be printed."""
    (part,) = (p for p in gpu.PARTS if p.name.startswith("peer memory"))
    assert test_peer.TIMEOUT["cuda"] <= part.limit / 4


@pytest.mark.parametrize("module", [test_meeting, test_gpu, test_peer_gpu])
def test_processes_time_out_before_pytest_is_ended(module: ModuleType) -> None:
    """Otherwise the late ranks would not be named, and a slow test would end the tests after it."""
    assert module.__file__ is not None
    file = str(Path(module.__file__).relative_to(gpu.ROOT))
    (part,) = (p for p in gpu.PARTS if file in p.command)
    (ends,) = (word for word in part.command if word.startswith("faulthandler_timeout="))
    assert module.LIMIT < float(ends.partition("=")[2]) < part.limit
