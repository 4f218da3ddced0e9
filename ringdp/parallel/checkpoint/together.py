"""An error on one rank becomes one on every rank, so that none waits for a rank that gave up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ringdp.comm import Communicator
from ringdp.errors import CheckpointError
from ringdp.parallel.replicas import gather_json


@contextmanager
def together(comm: Communicator, otherwise: str) -> Iterator[None]:
    """Its body, which must not be collective, succeeds on all ranks. Collective at its end.

    Otherwise raises CheckpointError on every rank: `otherwise`, and each rank's error, of any type,
    since the user's code may run inside. Its cause is the rank's own error.
    """
    cause: Exception | None = None
    said = ""
    try:
        yield
    except CheckpointError as e:
        cause, said = e, str(e)
    except Exception as e:
        cause, said = e, f"{type(e).__name__}: {e}"
    met: dict[str, list[str]] = {}
    for rank, problem in enumerate(gather_json(comm, said)):
        if problem:
            met.setdefault(problem, []).append(str(rank))
    if met:
        each = "; ".join(
            f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {problem}"
            for problem, ranks in met.items()
        )
        raise CheckpointError(f"{otherwise}; {each}") from cause
