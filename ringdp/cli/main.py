"""The `ringdp` command line. `exits` says how a command ends."""

import signal
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import metadata
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from ringdp.cli import show as showing
from ringdp.cli.bench import command as benching
from ringdp.cli.bench import error as error_bench
from ringdp.cli.bench import kernels as kernel_bench
from ringdp.cli.bench.options import ERROR, KERNELS
from ringdp.cli.bench.options import Options as BenchOptions
from ringdp.cli.checks import file_named, written
from ringdp.cli.console import plain
from ringdp.cli.doctor import job as doctor_job
from ringdp.cli.doctor import report as doctor_report
from ringdp.cli.exits import exit_code
from ringdp.cli.launch import cool_down
from ringdp.cli.options import Options
from ringdp.cli.plan import command as planning
from ringdp.cli.plan.options import Options as PlanOptions
from ringdp.cli.timeline import command as timeline
from ringdp.cli.train import run
from ringdp.errors import UsageError

Asked = TypeVar("Asked")

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        print(f"ringdp {metadata.version('ringdp')}")
        raise typer.Exit


@app.callback()
def ringdp(
    version: Annotated[
        bool, typer.Option("--version", help="print the version", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """Collectives and data-parallel training (DDP, ZeRO-1/2/3) from scratch."""


def _command(
    name: str, asked: type[Asked], run: Callable[[Asked, Console], int], *, says: str
) -> None:
    """Register a command: its parameters are the fields of `asked`, its help is the docstring.

    `says` is its line in the list of commands.
    """

    @wraps(asked, updated=())
    def command(**given: Any) -> int:
        return run(asked(**given), plain())

    app.command(name, short_help=says)(command)


def _bench(options: BenchOptions, console: Console) -> int:
    others = {KERNELS: kernel_bench.bench, ERROR: error_bench.bench}
    return others.get(options.collective, benching.bench)(options, console)


_command("train", Options, run, says="train a small GPT with every stage, and compare them")
_command("show", showing.Options, showing.show, says="prove an algorithm and draw it")
_command(
    "bench",
    BenchOptions,
    _bench,
    says="time a collective beside other libraries, or ringdp's kernels",
)
_command(
    "plan",
    PlanOptions,
    planning.plan,
    says="predict what a run holds, sends and takes, and what fits",
)


@app.command(short_help="make one page of a trace")
def report(
    trace: Annotated[
        Path,
        typer.Argument(parser=file_named, help="a file of ringdp.trace or `ringdp train --trace`"),
    ],
    html: Annotated[Path, written("write the page here")],
    network: Annotated[
        str | None,
        typer.Option(
            help="predict from .json files of `ringdp bench`, with commas; else from the run itself"
        ),
    ] = None,
) -> int:
    """Make one page of a trace: timeline, memory, predicted and measured collectives, replays."""
    return timeline.report(trace, html, network, plain())


@app.command(short_help="check what works here; or show what a job's ranks do")
def doctor(
    pid: Annotated[
        int | None, typer.Option(help="show what the ranks do, in the job of this rank's process")
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(
            help="the same for all ranks below this process, or of this torchrun --rdzv-id"
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print what was found as JSON")] = False,
) -> int:
    """Check what is installed and works here; or show what the ranks of a running job do."""
    if (pid is not None) + (job is not None) + json > 1:
        raise UsageError("doctor takes one of --pid, --job and --json")
    console = plain()
    if pid is not None:
        return doctor_job.show_process(pid, console)
    if job is not None:
        return doctor_job.show_job(job, console)
    return doctor_report.show(doctor_report.examine(), console, as_json=json)


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else list(arguments)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without µ or α shows ? instead
    asked = given or ["--help"]
    code = exit_code(lambda: app(asked, prog_name="ringdp", standalone_mode=False))
    if arguments is None:  # the process ends, and another Ctrl-C would only print tracebacks
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        cool_down()
    return code if given else 2
