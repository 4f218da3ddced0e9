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

    Raises CheckpointError, on every rank, which starts with `otherwise` and says what each met; its
    cause is the rank's own error, of any kind: code of the user's may run here.
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
