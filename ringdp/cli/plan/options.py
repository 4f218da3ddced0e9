"""The options of `ringdp plan` as typed, and its help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from ringdp.cli.checks import written
from ringdp.cli.options import parse_stages
from ringdp.cli.plan.hardware import ASSUMED_ALPHA, BETWEEN_NODES, DEVICES, PER_NODE
from ringdp.schedule.cost import CLOSED

UTILISATION = 0.4  # share of the peak that compute reaches
USED = ("all_reduce", "reduce_scatter", "all_gather")
ALGORITHMS = [a for c, a in CLOSED if c == USED[0] and all((u, a) in CLOSED for u in USED)]


@dataclass(frozen=True)
class Options:
    """Predict what each stage holds and sends, how long a step takes, and what fits."""

    model: Annotated[
        str,
        Option(
            help="a name such as gpt2 or llama-7b, params=7e9, params=7e9/48 (units), or "
            "FILE.py:factory"
        ),
    ] = ""
    ranks: Annotated[int, Option(help="processes that train together")] = 64
    per_node: Annotated[int | None, Option(help=f"ranks of one node; {PER_NODE} if not given")] = (
        None
    )
    shard_size: Annotated[
        int | None,
        Option(help="ranks that hold a model together in stages 1 to 3; all if not given"),
    ] = None
    reshard_size: Annotated[
        int | None,
        Option(help="of these, ranks that gather a unit for its backward in stage 3, likewise"),
    ] = None
    stage: Annotated[str, Option(help="all, or some of 0,1,2,3")] = "all"
    precision: Annotated[str, Option(help="of compute: fp32, bf16 or fp16")] = "bf16"
    reduce: Annotated[
        str | None, Option(help="of reductions, likewise; that of compute if not given")
    ] = None
    network: Annotated[
        str | None,
        Option(
            help=f"a rank's rate between nodes: {BETWEEN_NODES} (bits/s, the default) or 50GB "
            "(bytes/s); or .json files of `ringdp bench`, with commas"
        ),
    ] = None
    batch: Annotated[int, Option(help="rows of one rank in a step")] = 1
    context: Annotated[int, Option(help="tokens of a row")] = 1024
    device: Annotated[str, Option(help=f"whose datasheet counts: {', '.join(DEVICES)}")] = "h100"
    utilisation: Annotated[
        float | None,
        Option(help=f"share of its peak that compute reaches; {UTILISATION} if not given"),
    ] = None
    flops: Annotated[
        float | None, Option(help="flop/s that a rank sustains, instead of --utilisation")
    ] = None
    memory: Annotated[
        str | None,
        Option(help="most that a rank may hold, as in 80GB or 80GiB; by default the device's"),
    ] = None
    alpha: Annotated[
        float | None,
        Option(help=f"s per message on a named network; {ASSUMED_ALPHA:g} if not given"),
    ] = None
    algorithm: Annotated[str, Option(help=f"of every collective: {', '.join(ALGORITHMS)}")] = (
        "direct"
    )
    json: Annotated[Path | None, written("write the plan here")] = None
    published: Annotated[
        bool, Option("--published", help="show published figures beside the formulas instead")
    ] = False

    @property
    def stages(self) -> tuple[int, ...]:
        return parse_stages(self.stage)
