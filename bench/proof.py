"""How long the proof of a ring all_reduce takes.

    python -m bench.proof

The aim: under 0.5 s for 64 ranks and under 5 s for 256.
"""

from __future__ import annotations

import time

from ringdp.schedule import schedule, verify

ROUNDS = 3


def main() -> None:
    for n in (8, 64, 256):
        plan = schedule("all_reduce", "ring", n)
        times = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            verify(plan, "all_reduce")
            times.append(time.perf_counter() - start)
        low, middle, high = sorted(times)
        print(f"{n:>4} ranks: min {low:.3f}  median {middle:.3f}  max {high:.3f} s")


if __name__ == "__main__":
    main()
