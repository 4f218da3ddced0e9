"""What one rank measured in one stage, and its JSON form.

Bytes are per rank. `memory` and `memory_formula` both have the keys of MEMORY.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringdp.parallel.memory import Memory

MEMORY = Memory._fields


@dataclass(frozen=True)
class Record:
    """A run: of one stage on one rank, or (stage None) of the single process."""

    parameters: int  # elements of the whole model
    loss: tuple[float, ...]  # mean over the global batch, one per step
    seconds: tuple[float, ...]  # one per step, including the first
    tokens_per_step: int  # of the global batch
    digest: str  # of the bits of all final parameters
    sample: bytes  # what the trained model writes
    stage: int | None = None
    ranks: int = 1
    memory: dict[str, int] = field(default_factory=dict)
    memory_formula: dict[str, int] = field(default_factory=dict)
    sent: int = 0  # bytes per step
    sent_formula: int = 0

    def milliseconds(self, percentile: float) -> float:
        return float(np.percentile(self.seconds, percentile)) * 1e3

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / (self.milliseconds(50) / 1e3)


def to_json(record: Record) -> dict[str, Any]:
    return {
        "stage": record.stage,
        "ranks": record.ranks,
        "parameters": record.parameters,
        "loss": list(record.loss),
        "step_ms": {f"p{p}": round(record.milliseconds(p), 3) for p in (20, 50, 80)},
        "tokens_per_s": round(record.tokens_per_second, 1),
        "memory": {**record.memory, "formula": record.memory_formula},
        "traffic": {"sent_bytes_per_step": record.sent, "formula": record.sent_formula},
    }
