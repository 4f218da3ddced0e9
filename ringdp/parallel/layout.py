"""The memory layout: parameters -> units -> one flat buffer each -> shards.

A unit's parameters follow one another in its flat buffer. Each starts at a multiple of ALIGNMENT
elements, and the buffer is padded to a multiple of n * ALIGNMENT (times the number of replicas,
over which a shard is then reduced in equal parts). Rank r's shard is the r-th of n equal parts. So
gathering needs no copies: a parameter is a view of the gathered buffer, and a rank's slice of it is
a view of the rank's shard. Pure: names and element counts only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# In elements: 16 float32 fill a cache line. CPU and GPU libraries choose kernels by 16-byte
# alignment: a weight that follows a bias of 3 elements would get slower ones, with other bits.
ALIGNMENT = 16


class Entry(NamedTuple):
    """One parameter: its `elements` start at `offset` of the unit's flat buffer."""

    name: str
    offset: int
    elements: int


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered and freed together. `padded`: elements of its flat buffer."""

    name: str
    entries: tuple[Entry, ...]
    ranks: int
    padded: int

    @property
    def shard(self) -> int:
        """Elements of one rank's shard, padding included."""
        return self.padded // self.ranks

    @property
    def elements(self) -> int:
        """Elements without the padding."""
        return sum(e.elements for e in self.entries)

    def local(self, entry: Entry, rank: int) -> tuple[int, int]:
        """(begin, end), in `rank`'s shard, of its slice of `entry`; empty if it has none."""
        first = rank * self.shard
        begin = min(max(entry.offset - first, 0), self.shard)
        end = min(max(entry.offset + entry.elements - first, 0), self.shard)
        return begin, end

    def part(self, entry: Entry, rank: int) -> tuple[int, int]:
        """(begin, end), in `entry`, of `rank`'s slice of it; empty if it has none."""
        first = rank * self.shard - entry.offset
        begin = min(max(first, 0), entry.elements)
        return begin, min(max(first + self.shard, begin), entry.elements)

    def parts(self, entry: Entry) -> dict[int, tuple[int, int]]:
        """`part` of the ranks whose slice of `entry` is not empty, in order."""
        if not entry.elements:
            return {}
        first, last = entry.offset, entry.offset + entry.elements - 1
        ranks = range(first // self.shard, last // self.shard + 1)
        return {rank: self.part(entry, rank) for rank in ranks}

    def owned(self, rank: int) -> list[int]:
        """The sizes of `rank`'s slices, without those that have elements on other ranks only."""
        parts = [(e, *self.local(e, rank)) for e in self.entries]
        return [end - begin for e, begin, end in parts if end > begin or not e.elements]


def layout(
    units: Iterable[tuple[str, Sequence[tuple[str, int]]]], ranks: int, replicas: int = 1
) -> tuple[Unit, ...]:
    """Units from (unit name, [(parameter name, elements), ...]). `ranks`: of one replica."""
    out, multiple = [], ranks * replicas * ALIGNMENT
    for name, parameters in units:
        entries, offset = [], 0
        for parameter, elements in parameters:
            entries.append(Entry(parameter, offset, elements))
            offset = _up(offset + elements, ALIGNMENT)
        out.append(Unit(name, tuple(entries), ranks, _up(offset, multiple)))
    return tuple(out)


def _up(elements: int, multiple: int) -> int:
    return -(-elements // multiple) * multiple
