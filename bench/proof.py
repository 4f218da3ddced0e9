"""Times the proof of a ring all_reduce.

    python -m bench.proof

The goal is under 0.5 s for 64 ranks and under 5 s for 256.
"""

from __future__ import annotations

from functools import partial

from ringdp.cli.bench.kernels import by_the_clock
from ringdp.schedule import schedule, verify

ROUNDS = 3


def main() -> None:
    for n in (8, 64, 256):
        plan = schedule("all_reduce", "ring", n)
        proof = partial(verify, plan, "all_reduce")
        low, middle, high = sorted(by_the_clock(proof, 1) for _ in range(ROUNDS))
        print(f"{n:>4} ranks: min {low:.3f}  median {middle:.3f}  max {high:.3f} s")


if __name__ == "__main__":
    main()
