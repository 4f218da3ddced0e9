"""An error on one rank is one on every rank: none waits for a rank that has given up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ringdp.comm import Communicator
from ringdp.errors import CheckpointError
from ringdp.parallel.replicas import gather_json


@contextmanager
def together(comm: Communicator, otherwise: str) -> Iterator[None]:
    """What is done within it, no collective, succeeds on all ranks. Collective when it ends.

    Raises CheckpointError, on every rank, which starts with `otherwise` and says what each met.
    """
    cause: Exception | None = None
    try:
        yield
    except (CheckpointError, OSError) as e:
        cause = e
    met: dict[str, list[str]] = {}
    for rank, problem in enumerate(gather_json(comm, str(cause) if cause else "")):
        if problem:
            met.setdefault(problem, []).append(str(rank))
    if met:
        said = "; ".join(
            f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: {problem}"
            for problem, ranks in met.items()
        )
        raise CheckpointError(f"{otherwise}; {said}") from cause
