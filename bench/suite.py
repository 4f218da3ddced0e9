"""Runs all that README and docs/speed.md report of a CPU; each run writes a file of bench/results.

    pip install 'ringdp[bench]'
    python -m bench.suite                  # all, some 50 minutes
    python -m bench.suite all_reduce --rounds 4 --max 4M

Nothing else should run meanwhile. Files with times record the machine and its load.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bench.results import RESULTS
from ringdp.cli.bench.cases import EVEN
from ringdp.cli.bench.command import bench
from ringdp.cli.bench.options import Options
from ringdp.cli.bench.peers import PEERS
from ringdp.cli.console import plain
from ringdp.cli.exits import exit_code
from ringdp.errors import UsageError

BOTH = None  # ringdp's buffers: private, and in shared memory
EVERY = ",".join(PEERS)

RUNS: dict[str, Options] = {
    "all_reduce": Options("all_reduce", registered=BOTH, peer=EVERY),
    "all_reduce_bf16": Options("all_reduce", dtype="bfloat16", registered=BOTH, peer="gloo"),
    "reduce_scatter": Options("reduce_scatter", registered=BOTH, peer=EVERY),
    "all_gather": Options("all_gather", registered=BOTH, peer=EVERY),
    "broadcast": Options("broadcast", registered=BOTH, peer=EVERY),
    "all_reduce_4": Options("all_reduce", ranks=4, registered=BOTH, peer=EVERY),
    **{f"{name}_8": Options(name, ranks=8, peer="gloo") for name in EVEN},
}

MODULES = (
    *("small", "guard", "ddp_step", "zero_step", "muon_step", "replicas"),
    *("torch_backend", "trace", "plan", "link"),
)
OTHERS: dict[str, str] = {  # python's arguments but `--json FILE`
    **{name: f"-m bench.{name}" for name in MODULES},
    "kernels": "-m ringdp bench kernels --min 4K --max 64M --factor 16 --rounds 20",
    "error": "-m ringdp bench error",
    "train": "-m ringdp train",
}


def main(
    names: Annotated[list[str] | None, typer.Argument(help=", ".join([*RUNS, *OTHERS]))] = None,
    rounds: Annotated[
        int, typer.Option(help="of each contender, where libraries are compared")
    ] = Options.rounds,
    max: Annotated[str, typer.Option(help="there, no buffer is larger")] = Options.max,
    into: Annotated[
        Path, typer.Option(help="a folder: bench/results/other is for a second machine's")
    ] = RESULTS,
) -> int:
    codes = [0]
    for name in names or ():
        if name not in RUNS and name not in OTHERS:
            raise UsageError(f"no run {name!r}; there are {', '.join([*RUNS, *OTHERS])}")
    into.mkdir(parents=True, exist_ok=True)
    for name in names or [*RUNS, *OTHERS]:
        file = into / f"{name}.json"
        if name in RUNS:
            options = replace(RUNS[name], rounds=rounds, max=max, json=file)
            codes.append(bench(options, plain()))
        else:
            command = [sys.executable, *OTHERS[name].split(), "--json", str(file)]
            codes.append(subprocess.run(command, check=False).returncode)
    return sorted(codes)[-1]


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(main)
    raise SystemExit(exit_code(lambda: app(standalone_mode=False)))
