"""Starts ranks through torch's elastic launcher, and leaves none behind.

    start ──► running ──► every rank returned            results, in rank order
                 ├──────► a rank raised or died          RankError, its traceback
                 └──────► SIGINT, SIGTERM, …             SignalError

It adds what a person at a terminal needs: events while the ranks run, the first failure in time
order (the launcher orders by whole seconds, so a rank that merely lost its peer can come first),
silence, and nothing left in /tmp. Ranks also start fast: they are forked from one process that has
already imported what they need.
"""

import logging
import os
import signal
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol, TypeVar

from ringdp.errors import PeerLost, RingdpError

Job = TypeVar("Job")
Job_contra = TypeVar("Job_contra", contravariant=True)
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)
Emit = Callable[[Any], None]

LAST_WORDS = 0.5  # s that a rank has, once asked to end, to say that it has lost a peer
LONGEST = 60  # bytes of a directory below which sockets lie, whose paths have at most 107
_LAUNCHER_HANDLES = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_MODULES = ["__main__", "torch._dynamo"]  # optimizers import the latter when they are made


class Entry(Protocol[Job_contra, Result_co]):
    """What each rank runs: a function at the top level of a module. `emit` sends an event."""

    __qualname__: str

    def __call__(self, job: Job_contra, emit: Emit) -> Result_co: ...


class RankError(RingdpError):
    """A rank raised or died. The message is for the user, the rank's traceback first."""


class SignalError(RingdpError):
    """A signal asked for the end; all ranks have ended."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@dataclass(frozen=True)
class _Failure:
    rank: int
    lost_peer: bool  # a consequence of another rank's failure, not a cause
    at: float  # s on the monotonic clock, which all processes of a machine share
    traceback: str


def warm_up(entry: Entry[Any, Any]) -> None:
    """Start importing what ranks need in the process that they are forked from.

    Called while other work is under way, it lets `launch` start at once. The process lives as long
    as this one.
    """
    with _interrupts_blocked(), room_for_sockets():
        forkserver.set_forkserver_preload([*_MODULES, entry.__module__])
        forkserver.ensure_running()


def launch(
    entry: Entry[Job, Result], job: Job, ranks: int, on_event: Callable[[Any], None]
) -> list[Result]:
    """Run `entry(job, emit)` in `ranks` processes with torchrun's environment.

    `on_event` is called on another thread with the events of all ranks as they come. Returns what
    each rank returned. Raises RankError or SignalError once every rank has ended, and likewise
    whatever `on_event` raises; a rank then ends when it sends its next event.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from ringdp.cli.loopback import register

    _silence_launcher()
    warm_up(entry)
    pipes = [get_context("forkserver").Pipe(duplex=False) for _ in range(ranks)]
    inbox = _Inbox([reader for reader, _ in pipes], on_event)
    with tempfile.TemporaryDirectory(prefix="ringdp-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            run_id=uuid.uuid4().hex,
            rdzv_backend=register(),
            local_addr="127.0.0.1",
            start_method="forkserver",
            max_restarts=0,
            monitor_interval=0.05,  # s
        )
        try:
            with _interrupts_held():
                start = elastic_launch(config, _rank_main)
                results: dict[int, Result] = start(entry, job, [writer for _, writer in pipes])
        except SignalException as interrupt:
            raise SignalError(interrupt.sigval) from None
        except KeyboardInterrupt:
            raise SignalError(signal.SIGINT) from None
        except ChildFailedError as error:
            inbox.close([writer for _, writer in pipes])
            codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            if -signal.SIGINT in codes.values() and not inbox.failures:
                raise SignalError(signal.SIGINT) from None
            raise inbox.error or RankError(_explain(inbox.failures, codes)) from None
        finally:
            inbox.close([writer for _, writer in pipes])
    if inbox.error is not None:
        raise inbox.error
    return [results[rank] for rank in range(ranks)]


def _rank_main(entry: Entry[Job, Result], job: Job, pipes: Sequence[Connection]) -> Result:
    """Runs in each rank."""
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    # From here on an interrupt ends the rank at once, even during a wait in C++.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, _end_soon)
    rank = int(os.environ["RANK"])
    try:
        return entry(job, pipes[rank].send)
    except Exception as error:
        lost = isinstance(error, PeerLost)
        try:
            pipes[rank].send(_Failure(rank, lost, time.monotonic(), traceback.format_exc()))
        finally:  # even if nobody listens any more
            # No destructors: a communicator whose peers are gone must not hold this process.
            os._exit(1)


def _end_with_launcher() -> None:
    """Exit once the launcher is gone, even if it was killed before it knew of this rank."""
    launcher = parent_process()
    assert launcher is not None
    launcher.join()
    os._exit(1)


def _end_soon(signum: int, frame: object) -> None:
    """The launcher ends all ranks as soon as one dies; wait for what they say about it."""
    timer = threading.Timer(LAST_WORDS, os._exit, (128 + signum,))
    timer.daemon = True
    timer.start()


def _explain(failures: Sequence[_Failure], codes: dict[int, int]) -> str:
    """The cause first and in full, then one line from each other rank.

    A killed rank says nothing. It is the cause if all ranks that reported had lost a peer.
    """
    spoke = {failure.rank for failure in failures}
    killed = [_death(rank, code) for rank, code in sorted(codes.items()) if rank not in spoke]
    if not failures:
        return "\n".join(killed)
    first, *others = sorted(failures, key=lambda failure: (failure.lost_peer, failure.at))
    lines = [first.traceback.rstrip(), f"ringdp: rank {first.rank} raised; every rank has ended"]
    lines += [f"rank {one.rank}: {one.traceback.splitlines()[-1]}" for one in others]
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
def _interrupts_held() -> Iterator[None]:
    """Block SIGINT in this thread, and restore the handlers that the launcher replaces.

    The signal then reaches another thread (the inbox's), and Python still runs the launcher's
    handler in the main thread.
    """
    handlers = {signum: signal.getsignal(signum) for signum in _LAUNCHER_HANDLES}
    with _interrupts_blocked():
        try:
            yield
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)


def _silence_launcher() -> None:
    """Hide its warnings ("Closing process … via signal SIGTERM"), which precede our explanation."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


class _Inbox:
    """A thread that reads the ranks' pipes.

    There is one pipe per rank and no lock, because a killed rank could keep a lock. If `on_event`
    raises, the thread ends and keeps the exception in `error`; ranks then write to closed pipes.
    """

    def __init__(self, readers: list[Connection], on_event: Callable[[Any], None]) -> None:
        self.failures: list[_Failure] = []
        self.error: BaseException | None = None
        self._readers = readers
        self._on_event = on_event
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self, writers: list[Connection]) -> None:
        """Read what is left: pipes end once our writing ends are closed and the ranks are gone."""
        for writer in writers:
            writer.close()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            self._read()
        except BaseException as error:  # rich raises SystemExit if nobody reads our output
            self.error = error
        finally:
            for reader in self._readers:
                reader.close()

    def _read(self) -> None:
        open_pipes = list(self._readers)
        while open_pipes:
            for pipe in wait(open_pipes):
                assert isinstance(pipe, Connection)
                try:
                    event = pipe.recv()
                except (EOFError, OSError):  # OSError: it was killed while it sent
                    open_pipes.remove(pipe)
                    continue
                if isinstance(event, _Failure):
                    self.failures.append(event)
                else:
                    self._on_event(event)
