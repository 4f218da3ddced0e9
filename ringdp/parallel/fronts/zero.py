"""`ZeroRedundancyOptimizer`: whole replicas, as DDP keeps them, with sharded optimizer state.

Each rank's inner optimizer steps this rank's slices; then the new values are gathered.
In torch's `Join([ddp, optimizer])` a rank without inputs steps its slices too, with the gradients
of a rank that has some, and with its own options, such as lr.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import JoinHook
from torch.utils._pytree import tree_map_only

from ringdp.comm import Communicator, communicator_of
from ringdp.errors import ModelError, UsageError
from ringdp.parallel import replicas
from ringdp.parallel.cut import Cut
from ringdp.parallel.join import JoinableOverGroup, Shadow
from ringdp.parallel.layout import Unit, layout
from ringdp.parallel.optimizer import state as optim_state
from ringdp.parallel.optimizer.kinds import check_slices, needs_whole
from ringdp.parallel.optimizer.whole import WholeStep
from ringdp.parallel.refuse import refuse


class DtypeSlices:
    """This rank's slices, `parameters`, of all parameters of one dtype, `wholes`."""

    def __init__(self, index: int, rank: int, plan: Unit, wholes: Sequence[Tensor]) -> None:
        self.index, self.plan, self.wholes = index, plan, wholes
        self.cut = Cut(plan, [p.shape for p in wholes], rank, slices=True)
        # whole until `take`, as an optimizer that is made of them looks at their shapes
        self.parameters: Sequence[nn.Parameter] = [
            nn.Parameter(p.detach(), p.requires_grad) for p in wholes
        ]

    def take(self) -> None:
        """Slice the parameters' memory as it is now, since the user may have assigned to p.data, or
        a copy of what is not contiguous."""
        for p, own, part in zip(self.wholes, self.parameters, self.cut.parts, strict=True):
            own.grad = None
            own.data = p.detach().reshape(-1)[slice(*part)]


class ZeroRedundancyOptimizer(torch.optim.Optimizer, JoinableOverGroup):
    """torch's arguments. `optimizer_class`: any but one that looks at all parameters at once, as
    LBFGS; `defaults`: its arguments.
    `process_group`: a communicator or a torch.distributed group, by default as for `shard`.

    Parameters stay whole, and a rank keeps the state of its 1/n of their elements. Gradients must
    be dense and equal on all ranks, as they are after DDP's backward. Collective. Raises UsageError
    for what is not implemented, and ModelError for a `state_dict` that was not consolidated.
    """

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
        JoinableOverGroup.__init__(self)
        self._group = process_group  # as given
        self.comm = communicator_of(process_group, self._wholes())
        self._consolidated: dict[Any, Any] | None = None
        by_dtype: dict[str, list[Tensor]] = {}
        for p in self._wholes():
            _check_dense("a parameter", p)
            by_dtype.setdefault(str(p.dtype), []).append(p)
        sizes = {k: [(str(i), p.numel()) for i, p in enumerate(ps)] for k, ps in by_dtype.items()}
        plans = zip(layout(sizes.items(), self.comm.size), by_dtype.values(), strict=True)
        self._units = [DtypeSlices(i, self.comm.rank, *plan) for i, plan in enumerate(plans)]
        sliced = {p: s for u in self._units for p, s in zip(u.wholes, u.parameters, strict=True)}
        groups = [
            group | {"params": [sliced[p] for p in group["params"]]} for group in self.param_groups
        ]
        self.optim = optimizer_class(groups, **defaults)
        check_slices(self.optim, "in ZeroRedundancyOptimizer", "or it without this one")
        for unit in self._units:
            unit.take()
        optim_state.keep_slices(
            self.optim, self._units, self.comm.rank
        )  # as Adagrad has a state from the first
        self.defaults = self.optim.defaults
        _copy_options(self.optim.param_groups, self.param_groups)

    def __getstate__(self) -> NoReturn:
        optim_state.refuse_copy()

    def _wholes(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's slices with the groups' current options, then gather. Collective."""
        loss = None if closure is None else torch.enable_grad(closure)()
        for p in self._wholes():
            if p.grad is not None:
                _check_dense("the gradient of a parameter", p.grad)
        self._notify()
        if self._join_config.enable:
            self._share_gradients(trains=True)
        self._step()
        return loss

    @torch.no_grad()
    def _step(self) -> None:
        _copy_options(self.param_groups, self.optim.param_groups)
        for unit in self._units:
            unit.take()
            for p, own, part in zip(unit.wholes, unit.parameters, unit.cut.parts, strict=True):
                if p.grad is not None and (own.numel() or not p.numel()):
                    own.grad = p.grad.reshape(-1)[slice(*part)]
        whole = needs_whole(self.optim) and WholeStep(self.comm, self._units, self.optim)
        try:
            self.optim.step()
        except BaseException:
            if whole:
                whole.undo(again=True)
            raise
        if whole:
            whole.end()
        # For schedulers, and since an optimizer may count in them, as schedule-free ones do.
        _copy_options(self.optim.param_groups, self.param_groups)
        for unit in self._units:
            for own in unit.parameters:
                own.grad = None  # a view of p.grad, which would hold DDP's bucket
            self._share(unit)

    def _share_gradients(self, *, trains: bool) -> None:
        """Ranks without inputs take the gradients of a rank that trains. Collective."""
        wholes = self._wholes()
        mine = torch.tensor(
            [trains, *(p.grad is not None for p in wholes)], dtype=torch.uint8, device="cpu"
        )
        rows = torch.empty(self.comm.size, len(mine), dtype=torch.uint8, device="cpu")
        self.comm.all_gather(rows, mine)
        training = rows[:, 0].nonzero().flatten().tolist()
        if len(training) == self.comm.size:
            return
        found = [p for p, there in zip(wholes, rows[training[0], 1:], strict=True) if there]
        if not trains:
            self.zero_grad()
            for p in found:
                p.grad = torch.empty_like(p)
        replicas.broadcast(self.comm, [p.grad for p in found if p.grad is not None], training[0])

    def join_hook(self, **_: Any) -> JoinHook:
        """For torch's Join, over a torch.distributed group. `_`: arguments of other joinables."""
        return Shadow(self._shadow)

    def _shadow(self) -> None:
        self._share_gradients(trains=False)
        self._step()

    def _share(self, unit: DtypeSlices) -> None:
        flat = unit.wholes[0].new_zeros(unit.plan.padded)
        shard = flat[unit.cut.part]
        for (begin, end), part in zip(unit.cut.spans, unit.parameters, strict=True):
            shard[begin:end] = part.detach()
        self.comm.all_gather(flat, shard)
        for p, values in zip(unit.wholes, unit.cut.whole(flat), strict=True):
            p.detach().copy_(values)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only during construction: afterwards the shards are laid out."""
        if hasattr(self, "optim"):
            raise UsageError(
                "ZeroRedundancyOptimizer.add_param_group is not implemented; make it of all groups"
            )
        super().add_param_group(param_group)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the state for state_dict() on rank `to`, in host memory. Collective."""
        _copy_options(self.param_groups, self.optim.param_groups)
        state = self.optim.state_dict()["state"]
        whole = optim_state.gathered(self.comm, self._units, self.optim, state, to)
        here = self.comm.rank == to
        self._consolidated = tree_map_only(Tensor, Tensor.cpu, whole) if here else None

    def state_dict(self) -> dict[str, Any]:
        """The state of whole parameters at the last consolidate_state_dict(), and the groups'
        current options: any optimizer of that class loads it."""
        if self._consolidated is None:
            raise ModelError(
                "ZeroRedundancyOptimizer: the state has not been consolidated on this rank, where "
                f"only its slices are: call consolidate_state_dict(to={self.comm.rank}) on all "
                "ranks first"
            )
        return super().state_dict() | {"state": self._consolidated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state of whole parameters, the same on every rank; each keeps its slices. Calls the
        hooks that were registered for it, as torch's does."""
        state_dict = state_dict.copy()  # the hooks may take from it
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            if (changed := before(self, state_dict)) is not None:
                state_dict = changed
        self.optim.load_state_dict(state_dict)
        optim_state.keep_slices(self.optim, self._units, self.comm.rank)
        _copy_options(self.optim.param_groups, self.param_groups)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


def _check_dense(what: str, t: Tensor) -> None:
    if t.layout != torch.strided:
        raise UsageError(
            f"ZeroRedundancyOptimizer: {what} of shape {list(t.shape)} is {t.layout}; allowed: "
            "dense ones, as of Embedding(sparse=False)"
        )


def _copy_options(groups: list[dict[str, Any]], to: list[dict[str, Any]]) -> None:
    for group, other in zip(groups, to, strict=True):
        other.update({name: value for name, value in group.items() if name != "params"})
