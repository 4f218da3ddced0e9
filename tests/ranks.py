"""Rank processes that live for the whole test session, forked from one that has imported all.

    ranks(4)(function, *arguments) -> [result of rank 0, ...]

runs `function(comm, *arguments)` on every rank, where `function` is a module-level function of a
test file. An exception on any rank is raised in the test, the first one to occur first; the pool is
then thrown away, since its communicator is. A test that is no more than that is such a function:

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

TIMEOUT = 600.0  # seconds; on a busy machine a call, or what it imports, has taken 60

# torch takes seconds to import: the server of this context does it once for all ranks. Nobody may
# run a tensor operation there, as threads do not survive a fork; nor does a CUDA driver.
SPAWN = multiprocessing.get_context("spawn")
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.ranks", "pytest", "ringdp.cli.train", "torch._dynamo"])

# torch's store asks for the name of every host that connects, this one too: where a name server
# loses a question, nobody is answered for 5 s, or with this 1 s. Processes that the tests start
# inherit it.
os.environ.setdefault("RES_OPTIONS", "timeout:1")


class RankError(AssertionError):
    """What a rank raised, with its traceback as text; `error` is its type's name."""

    def __init__(self, rank: int, error: str, text: str) -> None:
        super().__init__(f"rank {rank} raised {error}:\n{text}")
        self.rank, self.error, self.text = rank, error, text

    def __reduce__(self) -> tuple[type[RankError], tuple[int, str, str]]:
        return RankError, (self.rank, self.error, self.text)


class Pool:
    def __init__(self, size: int, timeout: float = TIMEOUT, *, spawned: bool = False) -> None:
        """`spawned` for ranks that use a GPU."""
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
        """Per rank: a result, a RankError, or None if it died. With errors, in order of time."""
        for pipe in self.pipes:
            pipe.send((*named(function), arguments))
        results: dict[int, Any] = {}
        order: list[int] = []
        deadline = time.monotonic() + self.timeout
        while len(results) < self.size:
            ready = wait(
                [p for r, p in enumerate(self.pipes) if r not in results],
                max(0.0, deadline - time.monotonic()),
            )
            if not ready:
                self.close()
                missing = [r for r in range(self.size) if r not in results]
                failed = [f"\n{results[r]}" for r in order if isinstance(results[r], RankError)]
                raise TimeoutError(
                    f"ranks {missing} did not answer in {self.timeout} s" + "".join(failed)
                )
            for pipe in ready:
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                order.append(rank)
                try:
                    results[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    results[rank] = None
                    self.died.append(rank)
        if any(isinstance(r, RankError) for r in results.values()):
            return [results[r] for r in order]
        return [results[r] for r in range(self.size)]

    @property
    def alive(self) -> bool:
        return all(p.is_alive() for p in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def on_ranks(
    n: int | None = None, *, pool: str = "ranks"
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Without a number, on as many as the test's parameter n says. `pool`: the fixture's name."""

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        _, *parameters = inspect.signature(function).parameters

        @wraps(function)
        def test(*on_a_rank: Any, **given: Any) -> None:
            if on_a_rank:  # which finds this under the function's name; pytest names what it gives
                return function(*on_a_rank)
            ranks = given[pool](n or given["n"])
            ranks(test, *(given[name] for name in parameters))
            return None

        asked = dict.fromkeys([pool, *parameters, *([] if n else ["n"])])
        kind = inspect.Parameter.KEYWORD_ONLY
        test.__signature__ = inspect.Signature([inspect.Parameter(a, kind) for a in asked])  # type: ignore[attr-defined]
        return test

    return decorate


def named(function: Callable[..., Any]) -> tuple[str, str]:
    """Its module, and the name by which ranks find it there: else they would run another one."""
    name = function.__module__, function.__qualname__
    assert getattr(sys.modules[name[0]], name[1], None) is function, f"ranks cannot find {name}"
    return name


def _serve(pipe: Connection, rank: int, size: int, port: int, timeout: float) -> None:
    os.environ |= environment(port, size, rank)
    import pytest  # whose own failures are no Exceptions
    import torch

    torch.set_num_threads(1)
    comm = ringdp.init(timeout=timeout)
    gc.freeze()  # what is imported stays, and takes 0.1 s of every collection
    while True:
        try:
            module, name, arguments = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            faulthandler.dump_traceback_later(0.9 * timeout)  # where it hangs
            function = getattr(importlib.import_module(module), name)
            pipe.send(function(comm, *arguments))
        except (Exception, pytest.fail.Exception) as e:
            pipe.send(RankError(rank, type(e).__name__, traceback.format_exc()))
            comm.abort()  # else the others would wait for this rank until their timeout
        finally:
            faulthandler.cancel_dump_traceback_later()
