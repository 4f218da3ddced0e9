"""`ZeroRedundancyOptimizer`: replicas as DDP keeps them, optimizer state in shards.

Each rank's inner optimizer steps this rank's slices, in place; then all gather what has changed.
In torch's `Join([ddp, optimizer])` a rank without inputs steps its slices, too, by the gradients of
one that has some, and with the options, such as lr, that it has itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import JoinHook

from ringdp.comm import Communicator, communicator_of
from ringdp.errors import UsageError
from ringdp.parallel import replicas
from ringdp.parallel.guards.steps import check_slices
from ringdp.parallel.joins import Joins, Shadow
from ringdp.parallel.layout import Unit, layout
from ringdp.parallel.refuse import refuse


class ZeroRedundancyOptimizer(torch.optim.Optimizer, Joins):
    """torch's arguments: `optimizer_class` is any element-wise optimizer, `defaults` are its.

    Gradients must be equal on all ranks, as DDP leaves them.
    """

    _advice = "the optimizer and model such a one"

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        process_group: Communicator | ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        refuse(
            "ZeroRedundancyOptimizer",
            parameters_as_bucket_view=(parameters_as_bucket_view, False),
            overlap_with_ddp=(overlap_with_ddp, False),
        )
        super().__init__(params, defaults)
        Joins.__init__(self)
        self._group = process_group  # as given
        self.comm = communicator_of(
            process_group, (p for group in self.param_groups for p in group["params"])
        )
        self._parts: dict[Tensor, tuple[nn.Parameter, slice]] = {}  # this rank's, of each parameter
        self._plans: list[tuple[Unit, list[Tensor]]] = []  # of each dtype
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for group in self.param_groups:
            for p in group["params"]:
                if not p.is_contiguous():
                    raise UsageError(
                        f"ZeroRedundancyOptimizer: a parameter of shape {list(p.shape)} has strides"
                        f" {p.stride()}; allowed: contiguous ones"
                    )
                by_dtype.setdefault(p.dtype, []).append(p)
        for dtype, tensors in by_dtype.items():
            named = [(str(i), p.numel()) for i, p in enumerate(tensors)]
            (plan,) = layout([(str(dtype), named)], self.comm.size)
            self._plans.append((plan, tensors))
            for entry, p in zip(plan.entries, tensors, strict=True):
                span = slice(*plan.part(entry, self.comm.rank))
                self._parts[p] = nn.Parameter(p.detach().view(-1)[span], p.requires_grad), span
        groups = [
            _options(group) | {"params": [self._parts[p][0] for p in group["params"]]}
            for group in self.param_groups
        ]
        self.optim = optimizer_class(groups, **defaults)
        check_slices(self.optim, "in ZeroRedundancyOptimizer", "or it without this one")
        self.defaults = self.optim.defaults
        self._show_options()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's slices with the groups' options of now, then share them. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for p in self._parts:
            if p.grad is not None and p.grad.layout != torch.strided:
                raise UsageError(
                    f"ZeroRedundancyOptimizer: the gradient of a parameter of shape {list(p.shape)}"
                    f" is {p.grad.layout}; allowed: dense ones, as of Embedding(sparse=False)"
                )
        self._notify()
        if self._join_config.enable:
            self._share_gradients(trains=True)
        self._step()
        return loss

    @torch.no_grad()
    def _step(self) -> None:
        for group, inner in zip(self.param_groups, self.optim.param_groups, strict=True):
            inner.update(_options(group))
        for p, (part, span) in self._parts.items():
            part.grad = None
            part.data = p.detach().view(-1)[span]  # p.data may be other memory by now
            if p.grad is not None and part.numel():
                part.grad = p.grad.reshape(-1)[span]
        self.optim.step()
        self._show_options()
        for part, _ in self._parts.values():
            part.grad = None  # a view of p.grad, which would hold DDP's bucket
        for plan, tensors in self._plans:
            self._share(plan, tensors)

    def _share_gradients(self, *, trains: bool) -> None:
        """Ranks that have no inputs take the gradients of one that trains. Collective."""
        mine = torch.tensor([trains, *(p.grad is not None for p in self._parts)], dtype=torch.uint8)
        rows = torch.empty(self.comm.size, len(mine), dtype=torch.uint8)
        self.comm.all_gather(rows, mine)
        training = rows[:, 0].nonzero().flatten().tolist()
        if len(training) == self.comm.size:
            return
        found = [p for p, there in zip(self._parts, rows[training[0], 1:], strict=True) if there]
        if not trains:
            self.zero_grad()
            for p in found:
                p.grad = torch.empty_like(p)
        replicas.broadcast(self.comm, [p.grad for p in found if p.grad is not None], training[0])

    def join_hook(self, **_: Any) -> JoinHook:
        """For torch's Join, over a torch.distributed group. `_`: what its other joinables take."""
        return Shadow(self._shadow)

    def _shadow(self) -> None:
        self._share_gradients(trains=False)
        self._step()

    def _show_options(self) -> None:
        """For schedulers. An optimizer may also count in them, as schedule-free ones do."""
        for group, inner in zip(self.param_groups, self.optim.param_groups, strict=True):
            group.update(_options(inner))

    def _share(self, plan: Unit, tensors: list[Tensor]) -> None:
        flat, rank = tensors[0].new_zeros(plan.padded), self.comm.rank
        shard = flat[rank * plan.shard : (rank + 1) * plan.shard]
        for e, p in zip(plan.entries, tensors, strict=True):
            shard[slice(*plan.local(e, rank))] = self._parts[p][0].detach()
        self.comm.all_gather(flat, shard)
        for e, p in zip(plan.entries, tensors, strict=True):
            p.detach().view(-1).copy_(flat[e.offset : e.offset + e.elements])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not implemented once it is made: the shards are laid out."""
        if hasattr(self, "optim"):
            raise UsageError(
                "ZeroRedundancyOptimizer.add_param_group is not implemented; make it of all groups"
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Not implemented, see state_dict."""
        self.state_dict()

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Not implemented, see state_dict."""
        self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Not implemented: the state is in shards, which `ringdp.save` can write for stage 1."""
        raise UsageError(
            "ZeroRedundancyOptimizer: state_dict and load_state_dict are not implemented; use "
            "ringdp.shard(stage=1) and ringdp.save, which any number of ranks can load"
        )


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k != "params"}
