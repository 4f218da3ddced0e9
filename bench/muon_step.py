"""Times a training step of a GPT with Muon: ringdp's stages 1 and 3, FSDP2 over gloo, one process.

    python -m bench.muon_step --json bench/results/muon_step.json

As `bench.zero_step`, but torch.optim.Muon steps the blocks' matrices, and AdamW all else. In
`apart`, as under DDP, every rank steps every matrix; sharded, each is stepped by one rank.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from bench.ddp_step import KEPT, RANKS, report, train
from bench.results import parser
from bench.turns import between_jobs, rows
from bench.zero_step import FSDP2, wrapped
from ringdp.cli.bench.machine import describe
from ringdp.cli.files import write_json

WAYS = ("alone", "apart", FSDP2, f"{FSDP2}{KEPT}", "stage 1", "stage 3")


def main() -> None:
    arguments, machine = parser(__doc__, 5).parse_args(), describe(RANKS)
    ways = {way: partial(train, way, FSDP2, wrapped, muon) for way in WAYS}
    times = between_jobs(RANKS, ways, arguments.rounds)
    steps = rows(times, alone="alone", peer=FSDP2, kept=f"{FSDP2}{KEPT}")
    write_json(arguments.json, {"machine": machine} | report(steps, [], "Muon"))


def muon(model: nn.Module) -> list[Optimizer]:
    named = dict(model.named_parameters())
    matrices = {n: p for n, p in named.items() if "blocks" in n and p.dim() == 2}
    others = [p for n, p in named.items() if n not in matrices]
    return [torch.optim.Muon(matrices.values(), lr=1e-3), torch.optim.AdamW(others, lr=1e-4)]


if __name__ == "__main__":
    main()
