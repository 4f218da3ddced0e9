"""`ringdp plan`: checks the options, plans every stage, and writes the plan as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

from ringdp.cli.checks import between, check_writable, given, one_of, parse_bytes
from ringdp.cli.console import counted, finish
from ringdp.cli.plan.hardware import DEVICES, PER_NODE, Network, network
from ringdp.cli.plan.models import Model, read
from ringdp.cli.plan.options import ALGORITHMS, UTILISATION, Options
from ringdp.cli.plan.stages import MOST_RANKS, Row, Setting, recommend, row
from ringdp.cli.plan.table import show, show_published
from ringdp.errors import UsageError
from ringdp.parallel.precision import Precision

LEAST_MEMORY, MOST_MEMORY = 10**6, 10**15  # bytes
MOST_FLOPS, MOST_ALPHA, LEAST_UTILISATION = 1e24, 60.0, 1e-6
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def plan(options: Options, console: Console) -> int:
    """Return the exit code, 0. Raises UsageError for bad input."""
    if options.published == bool(options.model):
        raise UsageError("plan takes either --model, such as gpt2, or --published")
    if options.published:
        if given(options) != ["published"]:
            raise UsageError(
                "plan --published takes no other option: its figures are of one setting"
            )
        return show_published(console)
    setting = check(options)
    model = read(options.model, precision(options))
    rows = [row(model, stage, setting) for stage in options.stages]
    says = recommend(rows, model, setting)
    asked = options, model, setting, rows, says
    finish(console, options.json, to_json(*asked), lambda: show(console, *asked))
    return 0


def check(options: Options) -> Setting:
    """Turn options into a Setting. Raises UsageError for the first thing that cannot work."""
    between("--ranks", options.ranks, 1, MOST_RANKS)
    between("--per-node", options.per_node, 1, MOST_RANKS)
    between("--shard-size", options.shard_size, 1, options.ranks)
    size = options.ranks if options.shard_size is None else options.shard_size
    between("--reshard-size", options.reshard_size, 1, size)
    near = size if options.reshard_size is None else options.reshard_size
    between("--batch", options.batch, 1, 1 << 20)
    between("--context", options.context, 1, 1 << 24)
    one_of("--precision", options.precision, PRECISIONS)
    one_of("--reduce", options.reduce, PRECISIONS)
    one_of("--device", options.device, DEVICES)
    one_of("--algorithm", options.algorithm, ALGORITHMS)
    share = options.utilisation
    between("--utilisation", share, LEAST_UTILISATION, 1, f"{LEAST_UTILISATION:g} to 1")
    if share is not None and options.flops is not None:
        raise UsageError("plan takes either --flops or --utilisation")
    between("--flops", options.flops, 1, MOST_FLOPS, f"1 to {MOST_FLOPS:g} a second")
    between("--alpha", options.alpha, 0, MOST_ALPHA, f"0 to {MOST_ALPHA:g} s")
    has = DEVICES[options.device]
    memory = has.memory
    if options.memory is not None:
        memory = parse_bytes("--memory", options.memory, kilo=1000)  # as GPUs are sold
    if not LEAST_MEMORY <= memory <= MOST_MEMORY:
        raise UsageError(
            f"--memory is {options.memory!r}, which is {counted(memory, 'byte')}; allowed: 1MB to "
            f"{MOST_MEMORY // 10**9:,}GB, with its unit, as in 80GB or 80GiB"
        )
    check_writable(options.json)
    peak = has.fp32 if options.precision == "fp32" else has.bf16
    over = network(
        options.network,
        options.device,
        options.ranks,
        per_node=options.per_node,
        alpha=options.alpha,
    )
    if over.yields and options.flops is None:
        raise UsageError(
            f"--network is {options.network}, measured in a host's memory; allowed: with --flops, "
            f"what a rank computes there, which is no {options.device}"
        )
    within = _part(options, "--shard-size", size, options.ranks, over)
    return Setting(
        ranks=options.ranks,
        replicas=options.ranks // size,
        within=within,
        near=near if near < size else None,
        nearby=_part(options, "--reshard-size", near, size, within),
        tokens=options.batch * options.context,
        memory=memory,
        flops=options.flops or (share or UTILISATION) * peak,
        bandwidth=over.bandwidth or has.bandwidth,
        network=over,
        algorithm=options.algorithm,
    )


def _part(options: Options, name: str, size: int, ranks: int, over: Network) -> Network:
    """The network of `size` of `ranks`, which `over` connects."""
    if size == ranks:
        return over
    node = options.per_node or PER_NODE
    if over.measured:
        raise UsageError(
            f"{name} is {size}; allowed: none with {options.network}, which measured all ranks "
            "together"
        )
    if ranks % size or min(size, node) != math.gcd(size, node):
        raise UsageError(
            f"{name} is {size}; allowed: what divides {ranks} ranks, and fills nodes of {node} "
            "(--per-node) or equal parts of one"
        )
    named = options.network if size > node else None
    return network(named, options.device, size, per_node=node, alpha=options.alpha)


def precision(options: Options) -> Precision:
    reduce = None if options.reduce is None else PRECISIONS[options.reduce] or torch.float32
    return Precision(param=PRECISIONS[options.precision], reduce=reduce)


def to_json(
    options: Options, model: Model, setting: Setting, rows: Sequence[Row], says: str
) -> dict[str, Any]:
    machine = setting.network.machine
    return {
        "model": model.name,
        "parameters": model.elements,
        "units": model.units,
        "ranks": setting.ranks,
        "shard_size": setting.ranks // setting.replicas,
        "reshard_size": setting.near or setting.ranks // setting.replicas,
        "per_node": None if setting.network.measured else options.per_node or PER_NODE,
        "precision": options.precision,
        "tokens_per_rank": setting.tokens,
        "memory_bytes": setting.memory,
        "flops_per_second": setting.flops,
        "network": {
            "source": setting.network.source,
            **machine._asdict(),
            "fitted": {name: m._asdict() for name, m in setting.network.fitted.items()},
            "beside_compute": setting.network.beside(setting.ranks),
        },
        "algorithm": setting.algorithm,
        "stages": [
            {
                "stage": r.stage,
                "memory": r.memory._asdict(),
                "memory_total": r.total,
                "fits": r.fits,
                "largest_parameters": r.largest,
                "sent_bytes": r.sent,
                "seconds": {**r.step._asdict(), "hidden": r.step.hidden, "total": r.step.total},
                "extrapolated": r.extrapolated,
            }
            for r in rows
        ],
        "recommendation": says,
    }
