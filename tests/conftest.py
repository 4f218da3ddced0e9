"""Fixtures shared by all test folders."""

from __future__ import annotations

import gc
import os
import signal
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
from tests.browser import Browser, Dom
from tests.builds import Builds
from tests.forks import Forks
from tests.ranks import TIMEOUT, Pool

# A user may have set these to force or forbid colours or to fix the width; rich obeys them.
COLORS = ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
for variable in (*COLORS, "COLUMNS", "LINES"):
    os.environ.pop(variable, None)

settings.register_profile("any load", deadline=None)  # no test depends on how long an example takes
settings.load_profile("any load")
# sockets are created there, and their paths have at most 107 bytes
if len(tempfile.gettempdir()) > 60:
    os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"
# where it is ignored, as in a shell's background jobs, tests of Ctrl-C would wait for ever
signal.signal(signal.SIGINT, signal.default_int_handler)
# several threads wait for one another; on a busy machine that takes ten times as long
torch.set_num_threads(1)
gc.disable()  # until all is imported: otherwise it traverses the same modules again and again


def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()
    gc.freeze()  # modules and tests stay; without this they add 0.4 s to every full collection


def starts_processes(item: pytest.Item) -> bool:
    return item.get_closest_marker("process") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs tests without processes first, while the builds and the fork server start."""
    items.sort(key=starts_processes)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session", autouse=True)
def server(request: pytest.FixtureRequest) -> None:
    """Starts the fork server before a launcher under test starts it with fewer preloaded modules.
    (A process has only one.)"""
    if any(map(starts_processes, request.session.items)):
        forkserver.ensure_running()


@pytest.fixture(scope="session", autouse=True)
def builds(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Builds]:
    """builds[BUILDS[name]]: the path of a C++ program that a test file names, see
    tests/builds.py."""
    at = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        at = at.parent  # the session's, which its workers share
    made = Builds(at / "builds")
    for module in {item.getparent(pytest.Module): None for item in request.session.items}:
        made.begin(getattr(module and module.obj, "BUILDS", {}))
    yield made
    made.close()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Pool]]:
    """ranks(n): the session's pool of n rank processes, see tests/ranks.py."""
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
    """fresh_ranks(n, timeout=...): a pool for one test, which may break it."""
    pools: list[Pool] = []

    def pool(size: int, timeout: float = TIMEOUT) -> Pool:
        pools.append(Pool(size, timeout))
        return pools[-1]

    yield pool
    for p in pools:
        p.close()


@pytest.fixture(scope="module")
def gpu_ranks() -> Iterator[Callable[[int, float], Pool]]:
    """gpu_ranks(n, timeout): a pool shared by a module's tests, replaced after a failure. A process
    takes seconds to import torch and start CUDA, and `make gpu` has a time limit."""
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
def forked(forks: Forks) -> Callable[[int], Callable[..., None]]:
    """For `on_ranks`: n ranks of the test's own, see tests/forks.py."""
    return lambda n: partial(forks.succeed, n)


@pytest.fixture
def store_client() -> Iterator[Callable[[Store], StoreClient]]:
    """store_client(store): a StoreClient of `store`, closed at the end of the test."""
    with ExitStack() as until_end:
        yield lambda store: until_end.enter_context(StoreClient(lambda: store))


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("browser"))
    yield made
    made.close()


@pytest.fixture
def browse(browser: Browser, tmp_path: Path) -> Callable[..., Dom]:
    """browse(page, "#round=3", script="..."): the page's DOM after its scripts have run."""
    return partial(browser.open, tmp_path)
