"""`ringdp doctor`: reports what is installed and works, and how to mend what does not.

A check is a function that returns a Check. ringdp can run if every needed check is well; the others
show what else would be possible, or faster.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console

from ringdp.cli.console import folding, put
from ringdp.cli.doctor.host import HOST, Check
from ringdp.cli.doctor.packages import PACKAGES


def examine() -> list[Check]:
    """Run all checks, the host's first: they fork, which is safest before torch starts threads."""
    return [check() for check in (*HOST, *PACKAGES)]


def show(checks: Sequence[Check], console: Console, *, as_json: bool) -> int:
    """Print the checks. The exit code is 0 if ringdp can run."""
    runs = all(c.well for c in checks if c.needed)
    if as_json:
        print(json.dumps({"runs": runs, "checks": [c._asdict() for c in checks]}, indent=1))
        return int(not runs)
    table = folding("", "", "", shown=False)
    for check in checks:
        todo = f"\n-> {check.advice}" if check.advice else ""
        mark = "ok" if check.well else "NO" if check.needed else "-"
        table.add_row(mark, check.what, check.found + todo)
    put(console, table)
    console.print("ringdp can run here" if runs else "ringdp cannot run here")
    return int(not runs)
