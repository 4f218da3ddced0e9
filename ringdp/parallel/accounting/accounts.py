"""An engine's memory and traffic: as counted, and by formula."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringdp.comm import Communicator
from ringdp.parallel.accounting.formula import formula, traffic
from ringdp.parallel.accounting.memory import Ledger, Memory, state_bytes
from ringdp.parallel.backward import Backwards
from ringdp.parallel.gathering import Gathering
from ringdp.parallel.reducing import Reducing
from ringdp.parallel.stages import Stage
from ringdp.parallel.unit import FlatUnit


class Accounts:
    """The part of an Engine that reports, and changes nothing."""

    stage: Stage
    comm: Communicator
    ledger: Ledger
    units: Sequence[FlatUnit]
    groups: Sequence[Sequence[int]]
    roots: Sequence[int]
    gathering: Gathering
    reducing: Reducing
    backwards: Backwards

    @property
    def device(self) -> torch.device:
        """Where the model computes; if that is a GPU, inputs are moved there."""
        return self.ledger.device

    def memory(self, optimizer: torch.optim.Optimizer) -> Memory:
        """Bytes on this rank as counted so far; peaks are over the whole run."""
        now, peak = self.ledger.now, self.ledger.peak
        return Memory(
            parameters=now["parameters"],
            gathered_peak=peak["gathered"],
            gradients=now["gradients"],
            buckets=peak["passing"] - peak["gathered"],
            optimizer=state_bytes(optimizer.state.values()),
        )

    def memory_formula(self, *, per_element: int = 8, per_parameter: int = 4) -> Memory:
        """What `memory` must be. The defaults are the optimizer bytes of Adam in float32."""
        return formula(
            [u.plan for u in self.units],
            self.groups,
            self.stage,
            self.comm.rank,
            widths=[u.widths for u in self.units],
            limit=self.gathering.limit,
            overlap=self.reducing.overlap,
            yields=self.gathering.reducing is not None,
            per_element=per_element,
            per_parameter=per_parameter,
        )

    def sent_bytes(self) -> int:
        """Bytes this rank has sent for gathers and reductions so far."""
        return self.gathering.comm.sent_bytes() + self.reducing.comm.sent_bytes()

    def traffic_formula(self) -> int:
        """Bytes this rank sends in a step of one forward and one backward."""
        return traffic(
            [u.plan for u in self.units],
            self.groups,
            self.stage,
            widths=[u.widths for u in self.units],
            limit=self.gathering.limit,
        )
