"""What the functions beside an engine expect: it, and not the model or the parameters it is of."""

from __future__ import annotations

from ringdp.errors import UsageError
from ringdp.parallel.engine import Engine


def check_engine(function: str, given: object) -> None:
    """Raise UsageError for anything else, such as what torch's functions of that name take."""
    if not isinstance(given, Engine):
        found = type(given).__name__
        raise UsageError(
            f"{function}: engine is a {found}; allowed: what ringdp.shard returns, or the .engine "
            "of what another library's name returns"
        )
