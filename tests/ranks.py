"""Pools of rank processes that live for the whole test session.

    ranks(4)(function, *arguments) -> [result of rank 0, ...]

calls `function(comm, *arguments)` on every rank; `function` is a module-level function of a test
file. If a rank raises, the test raises the first error in time, and the pool is thrown away, since
its communicator is broken. A test whose whole body runs on the ranks can be written as such a
function; what it returns, if anything, must be the same on every rank:

    @on_ranks(4)
    def test_it(comm, parameter): ...
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import inspect
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import wraps
from multiprocessing.connection import Connection, wait
from typing import Any

import ringdp
from ringdp.cli.loopback import environment, loopback_store

TIMEOUT = 600.0  # seconds; on a busy machine one call, with its imports, has taken 60

# Importing torch takes seconds, so the fork server imports it once for all ranks. It must run no
# tensor operation and start no CUDA driver: their threads do not survive a fork.
SPAWN = multiprocessing.get_context("spawn")
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["tests.rewriting", "tests.ranks", "ringdp.cli.train", "torch._dynamo"]
)

# torch's store looks up the name of every host that connects, this one included. If a query to the
# name server is lost, the store gives no answer for 5 s; with this setting 1 s. Processes started
# by the tests inherit it.
os.environ.setdefault("RES_OPTIONS", "timeout:1")


class RankError(AssertionError):
    """An exception on a rank; `error` is the name of its type, `text` its traceback."""

    def __init__(self, rank: int, error: str, text: str) -> None:
        super().__init__(f"rank {rank} raised {error}:\n{text}")
        self.rank, self.error, self.text = rank, error, text

    def __reduce__(self) -> tuple[type[RankError], tuple[int, str, str]]:
        return RankError, (self.rank, self.error, self.text)


class Pool:
    def __init__(self, size: int, timeout: float = TIMEOUT, *, spawned: bool = False) -> None:
        """Ranks that use a GPU need `spawned=True`: a CUDA driver does not survive a fork."""
        context = SPAWN if spawned else SERVER
        self.size, self.timeout = size, timeout
        self.store = loopback_store()
        self.pipes: list[Connection] = []
        self.died: list[int] = []
        self.processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(there, rank, size, self.store.port, timeout), daemon=True
            )
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        outcomes = self.outcomes(function, *arguments)
        failed = [o for o in outcomes if isinstance(o, RankError)]
        failed += [RankError(rank, "nothing", "it ended") for rank in self.died]
        if failed:
            self.close()
            raise failed[0]
        return outcomes

    def outcomes(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Returns each rank's result, RankError, or None if it died. If any rank raised, the list
        is in order of time, not of rank."""
        for pipe in self.pipes:
            pipe.send((*named(function), arguments))
        results: dict[int, tuple[float, Any]] = {}  # when the rank had it, by its clock
        deadline = time.monotonic() + self.timeout
        while len(results) < self.size:
            ready = wait(
                [p for r, p in enumerate(self.pipes) if r not in results],
                max(0.0, deadline - time.monotonic()),
            )
            if not ready:
                self.close()
                missing = [r for r in range(self.size) if r not in results]
                failed = [f"\n{o}" for o in in_time(results) if isinstance(o, RankError)]
                raise TimeoutError(
                    f"ranks {missing} did not answer in {self.timeout} s" + "".join(failed)
                )
            for pipe in ready:
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    results[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    results[rank] = time.monotonic(), None
                    self.died.append(rank)
        if any(isinstance(outcome, RankError) for _, outcome in results.values()):
            return in_time(results)
        return [results[r][1] for r in range(self.size)]

    @property
    def alive(self) -> bool:
        return all(p.is_alive() for p in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def in_time(results: dict[int, tuple[float, Any]]) -> list[Any]:
    return [results[r][1] for r in sorted(results, key=lambda r: results[r][0])]


def on_ranks(
    n: int | None = None, *, pool: str = "ranks"
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Runs a test's body on n ranks, or on as many as the test's own parameter `n` says.

    `pool` is the name of the fixture that makes the pool.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        _, *parameters = inspect.signature(function).parameters

        @wraps(function)
        def test(*on_a_rank: Any, **given: Any) -> None:
            # on a rank, which finds this wrapper under the test's name; pytest passes keywords only
            if on_a_rank:
                return function(*on_a_rank)
            ranks = given[pool](n or given["n"])
            found = ranks(test, *(given[name] for name in parameters))
            assert not found or all(other == found[0] for other in found), found
            return None

        asked = dict.fromkeys([pool, *parameters, *([] if n else ["n"])])
        kind = inspect.Parameter.KEYWORD_ONLY
        test.__signature__ = inspect.Signature([inspect.Parameter(a, kind) for a in asked])  # type: ignore[attr-defined]
        return test

    return decorate


def named(function: Callable[..., Any]) -> tuple[str, str]:
    """The function's module and qualified name, checked to lead back to it: ranks import it by
    them."""
    name = function.__module__, function.__qualname__
    assert getattr(sys.modules[name[0]], name[1], None) is function, f"ranks cannot find {name}"
    return name


def _serve(pipe: Connection, rank: int, size: int, port: int, timeout: float) -> None:
    os.environ |= environment(port, size, rank)
    import pytest  # pytest.fail.Exception is no subclass of Exception
    import torch

    import tests.rewriting  # noqa: F401

    torch.set_num_threads(1)
    faulthandler.enable()  # shows where a rank, or a child of it, crashes
    comm = ringdp.init(timeout=timeout)
    gc.freeze()  # modules stay; without this they add 0.1 s to every collection
    while True:
        try:
            module, name, arguments = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            faulthandler.dump_traceback_later(0.9 * timeout)  # shows where a hang is
            function = getattr(importlib.import_module(module), name)
            outcome = function(comm, *arguments)
            pipe.send((time.monotonic(), outcome))
        except (Exception, pytest.fail.Exception) as e:
            failed = time.monotonic()
            pipe.send((failed, RankError(rank, type(e).__name__, traceback.format_exc())))
            comm.abort()  # otherwise the others would wait for this rank until their timeout
        finally:
            faulthandler.cancel_dump_traceback_later()
