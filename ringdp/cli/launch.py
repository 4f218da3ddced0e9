"""Starts the ranks through torch's elastic launcher and ends them: all done, or all gone.

    start ──► running ──► every rank returned            results, in rank order
                 ├──────► a rank raised or died          RankError, its traceback
                 └──────► SIGINT, SIGTERM, …             SignalError

It adds to the launcher what a person at a terminal needs: events while the ranks run, the first
failure in time order (the launcher orders by whole seconds, so a rank that merely lost its peer
can come first), silence, and nothing left in /tmp. And a fast start: ranks are forked from a
process that has imported what they need, once for all of them.
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
    """Begin to import what ranks will need, in the process that they are forked from. It lives as
    long as this one; called while other work is under way, it makes `launch` start at once."""
    with _interrupts_blocked(), room_for_sockets():
        forkserver.set_forkserver_preload([*_MODULES, entry.__module__])
        forkserver.ensure_running()


def launch(
    entry: Entry[Job, Result], job: Job, ranks: int, on_event: Callable[[Any], None]
) -> list[Result]:
    """Run `entry(job, emit)` in `ranks` processes with torchrun's environment.

    `on_event` is called in another thread, with rank 0's and other ranks' events as they come.
    Returns what each rank returned. Raises RankError or SignalError once every rank has ended. So
    it does with what `on_event` raises; a rank ends then with the next event that it sends.
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
    # From here on an interrupt ends the rank at once, inside a C++ wait too.
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
        finally:  # also where nobody listens any more
            # No destructors: a communicator whose peers are gone must not hold this process.
            os._exit(1)


def _end_with_launcher() -> None:
    """Also where that was killed, or interrupted while it started this rank, and never knew it."""
    launcher = parent_process()
    assert launcher is not None
    launcher.join()
    os._exit(1)


def _end_soon(signum: int, frame: object) -> None:
    """The launcher ends the ranks as soon as one has died; what they say of it is worth a wait."""
    timer = threading.Timer(LAST_WORDS, os._exit, (128 + signum,))
    timer.daemon = True
    timer.start()


def _explain(failures: Sequence[_Failure], codes: dict[int, int]) -> str:
    """The cause first and in full, then what the other ranks said, a line each.

    A rank that was killed could not speak; it is the cause where all that spoke had lost a peer.
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
    """Temporary directories that are made meanwhile lie in /tmp where TMPDIR has a longer name."""
    place = tempfile.gettempdir()
    tempfile.tempdir = place if len(os.fsencode(place)) <= LONGEST else "/tmp"
    try:
        yield
    finally:
        tempfile.tempdir = place


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Ranks start with SIGINT blocked, so Ctrl-C during their start prints no traceback.

    They inherit the mask of the process that they are forked from, which inherits this one, and
    unblock it in `_rank_main`.
    """
    resource_tracker.ensure_running()  # started later, it would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """In this process the signal reaches another thread (the inbox's), and Python still runs the
    launcher's handler in the main thread. The launcher leaves its handlers behind; the former ones
    come back here.
    """
    handlers = {signum: signal.getsignal(signum) for signum in _LAUNCHER_HANDLES}
    with _interrupts_blocked():
        try:
            yield
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)


def _silence_launcher() -> None:
    """Its warnings ("Closing process … via signal SIGTERM") come before our explanation."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


class _Inbox:
    """A thread that reads the ranks' pipes. One pipe a rank and no lock, which a rank that is
    killed could keep. `error`: what `on_event` raised, which ends it; ranks then write to closed
    pipes, as it is with any reader that has gone."""

    def __init__(self, readers: list[Connection], on_event: Callable[[Any], None]) -> None:
        self.failures: list[_Failure] = []
        self.error: BaseException | None = None
        self._readers = readers
        self._on_event = on_event
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self, writers: list[Connection]) -> None:
        """Read what is left. With our writing ends closed and the ranks gone, pipes end."""
        for writer in writers:
            writer.close()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            self._read()
        except BaseException as error:  # rich raises SystemExit where nobody reads our output
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
