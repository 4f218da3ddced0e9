"""Traces a communicator: its collectives chunk by chunk, and the waits for them.

Over shared memory csrc keeps a tape of when every row and tile was done. Other transports are
traced from outside: see `call_trace`.
"""

from __future__ import annotations

from typing import Any

from ringdp.comm.call import named
from ringdp.comm.call_trace import CallTrace
from ringdp.comm.programs import Origin, origin_of
from ringdp.comm.trace_records import Labelled, TraceRecords
from ringdp.tape.recorder import Args, Recorder, Span
from ringdp.transport.tape import ENTRIES, Chunk, Ran, Tape, Waited, read

MOST_BYTES = 64 << 20  # of one communicator's tape: a million chunks; more are dropped
EXCHANGE = "direct"  # the algorithm that shared memory implements itself


class Traced(Labelled):
    """The part of a Communicator that a trace calls. See `tape.recorder.Source`."""

    def tape_on(self, recorder: Recorder) -> None:
        tape = self._transport.tape
        records = TraceRecords(self, recorder)
        self._observer = CallTrace(self, records) if tape is None else TapeTrace(tape, records)

    def tape_drain(self) -> None:
        self._observer.drain()

    def tape_off(self) -> None:
        self._observer.end()
        del self._observer


class TapeTrace:
    """Collects a transport's tape, and turns it into records at the end."""

    def __init__(self, tape: Tape, records: TraceRecords) -> None:
        self._tape, self._records = tape, records
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

    def end(self) -> None:
        self._tape.untrace()
        self.drain()
        entries = [*read(b"".join(self._done))]
        calls = [entry for entry in entries if isinstance(entry, Ran)]
        origins = {call.number: origin_of(call.rows) for call in calls}
        names = {call.ticket: named(call.number, call.kind) for call in calls}
        for call in calls:
            self._collective(call, origins[call.number])
        for entry in entries:
            if isinstance(entry, Chunk):
                self._chunk(entry, origins.get(entry.number))
        for wait in read(b"".join(self._waits)):
            assert isinstance(wait, Waited)
            name = names.get(wait.ticket, "a collective")
            self._records.wait(name, wait.begin, wait.end, wait.ticket - 1, wait.thread)
        self._records.recorder.lost += self._left_out + self._lost - self._lost_before

    def _collective(self, call: Ran, origin: Origin | None) -> None:
        more: dict[str, Any] = {"waited_us": call.waited / 1000, "background": call.background}
        if call.issued:
            more["queued_us"] = max(0, call.begin - call.issued) / 1000
        if not call.ended:
            more["failed"] = True
        if origin and (builder := origin.builder()):
            self._records.schedule(origin.collective, builder, origin.root)
        algorithm = origin.algorithm if origin else EXCHANGE
        what = call.number, call.kind, call.elements, call.site, algorithm
        self._records.collective(call.begin, call.end, *what, **more)

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
        lane, recorder = self._records.lane, self._records.recorder
        recorder.spans.append(Span(name, "chunk", lane, entry.begin, entry.end, args))
