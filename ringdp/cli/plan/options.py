"""What `ringdp plan` is asked, as the command line says it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ringdp.cli.options import STAGES

UTILISATION = 0.4  # share of its peak that compute reaches


@dataclass(frozen=True)
class Options:
    model: str
    ranks: int = 64
    per_node: int | None = None  # hardware.PER_NODE; not with a bench file
    stages: tuple[int, ...] = STAGES
    precision: str = "bf16"
    reduce: str | None = None  # as the parameters compute
    network: str | None = None  # hardware.BETWEEN_NODES
    batch: int = 1  # rows of a rank
    context: int = 1024  # tokens of a row
    device: str = "h100"
    utilisation: float | None = None  # UTILISATION
    flops: float | None = None  # sustained; instead of a share of the device's peak
    memory: str | None = None
    alpha: float | None = None  # s a message; not with a bench file, which says it
    algorithm: str = "direct"
    json: Path | None = None
