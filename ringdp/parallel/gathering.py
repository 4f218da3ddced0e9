"""Gathers units when they are used or just ahead, and frees them after.

Note [nodes run in reverse]
    Autograd runs ready nodes in the reverse order of their creation. So when the backward of a unit
    starts, the backward of every later call is over, whether or not it had gradients to make, and
    those units' weights (frozen ones too) can be freed. Only enclosing units still have nodes to
    run. A unit that was also called earlier is gathered again by the hook of that call. Where
    nested units return the same tensor, the inner one's hook runs first, so it is kept too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ringdp.comm import Communicator
from ringdp.parallel.guards.computed import refuse_lost
from ringdp.parallel.prefetch import Groups, ahead, forecast, one_unit, position_of
from ringdp.parallel.reducing import Reducing
from ringdp.parallel.state import State
from ringdp.parallel.unit import FlatUnit


class Gathering:
    """Gathers and frees the units of one model.

    `limit`: bytes of units that may be gathered and not yet used. `reducing`: its buckets count
    as such bytes; None if they do not. See Note [gathers yield to reductions]. `kept`: the units
    that are not freed after their forward; so are the root's.
    """

    def __init__(
        self,
        units: Sequence[FlatUnit],
        groups: Groups,
        comm: Communicator,
        prefetch_bytes: int | None,
        reducing: Reducing | None,
        kept: Iterable[int] = (),
    ) -> None:
        self.units, self.groups, self.comm, self.reducing = units, groups, comm, reducing
        self.kept = {*groups[0], *kept}
        self._deferred = False  # whether gathers wait for a reduction
        self._frees = any(u.freed for u in units)
        self._sizes = [u.bytes if u.freed else 0 for u in units]
        self.limit = one_unit(self._sizes, groups) if prefetch_bytes is None else prefetch_bytes
        self.callers: list[set[int]] = [set() for _ in units]  # whose forwards call each unit
        self.in_use: list[int] = []  # units in forward or backward, innermost last
        self.forwards: list[int] = []  # of these, units in a forward or a recomputation
        self._amid = 0  # how many forwards run this backward
        self.again = False  # whether another backward will need this one's weights
        self._order, self._seen = forecast(groups), list[int]()
        self._position: int | None = -1  # in `_order`; None: not predicted
        self._ahead: set[int] = set()  # gathered before their use
        self.over = True  # the next forward starts an iteration: all are sharded
        self._trains = False  # whether the iteration's forward may have a backward

    @property
    def summoned(self) -> bool:
        """Whether units are SUMMONED: all are, or none."""
        return self.units[0].state is State.SUMMONED

    def begin(self, *, foreseen: bool, trains: bool) -> None:
        """A new iteration starts, which `trains` if a backward may follow: reshard what a forward
        without a backward has gathered ahead, as the slices may have changed since. If it is not
        `foreseen` (a call of a unit by itself), nothing is gathered ahead."""
        self.reshard([self.units[index] for index in self._ahead])
        self._forget()
        self.in_use.clear()
        self.forwards.clear()
        self._seen.clear()
        self._position, self.over, self._trains = -1 if foreseen else None, False, trains

    def use(self, index: int) -> None:
        """Unshard the unit, after starting the gathers of the next ones."""
        unit = self.units[index]
        at = self._position
        found = None if at is None else position_of(index, self._order, at)
        # The root's backward comes late if it returns an inner unit's tensor; others stay in order.
        if found is not None or index not in self.groups[0]:
            self._position = found
        self._seen.append(index)
        self.in_use.append(index)
        self.start(unit)
        self.prefetch()
        if unit.state is State.GATHERING:
            unit.unshard()

    def start(self, unit: FlatUnit) -> None:
        """Start to gather a unit that is to be used now, if need be; again if it was written to."""
        if unit.state is State.GATHERING and unit.is_stale():
            unit.drop()
        if unit.state is State.SHARDED:
            unit.gather(self.comm)
        self._ahead.discard(unit.index)

    def done_with(self, index: int, *, free: bool, again: bool = False) -> None:
        """The unit's forward or backward is over: `free` it if its stage does that. `again`: its
        backward comes, if the iteration has one.

        A unit that would be gathered again at once stays: the last one of a forward.
        """
        self.leave([index])
        unit = self.units[index]
        amid = index in self.in_use  # another call of it, as where a module calls itself
        if amid or not (free and unit.freed and unit.state is State.UNSHARDED):
            return
        lost = unit.lost()
        if not lost and index in self._wanted(self._under_way(), or_freed=index):
            unit.set_aside()
            self._ahead.add(index)
        else:
            unit.reshard(again=again and self._trains and not lost)
        refuse_lost(lost)
        self.prefetch()

    def leave(self, indices: Sequence[int]) -> None:
        """Their forward or backward does not run any more, or one of several."""
        for index in indices:
            for running in (self.in_use, self.forwards):
                if index in running:
                    running.remove(index)

    def free(self, indices: Sequence[int]) -> None:
        """Free these units if no call of theirs runs, but not those to be kept."""
        ended = [self.units[i] for i in indices if i not in self.kept and i not in self.in_use]
        self.reshard([u for u in ended if u.freed and u.state is State.UNSHARDED])

    def are_nested(self, a: int, b: int) -> bool:
        """Whether they are the same unit, or one is called in the other's forward."""
        return a == b or a in self.callers[b] or b in self.callers[a]

    def free_before(self, index: int) -> None:
        """A unit's backward or recomputation starts: free those whose backward is over. See Note
        [nodes run in reverse]."""
        for other in [unit for unit in self.in_use if unit not in self.forwards]:
            if not self.are_nested(index, other):
                self.done_with(other, free=True)

    def begin_backward(self, *, amid: bool, again: bool) -> None:
        """A backward begins: `amid` forwards, which go on after it, or with another to come `again`
        that needs the weights in its graph."""
        self._amid, self.again = len(self.forwards) if amid else 0, again

    def end_backward(self, *, learn: bool) -> None:
        """The backward is over: free what it used, and everything if no forward goes on."""
        del self.forwards[self._amid :]
        self.in_use = [*self.forwards]
        if self.in_use:
            used = [u for u in self.units if u.freed and u.state is State.UNSHARDED]
            self.reshard([u for u in used if u.index not in self.in_use])
        elif not self.again:
            self.end(learn=learn)

    def let_write(self) -> None:
        """Wait until no gather reads masters on the host any more."""
        for unit in self.units:
            if unit.reader is not None:
                unit.reader.synchronize()
                unit.reader = None

    def summon_all(self) -> None:
        """Summon every unit, or none if there is no memory for one. Collective."""
        self.reshard(self.units)
        self._forget()
        self.let_write()
        for unit in self.units:
            unit.settle()
        try:
            for unit in self.units:
                unit.summon(self.comm)
        except BaseException:
            self.dismiss_all(write=False)
            raise

    def dismiss_all(self, *, write: bool) -> None:
        """Dismiss every summoned unit. Raises UsageError, and writes nothing, if a parameter has
        another shape or dtype."""
        fit = False
        try:
            for unit in self.units if write else ():
                unit.check(unit.cut.whole(unit.summoned))
            fit = True
        finally:
            for unit in self.units:
                if unit.state is State.SUMMONED:
                    unit.dismiss(write=write and fit)

    def reshard(self, units: Sequence[FlatUnit]) -> None:
        """Reshard these units; of them nothing stays in flight. Raises UsageError for parameters
        that were written to."""
        lost: list[str] = []
        for unit in units:
            self._ahead.discard(unit.index)
            if unit.state is State.GATHERING:
                unit.drop()
            if unit.state is State.UNSHARDED and not unit.static:
                lost += unit.lost()
                unit.reshard()
        refuse_lost(lost)

    def end(self, *, learn: bool) -> None:
        """The iteration is over: reshard every unit. `learn`: predict the next one by its order."""
        if learn:
            self._order = tuple(self._seen)
        self.over, self.again = True, False
        self.in_use.clear()
        self.forwards.clear()
        self._deferred = False
        self.reshard(self.units)
        self._forget()

    def _forget(self) -> None:
        for unit in self.units:
            unit.piece.forget()

    def prefetch(self) -> None:
        """Start to gather the next units."""
        if len(self._seen) > 1 and not self._frees:
            return  # all were gathered at the first use
        under_way = self._under_way()
        for index in self._wanted(under_way):
            self.units[index].gather(self.comm)
            self._ahead.add(index)
        self._deferred = under_way > 0 and bool(self._wanted(0))

    def prefetch_deferred(self, *, wait: bool) -> None:
        """Start gathers that were deferred for a reduction, if it is complete, or `wait` for it."""
        if self._deferred and self.reducing and (wait or self.reducing.through()):
            self.reducing.finish()
            self.prefetch()

    def _under_way(self) -> int:
        return self.reducing.under_way() if self.reducing else 0

    def _wanted(self, under_way: int, or_freed: int | None = None) -> list[int]:
        """The units to gather now, as if `or_freed` were freed."""
        if self._position is None:
            return []
        freed = [i for i in self.in_use if i not in self.groups[0]]
        return ahead(
            self._order,
            self._position,
            in_use=freed[-1] if freed else None,
            is_sharded=lambda i: i == or_freed or self.units[i].state is State.SHARDED,
            in_flight=sum(self._sizes[i] for i in self._ahead) + under_way,
            sizes=self._sizes,
            limit=self.limit,
        )
