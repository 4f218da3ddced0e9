"""Times a training step of a GPT with Muon: ringdp's stages 1 and 3, FSDP2 over gloo, one process.

    python -m bench.muon_step --json bench/results/muon_step.json

As `bench.zero_step`, but torch.optim.Muon steps the blocks' matrices, and AdamW all else. In
`apart`, as under DDP, every rank steps every matrix; sharded, each is stepped by one rank.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from bench.ddp_step import KEPT, report, timed
from bench.results import parser, record
from bench.zero_step import FSDP2, wrapped

WAYS = ("alone", "apart", FSDP2, f"{FSDP2}{KEPT}", "stage 1", "stage 3")


def main(rounds: int) -> dict[str, object]:
    return report(timed(WAYS, FSDP2, wrapped, rounds, muon), [], "Muon")


def muon(model: nn.Module) -> list[Optimizer]:
    named = dict(model.named_parameters())
    matrices = {n: p for n, p in named.items() if "blocks" in n and p.dim() == 2}
    others = [p for n, p in named.items() if n not in matrices]
    return [torch.optim.Muon(matrices.values(), lr=1e-3), torch.optim.AdamW(others, lr=1e-4)]


if __name__ == "__main__":
    record(parser(__doc__, 5), main)
