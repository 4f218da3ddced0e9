"""The `ringdp` command: reads the command line. How it ends: see `ends`."""

import sys
from collections.abc import Sequence
from importlib import metadata
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from ringdp.cli import show as showing
from ringdp.cli.bench import command as benching
from ringdp.cli.bench import error as error_bench
from ringdp.cli.bench import kernels as kernel_bench
from ringdp.cli.bench.cases import CASES, DTYPES, FOLDS
from ringdp.cli.bench.options import Options as BenchOptions
from ringdp.cli.bench.options import names, parse_bytes
from ringdp.cli.bench.rows import OURS
from ringdp.cli.console import plain
from ringdp.cli.doctor import job as doctor_job
from ringdp.cli.doctor import report as doctor_report
from ringdp.cli.ends import exit_code
from ringdp.cli.options import Options, default_batch, parse_modes, parse_stages
from ringdp.cli.plan import command as planning
from ringdp.cli.plan.hardware import PER_NODE
from ringdp.cli.plan.options import UTILISATION
from ringdp.cli.plan.options import Options as PlanOptions
from ringdp.cli.plan.table import show_published
from ringdp.cli.timeline import command as timeline
from ringdp.cli.train import run
from ringdp.errors import UsageError
from ringdp.schedule.algorithms import COLLECTIVES
from ringdp.schedule.cost import Machine

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
        bool, typer.Option("--version", help="print it", is_eager=True, callback=_version)
    ] = False,
) -> None:
    """Collectives and data-parallel training (DDP, ZeRO-1/2/3) from scratch."""


@app.command(short_help="train a small GPT with every stage, and compare them")
def train(
    ranks: Annotated[int, typer.Option(help="processes that train together")] = Options.ranks,
    stage: Annotated[
        str | None, typer.Option(help="all, or some of 0,1,2,3; all if not given")
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            help="instead of stages: all, or some of naive,parameter-server,async,ddp",
            show_default=False,
        ),
    ] = None,
    transport: Annotated[
        str, typer.Option(help=f"how the ranks of a stage exchange bytes: {', '.join(OURS)}")
    ] = Options.transport,
    steps: Annotated[int, typer.Option(help="optimizer steps of every run")] = Options.steps,
    seed: Annotated[int, typer.Option(help="fixes the model and the batches")] = Options.seed,
    batch: Annotated[
        int | None,
        typer.Option(
            help="rows of a global batch, a multiple of ranks; at least 16 if not given",
            show_default=False,
        ),
    ] = None,
    context: Annotated[int, typer.Option(help="bytes of a row")] = Options.context,
    learning_rate: Annotated[float, typer.Option(help="AdamW's")] = Options.learning_rate,
    text: Annotated[
        Path | None,
        typer.Option(help="file or directory to learn; else the standard library's sources"),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="write what was measured here")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="write what every rank does and when here: see `ringdp report`"),
    ] = None,
    reference: Annotated[bool, typer.Option(help="also train in one process and compare")] = True,
    sample: Annotated[bool, typer.Option(help="let the trained model write a line")] = True,
) -> int:
    """Train a byte-level GPT with every stage and compare them, with one another and with one
    process alone: losses, bytes held, bytes sent."""
    if stage is not None and mode is not None:
        raise UsageError("train takes either --stage or --mode")
    options = Options(
        ranks=ranks,
        stages=parse_stages("all" if stage is None else stage),
        modes=parse_modes(mode) if mode is not None else (),
        transport=transport,
        steps=steps,
        seed=seed,
        batch=default_batch(ranks) if batch is None else batch,
        context=context,
        learning_rate=learning_rate,
        text=text,
        json=json,
        trace=trace,
        reference=reference,
        sample=sample,
    )
    return run(options, plain())


@app.command(short_help="prove an algorithm and draw it")
def show(
    context: typer.Context,
    algorithm: Annotated[
        str | None,
        typer.Argument(help="a name that --list lists, or FILE.py:function", show_default=False),
    ] = None,
    collective: Annotated[
        str, typer.Option(help=f"what it must do: {', '.join(COLLECTIVES)}")
    ] = "all_reduce",
    ranks: Annotated[int, typer.Option(help="ranks that take part")] = 4,
    svg: Annotated[Path | None, typer.Option(help="draw every round here")] = None,
    html: Annotated[Path | None, typer.Option(help="write a page that replays it here")] = None,
    program: Annotated[
        int | None, typer.Option(help="also print this rank's rows, plain and fused")
    ] = None,
    cost: Annotated[bool, typer.Option("--cost", help="also print what it costs")] = False,
    alpha: Annotated[float, typer.Option(help="s per message")] = 1e-5,
    beta: Annotated[float, typer.Option(help="s per byte moved")] = 1e-10,
    gamma: Annotated[float, typer.Option(help="s per byte reduced")] = 2.5e-11,
    bus: Annotated[float, typer.Option(help="s per byte through what all ranks share")] = 0.0,
    everything: Annotated[bool, typer.Option("--list", help="list the algorithms")] = False,
) -> int:
    """Prove an algorithm and draw it: who sends which chunk to whom in every round."""
    given = [
        p for p in context.params if f"{context.get_parameter_source(p)}".endswith("COMMANDLINE")
    ]
    if given == ["everything"]:
        print(showing.listing())
        return 0
    if everything or algorithm is None:
        raise UsageError("show takes either an ALGORITHM, such as ring, or --list alone")
    if not cost and (terms := [term for term in Machine._fields if term in given]):
        raise UsageError(f"--{terms[0]} changes what --cost prints; allowed: with --cost")
    print(
        showing.show(
            algorithm,
            collective,
            ranks,
            svg_file=svg,
            html_file=html,
            program=program,
            cost=Machine(alpha, beta, gamma, bus) if cost else None,
        )
    )
    return 0


@app.command(short_help="time a collective beside other libraries, or our kernels")
def bench(
    collective: Annotated[
        str, typer.Argument(help=", ".join((*CASES, kernel_bench.NAME, error_bench.NAME)))
    ],
    ranks: Annotated[int, typer.Option(help="processes of each contender")] = BenchOptions.ranks,
    min: Annotated[str, typer.Option(help="smallest buffer in bytes, as in 1K")] = "1K",
    max: Annotated[str, typer.Option(help="largest")] = "64M",
    factor: Annotated[int, typer.Option(help="from one size to the next")] = BenchOptions.factor,
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = BenchOptions.dtype,
    op: Annotated[str, typer.Option(help=", ".join(FOLDS))] = BenchOptions.op,
    algorithm: Annotated[
        str, typer.Option(help="auto, names that show --list lists, FILE.py:function; with commas")
    ] = "auto",
    transport: Annotated[
        str, typer.Option(help=f"how ours exchange bytes: {', '.join(OURS)}; with commas")
    ] = "shm",
    registered: Annotated[
        bool, typer.Option("--registered", help="our inputs lie in shared memory (comm.empty)")
    ] = False,
    peer: Annotated[str, typer.Option(help="also time some of gloo,mpich,openmpi,torch-nccl")] = "",
    rounds: Annotated[
        int, typer.Option(help="of each contender, interleaved")
    ] = BenchOptions.rounds,
    json: Annotated[Path | None, typer.Option(help="write rows and machine here")] = None,
) -> int:
    """Time a collective beside other libraries, the cost model's prediction and the physical bound,
    with every result checked; or `kernels` beside torch's ways and a plain copy. `error` counts how
    far the sums of each algorithm are from float64's."""
    options = BenchOptions(
        collective=collective,
        ranks=ranks,
        min=parse_bytes("--min", min),
        max=parse_bytes("--max", max),
        factor=factor,
        dtype=dtype,
        op=op,
        algorithms=names(algorithm),
        transports=names(transport),
        registered=(registered,),
        peers=names(peer),
        rounds=rounds,
        json=json,
    )
    if collective == error_bench.NAME:
        return error_bench.bench(options, plain())
    if collective == kernel_bench.NAME:
        return kernel_bench.bench(options, plain())
    return benching.bench(options, plain())


@app.command(short_help="what a run will hold, send and take, and what fits")
def plan(
    model: Annotated[
        str | None,
        typer.Option(
            help="a name such as gpt2 or llama-7b, params=7e9, params=7e9/48 (units), or "
            "FILE.py:factory"
        ),
    ] = None,
    ranks: Annotated[int, typer.Option(help="processes that train together")] = PlanOptions.ranks,
    per_node: Annotated[
        int | None, typer.Option(help=f"ranks of one node; {PER_NODE} if not given")
    ] = None,
    stage: Annotated[str, typer.Option(help="all, or some of 0,1,2,3")] = "all",
    precision: Annotated[
        str, typer.Option(help="of compute: fp32, bf16, fp16")
    ] = PlanOptions.precision,
    reduce: Annotated[
        str | None, typer.Option(help="of reductions: the same; as compute if not given")
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            help="of a rank between nodes, a second: 400Gb (bits, the default) or 50GB (bytes); or "
            ".json files of ringdp bench --json, with commas"
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="rows of one rank in a step")] = PlanOptions.batch,
    context: Annotated[int, typer.Option(help="tokens of a row")] = PlanOptions.context,
    device: Annotated[
        str, typer.Option(help="a100, h100, h200: by datasheet")
    ] = PlanOptions.device,
    utilisation: Annotated[
        float | None,
        typer.Option(help=f"share of its peak that compute reaches; {UTILISATION} if not given"),
    ] = None,
    flops: Annotated[
        float | None, typer.Option(help="that a rank sustains a second, instead of that share")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="most that a rank may hold, as in 80GB or 80GiB; else the device's"),
    ] = None,
    alpha: Annotated[
        float | None, typer.Option(help="s per message on a named network; 1e-5 if not given")
    ] = None,
    algorithm: Annotated[
        str, typer.Option(help=f"of every collective: {', '.join(planning.ALGORITHMS)}")
    ] = PlanOptions.algorithm,
    json: Annotated[Path | None, typer.Option(help="write the plan here")] = None,
    published: Annotated[
        bool, typer.Option("--published", help="instead, published figures beside the formulas")
    ] = False,
) -> int:
    """Say before a run what each stage holds and sends, how long a step takes, and what fits."""
    if published == (model is not None):
        raise UsageError("plan takes either --model, such as gpt2, or --published")
    console = plain()
    options = PlanOptions(
        model=model or "",
        ranks=ranks,
        per_node=per_node,
        stages=parse_stages(stage),
        precision=precision,
        reduce=reduce,
        network=network,
        batch=batch,
        context=context,
        device=device,
        utilisation=utilisation,
        flops=flops,
        memory=memory,
        alpha=alpha,
        algorithm=algorithm,
        json=json,
    )
    if published and options != PlanOptions(model=""):
        raise UsageError("plan --published takes no other option: its figures are of one setting")
    if published:
        return show_published(console)
    return planning.plan(options, console)


@app.command(short_help="make one page of a trace")
def report(
    trace: Annotated[Path, typer.Argument(help="of ringdp.trace or `ringdp train --trace`")],
    html: Annotated[Path, typer.Option(help="write the page here")],
    network: Annotated[
        str | None,
        typer.Option(help="a bench's .json files, with commas, for α β γ; else fitted to the run"),
    ] = None,
) -> int:
    """Make one page of a trace: timeline, memory, predicted and measured collectives, replays."""
    return timeline.report(trace, html, network, plain())


@app.command(short_help="what works here; or what the ranks of a running job do")
def doctor(
    pid: Annotated[
        int | None, typer.Option(help="print what the ranks do, of the job of this rank's process")
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(
            help="the same of all ranks below this process, or of this torchrun --rdzv-id"
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print what was found as JSON")] = False,
) -> int:
    """Say what is installed and works here; or what the ranks of a running job do, and wait for."""
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
        sys.stdout.reconfigure(errors="replace")  # µ and α are not worth an end
    asked = given or ["--help"]
    code = exit_code(lambda: app(asked, prog_name="ringdp", standalone_mode=False))
    return code if given else 2
