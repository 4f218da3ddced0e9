"""Traces a communicator: its collectives, chunk by chunk where possible, and the waits for them.

Over shared memory csrc keeps a tape of when every row and tile was done. The other transports are
traced from outside, from call to result. Both give the entries of `transport.tape`, which
`CommTracer` turns into spans and facts at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from threading import get_native_id
from time import monotonic_ns

import torch

from ringdp.comm.call import collective_of, dtype_of, named, place, tag_of
from ringdp.comm.job import Issuer, Job
from ringdp.comm.programs import Origin, origin_of
from ringdp.comm.work import Work
from ringdp.errors import CommunicationError, UsageError
from ringdp.schedule import Program
from ringdp.tape.recorder import Args, Recorder, Span, Tracer
from ringdp.transport.base import Prepared
from ringdp.transport.records import Call
from ringdp.transport.tape import ENTRIES, Chunk, Ran, Tape, Waited, read

Entry = Chunk | Ran | Waited
MOST_BYTES = 64 << 20  # of one communicator's tape: a million chunks; more are dropped


class Named(Issuer):
    """A Communicator's name, in traces and elsewhere."""

    _name: str
    _ranks: Sequence[int]
    _label: str | None = None

    def label(self, text: str) -> None:
        """Set the communicator's name in traces."""
        if not isinstance(text, str):
            raise UsageError(f"label is {text!r}; allowed: a text")
        self._label = text

    def __repr__(self) -> str:
        return f"<{self._title}: rank {self.rank} of {self.size} over {self._kind}>"

    @property
    def _title(self) -> str:
        return self._label or f"communicator {self._name}"

    @property
    def _kind(self) -> str:
        """The transport's name."""
        return type(self._transport).__name__.removesuffix("Transport").lower()


class TapeObserver:
    """Collects a transport's tape until `end`, which also returns how many entries were lost."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._done: list[bytes] = []
        self._waits: list[bytes] = []
        self._size = self._left_out = self._lost = 0
        *_, self._lost_before = tape.tape()  # discards what an earlier trace left
        tape.trace(ENTRIES)

    def drain(self) -> None:
        done, waits, self._lost = self._tape.tape()
        if self._size + len(done) > MOST_BYTES:
            self._left_out += len(done) // 64
            done = b""
        self._size += len(done)
        self._done.append(done)
        self._waits.append(waits)

    def end(self) -> tuple[Iterable[Entry], int]:
        self._tape.untrace()
        self.drain()
        lost = self._left_out + self._lost - self._lost_before
        return read(b"".join(self._done + self._waits)), lost


class CallObserver:
    """Watches a communicator from outside: what its transport does between is not seen.

    A collective ends when a wait for it returns. Collectives run one after another, so one begins
    once it is called and the previous one has ended. Meanwhile the communicator's `_run` is ours.
    """

    def __init__(self, comm: Named) -> None:
        self._comm, self._run = comm, comm._run
        self._entries: list[Ran | Waited] = []
        self._programs: set[Program] = set()  # kept alive: `origin_of` needs them at the end
        self._free = 0  # when the last collective ended
        comm._run = self.run  # type: ignore[method-assign]

    def drain(self) -> None:
        """Does nothing: no entry is lost."""

    def end(self) -> tuple[Iterable[Entry], int]:
        del self._comm._run
        return self._entries, 0

    def run(self, ready: Prepared, job: Job, call: Call, background: bool) -> Work:
        number, kind, elements, site = call
        issued, ticket, rows = monotonic_ns(), number + 1, 0
        if isinstance(job.by, Program):
            self._programs.add(job.by)
            rows = job.by.rows.ctypes.data

        def ended(*, done: bool) -> None:
            begin, self._free = max(issued, self._free), monotonic_ns()
            took = issued, begin, self._free, 0
            what = number, elements, kind, site
            self._entries.append(Ran(*what, *took, ticket, rows, background, done))

        def waited(since: int) -> None:
            self._entries.append(Waited(ticket, get_native_id(), since, monotonic_ns()))

        try:
            work = self._run(ready, job, call, background)
        except CommunicationError:
            ended(done=False)
            raise
        if not background:
            ended(done=True)
            waited(issued)
            return work
        complete, wait = work._complete, work.wait

        def completes() -> None:
            if not work._done:
                ended(done=True)
            complete()

        def waits(timeout: float | None = None) -> None:
            since, failed = monotonic_ns(), work._error is not None
            try:
                wait(timeout)
            except CommunicationError:
                if not failed:
                    ended(done=False)
                raise
            finally:
                waited(since)

        work._complete, work.wait = completes, waits  # type: ignore[method-assign]
        return work


class CommTracer(Tracer):
    """Writes what a communicator does to a trace, as spans and facts."""

    def __init__(self, comm: Named, recorder: Recorder) -> None:
        self._comm, self._recorder, tape = comm, recorder, comm._transport.tape
        self._observer = CallObserver(comm) if tape is None else TapeObserver(tape)

    def drain(self) -> None:
        self._observer.drain()

    def end(self) -> None:
        found, lost = self._observer.end()
        entries = list(found)
        calls = [entry for entry in entries if isinstance(entry, Ran)]
        origins = {call.number: origin_of(call.rows) for call in calls}
        names = {call.ticket: named(call.number, call.kind) for call in calls}
        for entry in entries:
            if isinstance(entry, Ran):
                self._collective(entry, origins[entry.number])
            elif isinstance(entry, Chunk):
                self._chunk(entry, origins.get(entry.number))
            else:
                name = f"wait for {names.get(entry.ticket, 'a collective')}"
                args = {"comm": self._comm._name, "number": entry.ticket - 1}
                lane = self._recorder.thread(entry.thread)
                self._span(name, "wait", lane, entry.begin, entry.end, args)
        self._recorder.lost += lost

    @cached_property
    def _lane(self) -> int:
        """The communicator's lane, which is added to the trace on first use."""
        comm, link = self._comm, self._comm._transport.link
        lane = self._recorder.lane(("communicator", comm._name), comm._title)
        fact = {
            "name": comm._name,
            "label": comm._title,
            "lane": lane,
            "ranks": list(comm._ranks),
            "transport": comm._kind,
            "link": link._asdict() if link else None,
        }
        self._recorder.fact("communicators", fact)
        return lane

    def _collective(self, call: Ran, origin: Origin | None) -> None:
        dtype, own = dtype_of(call.kind), self._comm._transport.own
        args: Args = {
            "comm": self._comm._name,
            "number": call.number,
            "collective": collective_of(call.kind),
            "algorithm": origin.algorithm if origin else own,
            "elements": call.elements,
            "bytes": call.elements * getattr(torch, dtype).itemsize,
            "dtype": dtype,
            "tag": tag_of(call.kind),
            "at": place(call.site),
            "background": call.background,
        }
        if self._comm._transport.tape:
            args["waited_us"] = call.waited / 1000
        if call.issued:
            args["queued_us"] = max(0, call.begin - call.issued) / 1000
        if not call.ended:
            args["failed"] = True
        if origin:
            self._schedule(origin)
        name = named(call.number, call.kind)
        self._span(name, "collective", self._lane, call.begin, call.end, args)

    def _chunk(self, entry: Chunk, origin: Origin | None) -> None:
        args: Args = {"number": entry.number, "round": entry.round}
        args |= {"piece": entry.piece, "bytes": entry.bytes}
        places = ("from", entry.sender), ("to", entry.to), ("src", entry.src), ("dst", entry.dst)
        args |= {key: value for key, value in places if value >= 0}
        if entry.waited:
            args["waited_us"] = entry.waited / 1000
        name = entry.what
        if origin:
            name = origin.names.get((entry.round, *(value for _, value in places)), name)
        self._span(name, "chunk", self._lane, entry.begin, entry.end, args)

    def _span(self, name: str, category: str, lane: int, begin: int, end: int, args: Args) -> None:
        self._recorder.spans.append(Span(name, category, lane, begin, end, args))

    def _schedule(self, origin: Origin) -> None:
        """Record the schedule, once: for a replay of its chunks, or as only its user knows it."""
        if not (self._comm._transport.tape or origin.custom):
            return
        schedules = self._recorder.facts.setdefault("schedules", [])
        head = {
            "collective": origin.collective,
            "algorithm": origin.algorithm,
            "root": origin.root,
            "ranks": self._comm.size,
        }
        if not any(head.items() <= s.items() for s in schedules):
            plan = origin.schedule
            rounds = [[list(map(int, t)) for t in transfers] for transfers in plan.rounds]
            schedules.append({**head, "chunks": plan.chunks, "rounds": rounds})
