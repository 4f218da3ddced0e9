"""The cost model: α per message, β per byte moved, γ per byte reduced, and a shared bus.

    time = call + α · messages + S · (β · moved + γ · reduced + bus · crossing)
         + Σ more · max(S · crossing - end, 0)    over the caches (end, more)

for a buffer of S bytes. The four counts are exact fractions, summed over rounds. A round takes as
long as its slowest rank; a rank sends and receives at once (Hockney 1994; Chan et al. 2007). `bus`
is seconds per byte over what all ranks share: the memory of one host. It is zero if links are
separate. Beyond the end of a cache each byte on the bus costs `more`. All chunks that one rank
sends another in a round are one message. `call` is the fixed time of a call: to be issued, picked
up by every rank and waited for. Without it, a fit to algorithms with many messages predicts half
the real time of small calls with a single message, such as `doubling` on two ranks.

Leaves out local copies, the overlap of rounds through streaming, and contention of links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from operator import add
from typing import NamedTuple

import numpy as np

from ringdp.errors import UsageError
from ringdp.schedule.algorithms import ALGORITHMS, Collective, check_collective
from ringdp.schedule.algorithms.ring import local_of
from ringdp.schedule.ir import Round, Schedule


class Price(NamedTuple):
    """What an algorithm uses: a number of messages, and bytes as fractions of the buffer."""

    messages: int
    moved: Fraction
    reduced: Fraction
    crossing: Fraction  # the shared bus, by all ranks together

    def __add__(self, other: Price) -> Price:  # type: ignore[override]
        return Price(*map(add, self, other))

    def times(self, share: Fraction | int) -> Price:
        """Return the price of the same algorithm on `share` of the buffer."""
        return Price(self.messages, *(share * x for x in self[1:]))


class Machine(NamedTuple):
    """Seconds per message, per byte moved, per byte reduced, per byte on the bus, and per call."""

    alpha: float
    beta: float
    gamma: float
    bus: float = 0.0
    call: float = 0.0
    caches: tuple[tuple[float, float], ...] = ()  # (end in bytes, more seconds per byte beyond it)


FREE = Price(0, Fraction(0), Fraction(0), Fraction(0))
LEAST_CACHE = 1 << 20  # bytes on the bus; below, the call itself takes most of the time
LEAST_SHARE = 1e-9  # a term that explains a smaller share of every measured time is rounding noise


def seconds(price: Price, machine: Machine, size: int, *, among: int = 0) -> float:
    """Return the predicted time for a buffer of `size` bytes.

    `among` is the total size of several buffers used in turn, if this is one of them. They evict
    one another from the caches, so a byte costs what it does in one buffer of `among` bytes.
    (448 MiB on 2 cores of an Intel Xeon with 480 MiB of L3: 71 µs/MB in one buffer, 70 in 28
    buffers, 76 in 448; but 35 for a single buffer of 16 MiB.)
    """
    whole = max(size, among, 1)
    each = machine.beta, machine.gamma, machine.bus
    per_byte = sum(float(n) * m for n, m in zip(price[1:], each, strict=True))
    crossing = float(price.crossing) * whole
    per_byte += sum(more * max(crossing - end, 0.0) for end, more in machine.caches) / whole
    return machine.call + price.messages * machine.alpha + size * per_byte


def price(schedule: Schedule) -> Price:
    """Return the price of `schedule`, counted transfer by transfer."""
    return sum((_round(r, schedule.chunks) for r in schedule.rounds), FREE)


def _round(transfers: Round, chunks: int) -> Price:
    leaving = [t for t in transfers if t.src != t.dst]
    pairs = {(t.src, t.dst) for t in leaving}
    return Price(
        max(_most(src for src, _ in pairs), _most(dst for _, dst in pairs)),
        Fraction(max(_most(t.src for t in leaving), _most(t.dst for t in leaving)), chunks),
        Fraction(_most(t.dst for t in transfers if t.reduce), chunks),
        Fraction(len(leaving), chunks),
    )


def _most(ranks: Iterable[int]) -> int:
    """Return the count of the most frequent rank."""
    return max(Counter(ranks).values(), default=0)


# ---- closed forms, for any n


def closed(collective: Collective, algorithm: str, n: int) -> Price:
    """Return the same as `price`, from a formula: fast for n up to 65536 and beyond.

    Raises UsageError if the collective or algorithm is unknown or n < 1.
    """
    check_collective(collective, n)
    form = CLOSED.get((collective, algorithm))
    if form is None:
        names = ", ".join(a for c, a in CLOSED if c == collective)
        raise UsageError(f"no price for {collective} {algorithm!r}; there are {names}")
    return form(n)


def choose(collective: Collective, n: int, size: int, machine: Machine) -> str:
    """Return the algorithm with the least predicted time for a buffer of `size` bytes on n ranks.

    Raises UsageError if the collective is unknown or n < 1.
    """
    check_collective(collective, n)
    names = [a.name for a in ALGORITHMS if a.collective == collective]
    return min(names, key=lambda name: seconds(closed(collective, name, n), machine, size))


def fit(measured: Iterable[tuple[Price, int, float]]) -> Machine:
    """Fit α, β, γ, bus, call and caches to benchmark rows of (price, bytes, seconds).

    Non-negative least squares of the relative error: a term that would come out negative is dropped
    and the others are fitted again. Terms that the rows cannot separate share what they explain:
    moved, reduced and crossing are proportional on two ranks, and so are messages and calls in rows
    of one algorithm and number of ranks.
    """
    rows = list(measured)
    if not rows:
        raise UsageError("fit() needs at least one measured row")
    crossing = [float(p.crossing) * size for p, size, _ in rows]
    ends = _ends(crossing)
    counts = [
        [p.messages, *(float(x) * size for x in p[1:]), 1.0, *(max(on - end, 0.0) for end in ends)]
        for (p, size, _), on in zip(rows, crossing, strict=True)
    ]
    relative = np.array(counts) / np.array([[t] for _, _, t in rows])
    scale = np.abs(relative).max(axis=0)
    scale[scale == 0] = 1.0
    terms = list(range(relative.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(relative[:, terms] / scale[terms], np.ones(len(rows)))
        if not (found < LEAST_SHARE).any():
            break
        terms.pop(int(found.argmin()))
    values = np.zeros(len(scale))
    values[terms] = found / scale[terms]
    each, more = np.split(values, [len(values) - len(ends)])
    caches = tuple((e, m) for e, m in zip(ends, more.tolist(), strict=True) if m)
    return Machine(*each.tolist())._replace(caches=caches)


def _ends(crossing: Sequence[float]) -> list[float]:
    """Return the measured bytes at which a cache may end.

    At least twice as many bytes must be measured beyond each, or noise would set the cost there.
    """
    found, above = list[float](), max(crossing)
    for on in sorted(set(crossing), reverse=True):
        if LEAST_CACHE <= on <= above / 2:
            found.append(on)
            above = on
    return found[::-1]


def _share(n: int) -> Fraction:
    return Fraction(n - 1, n)


def _levels(n: int) -> int:
    return (n - 1).bit_length()


def _splits(n: int) -> Iterator[dict[int, int]]:
    """Yield, for every level on which groups of ranks are split in two, their number by size."""
    halves = Counter({n: 1})
    while groups := {size: count for size, count in halves.items() if size > 1}:
        yield groups
        halves = Counter[int]()
        for size, count in groups.items():
            halves[size // 2] += count
            halves[size - size // 2] += count


def _ring(n: int) -> Price:
    """Each rank sends and receives n - 1 of n chunks."""
    return Price(n - 1, _share(n), Fraction(0), Fraction(n - 1))


def _two_way(n: int) -> Price:
    return _ring(n)._replace(messages=(n - 1) * (1 if n == 2 else 2))


def _halving(n: int) -> Price:
    """Level by level, as groups split in two. `algorithms.halving` says who sends what."""
    total = FREE
    for groups in _splits(n):
        # A larger half has a rank more, which sends to the last rank of the smaller one, too.
        halves = [(size // 2, 1 + size % 2) for size in groups]
        moved = max(smaller * senders for smaller, senders in halves)
        crossing = sum(2 * (size // 2) * (size - size // 2) * c for size, c in groups.items())
        messages = max(senders for _, senders in halves)
        total += Price(messages, Fraction(moved, n), Fraction(0), Fraction(crossing, n))
    return total


def _doubling(n: int) -> Price:
    rounds, extra = n.bit_length() - 1, n - (1 << (n.bit_length() - 1))
    ends = 1 if extra else 0
    sent = rounds + 2 * ends
    return Price(
        sent, Fraction(sent), Fraction(rounds + ends), Fraction((n - extra) * rounds + 2 * extra)
    )


def _tree(n: int) -> Price:
    """A parent receives from two children at each level.

    At the top it has one child; so it has a level below if the second would be beyond rank n - 1.
    """
    if n == 1:
        return FREE
    height = _levels(n)
    up = 1 if height == 1 else 2 * height - 2 + (3 << (height - 2) < n)
    return Price(2 * up, Fraction(up), Fraction(up, 2), Fraction(2 * (n - 1)))


def _hierarchical(n: int) -> Price:
    local = local_of(n)
    nodes = n // local
    within, between = _both(_ring)(local), _both(_ring)(nodes).times(Fraction(1, local))
    return within._replace(crossing=within.crossing * nodes) + between._replace(
        crossing=between.crossing * local
    )


def _binomial(n: int) -> Price:
    return Price(_levels(n), Fraction(_levels(n)), Fraction(0), Fraction(n - 1))


def _binomial_shards(n: int) -> Price:
    crossing = sum(size // 2 * count for groups in _splits(n) for size, count in groups.items())
    return Price(_levels(n), _share(n), Fraction(0), Fraction(crossing, n))


def _chain(n: int) -> Price:
    return Price(2 * n - 2, 2 * _share(n), Fraction(0), Fraction(n - 1))


def _star(n: int) -> Price:
    """Every rank but the root sends it a chunk, or receives one from it."""
    return Price(n - 1, _share(n), Fraction(0), _share(n))


Form = Callable[[int], Price]


def _adding(form: Form) -> Form:
    """Return the form of an algorithm that also adds whatever it receives."""

    def added(n: int) -> Price:
        copied = form(n)
        return copied._replace(reduced=copied.moved)

    return added


def _both(form: Form) -> Form:
    """Return the form of an all_reduce: a reduce_scatter, then the all_gather of this form."""
    return lambda n: _adding(form)(n) + form(n)


_FAMILIES = {"ring": _ring, "two_way_ring": _two_way, "direct": _ring, "halving": _halving}

CLOSED: dict[tuple[str, str], Form] = {
    **{("all_reduce", name): _both(form) for name, form in _FAMILIES.items()},
    **{("reduce_scatter", name): _adding(form) for name, form in _FAMILIES.items()},
    **{("all_gather", name): form for name, form in _FAMILIES.items()},
    ("all_reduce", "doubling"): _doubling,
    ("all_reduce", "tree"): _tree,
    ("all_reduce", "hierarchical"): _hierarchical,
    ("broadcast", "ring"): _chain,
    ("broadcast", "direct"): _chain,
    ("broadcast", "binomial"): _binomial,
    ("reduce", "direct"): _adding(lambda n: _star(n).times(n)),  # of whole buffers
    ("reduce", "binomial"): _adding(_binomial),
    ("scatter", "direct"): _star,
    ("scatter", "binomial"): _binomial_shards,
    ("gather", "direct"): _star,
    ("gather", "binomial"): _binomial_shards,
    ("all_to_all", "direct"): _ring,
    ("all_to_all", "pairwise"): _ring,
    ("all_to_all_v", "direct"): lambda n: _ring(n).times(Fraction(1, n)),
}
