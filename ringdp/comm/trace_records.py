"""Writes a communicator's spans and facts to a trace, from a tape or from `call_trace`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringdp.comm.call import collective_of, dtype_of, named, place, tag_of
from ringdp.comm.job import Issuer
from ringdp.errors import UsageError
from ringdp.schedule import Builder, Collective, proved
from ringdp.schedule.custom import name_of
from ringdp.tape.recorder import Args, Recorder, Span


class Labelled(Issuer):
    """The names of a communicator in traces."""

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


class TraceRecords:
    """Records of one communicator for one recorder."""

    def __init__(self, comm: Labelled, recorder: Recorder) -> None:
        self.comm, self.recorder = comm, recorder
        self._lane: int | None = None

    @property
    def lane(self) -> int:
        """The communicator's lane, which is added to the trace on first use."""
        if self._lane is None:
            name, title = self.comm._name, self.comm._title
            self._lane = self.recorder.lane(("communicator", name), title)
            link = self.comm._transport.link
            self.recorder.fact(
                "communicators",
                {
                    "name": name,
                    "label": title,
                    "lane": self._lane,
                    "ranks": list(self.comm._ranks),
                    "transport": self.comm._kind,
                    "link": link._asdict() if link else None,
                },
            )
        return self._lane

    def collective(
        self,
        begin: int,
        end: int,
        number: int,
        kind: int,
        elements: int,
        site: bytes,
        algorithm: str,
        **more: object,
    ) -> None:
        dtype = dtype_of(kind)
        args: Args = {
            "comm": self.comm._name,
            "number": number,
            "collective": collective_of(kind),
            "algorithm": algorithm,
            "elements": elements,
            "bytes": elements * getattr(torch, dtype).itemsize,
            "dtype": dtype,
            "tag": tag_of(kind),
            "at": place(site),
            **more,
        }
        name = named(number, kind)
        self.recorder.spans.append(Span(name, "collective", self.lane, begin, end, args))

    def wait(self, name: str, begin: int, end: int, number: int, thread: int | None = None) -> None:
        args = {"comm": self.comm._name, "number": number}
        lane = self.recorder.thread(thread)
        self.recorder.spans.append(Span(f"wait for {name}", "wait", lane, begin, end, args))

    def schedule(self, collective: Collective, algorithm: str | Builder, root: int) -> None:
        """Record the algorithm's schedule, once for each, for a replay."""
        schedules = self.recorder.facts.setdefault("schedules", [])
        head = {
            "collective": collective,
            "algorithm": name_of(algorithm),
            "root": root,
            "ranks": self.comm.size,
        }
        if any(head.items() <= s.items() for s in schedules):
            return
        plan = proved(algorithm, collective, self.comm.size, root)
        rounds = [[list(map(int, t)) for t in transfers] for transfers in plan.rounds]
        schedules.append({**head, "chunks": plan.chunks, "rounds": rounds})
