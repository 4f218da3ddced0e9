"""Traces a communicator from outside, if its transport keeps no tape: from call to result.

A collective ends when a wait for it returns; what the transport does in between is not seen.
Collectives run one after another, so one begins once it is called and the previous one has ended.
While it is traced, the communicator's `_issue` is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from ringdp.comm.call import call_site, named
from ringdp.comm.job import CallSpec, Job
from ringdp.comm.trace_records import Labelled, TraceRecords
from ringdp.comm.work import Work
from ringdp.errors import CommunicationError
from ringdp.schedule.custom import name_of


class CallTrace:
    """Traces one communicator until `end`."""

    def __init__(self, comm: Labelled, records: TraceRecords) -> None:
        self._comm, self._records, self._issue = comm, records, comm._issue
        self._free = 0  # when the last collective ended
        comm._issue = self.issue  # type: ignore[method-assign]

    def drain(self) -> None:
        """Does nothing: the recorder already has everything."""

    def end(self) -> None:
        del self._comm._issue

    def issue(self, job: Job, spec: CallSpec) -> Work:
        kind, elements = job.identity(spec)
        number, site, begin = self._comm.issued, call_site(3), monotonic_ns()
        algorithm = name_of(spec.algorithm)

        def ended(**more: Any) -> None:
            if not (isinstance(spec.algorithm, str) and ":" not in spec.algorithm):  # user-defined
                self._records.schedule(spec.collective, spec.algorithm, spec.root)
            first, now = max(begin, self._free), monotonic_ns()
            self._free = now
            call = number, kind, elements, site, algorithm
            more |= {"background": spec.async_op, "queued_us": (first - begin) / 1000}
            self._records.collective(first, now, *call, **more)

        name = named(number, kind)
        try:
            work = self._issue(job, spec)
        except CommunicationError:
            ended(failed=True)
            raise
        if spec.async_op:
            _watch(work, ended, lambda since: self._wait(name, since, number))
        else:
            ended()
            self._wait(name, begin, number)
        return work

    def _wait(self, name: str, since: int, number: int) -> None:
        self._records.wait(name, since, monotonic_ns(), number)


def _watch(work: Work, ended: Callable[..., None], waited: Callable[[int], None]) -> None:
    """Call `ended` once, when the result or an error is there, and `waited` after every wait."""
    complete, wait = work._complete, work.wait

    def completes() -> None:
        if not work._done:
            ended()
        complete()

    def waits(timeout: float | None = None) -> None:
        since, failed = monotonic_ns(), work._error is not None
        try:
            wait(timeout)
        except CommunicationError:
            if not failed:
                ended(failed=True)
            raise
        finally:
            waited(since)

    work._complete, work.wait = completes, waits  # type: ignore[method-assign]
