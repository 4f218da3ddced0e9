"""Starts ranks on this host, and leaves none behind.

    start ──► running ──► every rank returned            results, in rank order
                 ├──────► a rank raised or died          RankError, its traceback
                 └──────► SIGINT, SIGTERM, …             SignalError

Ranks are forked from one process that has already imported what they need, so they start fast. Each
has a pipe to this process, for events, and for its result or its failure.
"""

import os
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe, forkserver, get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.util import get_temp_dir
from types import FrameType
from typing import Any, TypeVar

from ringdp.cli.loopback import environment, loopback_store
from ringdp.errors import PeerLost, RingdpError

Job = TypeVar("Job")
Result = TypeVar("Result")
Emit = Callable[[Any], None]
Entry = Callable[[Job, Emit], Result]  # what each rank runs: importable; `emit` sends an event

LAST_WORDS = 0.5  # s for a rank that is asked to end to report that it has lost a peer
GRACE = 30.0  # s until ranks that are asked to end are killed
LONGEST = 60  # bytes of a directory's path for sockets, whose own paths have at most 107
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_MODULES = ["__main__", "torch._dynamo"]  # optimizers import the latter when they are made


class RankError(RingdpError):
    """A rank raised or died. The message is for the user, the rank's traceback first."""


class SignalError(BaseException):
    """A signal asked for the end; all ranks have ended. Like KeyboardInterrupt it is no Exception,
    so that a library in whose code it arrives does not take it for an error of its own."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"ringdp: ended by {signal.Signals(signum).name}; every rank has ended")
        self.signum = signum


@dataclass(frozen=True)
class _Returned:
    result: Any


@dataclass(frozen=True)
class _Failure:
    lost_peer: bool  # a consequence of another rank's failure, not a cause
    at: float  # s on the monotonic clock, which all processes of a machine share
    traceback: str


def warm_up(entry: Entry[Any, Any]) -> None:
    """Start importing what ranks need in the process that they are forked from.

    Called while other work is under way, it lets `launch` start at once.
    """
    serve_forks([*_MODULES, entry.__module__])


def serve_forks(modules: Sequence[str]) -> None:
    """Start the process that ranks are forked from, which first imports these modules. It lives as
    long as this one."""
    with _interrupts_blocked(), room_for_sockets():
        forkserver.set_forkserver_preload([*modules])
        forkserver.ensure_running()


def fork(function: Callable[..., object], *arguments: Any) -> ForkServerProcess:
    """Call `function(*arguments)`, importable and picklable, in a process forked from there, once
    that has imported everything. Raises RankError if it has ended."""
    process = get_context("forkserver").Process(target=function, args=arguments)
    try:
        process.start()
    except (EOFError, ConnectionError):  # killed, or not allowed to fork
        raise RankError(
            "ringdp: the process that forks the ranks has ended; every rank has ended"
        ) from None
    return process


def cool_down() -> None:
    """End the process that ranks are forked from.

    By itself it would notice the end of this one only once it has imported everything, and hold
    stdout and stderr open until then.
    """
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()


def launch(
    entry: Entry[Job, Result], job: Job, ranks: int, on_event: Callable[[Any], None]
) -> list[Result]:
    """Run `entry(job, emit)` in `ranks` processes with torchrun's environment.

    `on_event` is called with the events of all ranks as they come. Returns what each rank returned.
    Raises RankError, SignalError, or what `on_event` raises, once every rank has ended. A signal
    raises only within `signals_raised`.
    """
    warm_up(entry)
    store = loopback_store()
    pipes: dict[Connection, int] = {}
    processes: list[ForkServerProcess] = []
    try:
        for rank in range(ranks):
            reader, writer = Pipe(duplex=False)
            environ = environment(store.port, ranks, rank)
            processes.append(fork(_rank_main, entry, job, writer, environ))
            pipes[reader] = rank
            writer.close()
        return _results(pipes, processes, on_event)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for reader in pipes:
            reader.close()


def _results(
    pipes: dict[Connection, int],
    processes: Sequence[ForkServerProcess],
    on_event: Callable[[Any], None],
) -> list[Any]:
    """Read all pipes to their ends. Once a rank has failed, ask the others to end."""
    results: dict[int, Any] = {}
    failures: dict[int, _Failure] = {}
    codes: dict[int, int] = {}  # of ranks that ended otherwise, and not because they were asked to
    waiting, deadline = dict(pipes), 0.0  # 0: no rank was asked to end
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()) if deadline else None)
        for pipe in [p for p in waiting if p in ready]:
            rank = waiting[pipe]
            try:
                event = pipe.recv()
            except (EOFError, OSError):  # OSError: it was killed while it sent
                del waiting[pipe]
                processes[rank].join()
                code = processes[rank].exitcode or 0
                asked = deadline and code in (-signal.SIGTERM, 128 + signal.SIGTERM)
                if not asked and (code or rank not in results):
                    codes[rank] = code
                continue
            if isinstance(event, _Failure):
                failures[rank] = event
            elif isinstance(event, _Returned):
                results[rank] = event.result
            else:
                on_event(event)
        if deadline and time.monotonic() >= deadline:
            break
        if not deadline and (failures or codes):
            deadline = time.monotonic() + GRACE
            for process in processes:
                process.terminate()
    if not deadline:
        return [results[rank] for rank in range(len(processes))]
    if -signal.SIGINT in codes.values() and not failures:  # Ctrl-C reached a rank first
        raise SignalError(signal.SIGINT)
    raise RankError(_explain(failures, codes))


def _rank_main(
    entry: Entry[Job, Result], job: Job, pipe: Connection, environ: dict[str, str]
) -> None:
    """Runs in each rank."""
    os.environ |= environ
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    # From here on an interrupt ends the rank at once, even during a wait in C++.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, _end_soon)
    try:
        pipe.send(_Returned(entry(job, pipe.send)))
    except Exception as error:
        lost = isinstance(error, PeerLost)
        try:
            pipe.send(_Failure(lost, time.monotonic(), traceback.format_exc()))
        finally:  # even if nobody listens any more
            # No destructors: a communicator whose peers are gone must not hold this process.
            os._exit(1)


def _end_with_launcher() -> None:
    """Exit once the launcher is gone, even if it was killed before it knew of this rank."""
    launcher = parent_process()
    assert launcher is not None
    launcher.join()
    shutil.rmtree(get_temp_dir(), ignore_errors=True)  # the launcher's
    os._exit(1)


def _end_soon(signum: int, frame: object) -> None:
    """The launcher ends all ranks as soon as one dies; wait for what they say about it."""
    timer = threading.Timer(LAST_WORDS, os._exit, (128 + signum,))
    timer.daemon = True
    timer.start()


def _explain(failures: dict[int, _Failure], codes: dict[int, int]) -> str:
    """The cause first and in full, then one line from each other rank.

    A killed rank says nothing. It is the cause if all ranks that reported had lost a peer.
    """
    killed = [_death(rank, code) for rank, code in sorted(codes.items()) if rank not in failures]
    if not failures:
        return "\n".join(killed)
    (rank, first), *others = sorted(failures.items(), key=lambda f: (f[1].lost_peer, f[1].at))
    lines = [first.traceback.rstrip(), f"ringdp: rank {rank} raised; every rank has ended"]
    lines += [f"rank {rank}: {other.traceback.splitlines()[-1]}" for rank, other in others]
    return "\n".join(killed + lines if first.lost_peer else lines)


def _death(rank: int, code: int) -> str:
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
    return f"ringdp: rank {rank} {how}; every rank has ended"


@contextmanager
def room_for_sockets() -> Iterator[None]:
    """Create temporary directories in /tmp meanwhile, if TMPDIR's path is too long for sockets."""
    place = tempfile.gettempdir()
    tempfile.tempdir = place if len(os.fsencode(place)) <= LONGEST else "/tmp"
    try:
        yield
    finally:
        tempfile.tempdir = place


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Start ranks with SIGINT blocked, so that Ctrl-C during their start prints no traceback.

    They inherit this mask through the process that they are forked from, and unblock SIGINT in
    `_rank_main`.
    """
    resource_tracker.ensure_running()  # started later, it would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def signals_raised() -> Iterator[Callable[[], None]]:
    """Raise SignalError at the first signal of ENDING; ignore later ones while the ranks end.

    Python drops what is raised in a callback of its own, as every import has some. So call what
    this yields now and then: it raises again. A signal that is ignored stays so: `nohup` ignores
    SIGHUP.
    """
    came: list[int] = []

    def end(signum: int, frame: FrameType | None) -> None:
        for other in ENDING:
            signal.signal(other, signal.SIG_IGN)
        came.append(signum)
        raise SignalError(signum)

    def raise_again() -> None:
        if came:
            raise SignalError(came[0])

    handled = [s for s in ENDING if signal.getsignal(s) is not signal.SIG_IGN]
    before = {signum: signal.signal(signum, end) for signum in handled}
    try:
        yield raise_again
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def signals_held() -> Iterator[None]:
    """Put off the signals that `signals_raised` raises to the end of the block, so that no process
    is started without being known. Unlike a mask, this is not inherited by processes."""
    came: list[int] = []
    before = {s: handler for s in ENDING if callable(handler := signal.getsignal(s))}
    for signum in before:
        signal.signal(signum, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        for number in came:
            signal.raise_signal(number)
