"""A parameter written to while its unit computes, as a constraint or a codebook in a forward does
it: an error that names it.

It is then a view of what was gathered, which goes afterwards, and what is written there with it.
Through `p.data` too; what is not seen is a write through the `.data` of a view, or by numpy.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringdp.errors import UsageError
from ringdp.parallel.unit import FlatUnit


def lost(unit: FlatUnit) -> list[str]:
    """UNSHARDED: the names of what was written to, where it will not be kept."""
    kept = not (unit.apart or unit.freed)  # the master is a part of what was gathered
    return [
        entry.name
        for p, view, version, entry in zip(
            unit.computed, unit.views, unit.versions, unit.plan.entries, strict=True
        )
        if p.data_ptr() != view.data_ptr() or not (kept or p._version == version)
    ]


def refuse(names: Sequence[str]) -> None:
    """Raises UsageError if there are any."""
    if names:
        raise UsageError(
            f"written to while its unit computes: {', '.join(names)}. There it is a gathered copy, "
            "and what is written is lost. Write to it between steps, when it is this rank's slice, "
            "or within full_parameters(write=True); or keep such values in a buffer"
        )
