"""Fixtures that all rooms share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from torch.distributed import Store

from ringdp.transport.store.client import StoreClient
from tests.browser import Dom, open_page
from tests.builds import Builds
from tests.forks import Forks
from tests.ranks import TIMEOUT, Pool

# With these whoever runs tests may say that files are terminals, and how wide: rich believes it.
COLORS = ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
for variable in (*COLORS, "COLUMNS", "LINES"):
    os.environ.pop(variable, None)

settings.register_profile("any load", deadline=None)  # tests do not time anything
settings.load_profile("any load")
if len(tempfile.gettempdir()) > 60:  # sockets lie there, whose paths have at most 107 bytes
    os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"
torch.set_num_threads(1)  # several wait for one another, on a busy machine ten times as long


def starts_processes(item: pytest.Item) -> bool:
    return item.get_closest_marker("process") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that start none come first: each leaves cores to what the fixtures below begin."""
    items.sort(key=starts_processes)


@pytest.fixture(scope="session", autouse=True)
def server(request: pytest.FixtureRequest) -> None:
    """A process has one fork server, and launchers under test would start it with less imported."""
    if any(map(starts_processes, request.session.items)):
        forkserver.ensure_running()


@pytest.fixture(scope="session", autouse=True)
def builds(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Builds]:
    """builds[BUILDS[name]]: a program that a test file names, see tests/builds.py."""
    made = Builds(tmp_path_factory.mktemp("builds"))
    for module in {item.getparent(pytest.Module): None for item in request.session.items}:
        made.begin(getattr(module and module.obj, "BUILDS", {}))
    yield made
    made.close()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Pool]]:
    """ranks(n): a living pool of n rank processes, see tests/ranks.py."""
    pools: dict[int, Pool] = {}

    def pool(size: int) -> Pool:
        if size not in pools or not pools[size].alive:
            pools[size] = Pool(size)
        return pools[size]

    yield pool
    for p in pools.values():
        p.close()


@pytest.fixture
def fresh_ranks() -> Iterator[Callable[..., Pool]]:
    """fresh_ranks(n, timeout=...): a pool for one test, which may ruin it."""
    pools: list[Pool] = []

    def pool(size: int, timeout: float = TIMEOUT) -> Pool:
        pools.append(Pool(size, timeout))
        return pools[-1]

    yield pool
    for p in pools:
        p.close()


@pytest.fixture(scope="module")
def gpu_ranks() -> Iterator[Callable[[int, float], Pool]]:
    """gpu_ranks(n, timeout): a pool for a module's tests, until one fails: to import torch and
    start CUDA takes a process seconds, and `make gpu` has few."""
    pools: list[Pool] = []

    def pool(size: int, timeout: float) -> Pool:
        if not pools or not pools[-1].alive:
            pools.append(Pool(size, timeout, spawned=True))
        return pools[-1]

    yield pool
    for p in pools:
        p.close()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """forks(n, function, ...): ranks that may die, see tests/forks.py."""
    made = Forks()
    yield made
    made.close()


@pytest.fixture
def asking() -> Iterator[Callable[[Store], StoreClient]]:
    """asking(store): it, as whoever asks it sees it."""
    with ExitStack() as until_end:
        yield lambda store: until_end.enter_context(StoreClient(lambda: store))


@pytest.fixture
def browse(tmp_path: Path) -> Callable[..., Dom]:
    """browse(page, "#round=3", script="..."): the page's DOM once its scripts have run."""
    return partial(open_page, tmp_path)
