"""float32 all_reduce in place on one host: ringdp's algorithms beside gloo.

    torchrun --nproc-per-node 2 -m bench.all_reduce --json bench/results/all_reduce.json

Ranks are pinned to a core each. Rounds of everything compared are interleaved, so that a slow phase
of the machine hits all of them; buffers are rewritten before every call. The time of a call is the
slowest rank's.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import ringdp
from bench.rows import Row, fitted, predicted_us, write

SIZES = [1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]  # bytes
ROUNDS, CALLS = 10, 8
AllReduce = Callable[[Tensor], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--algorithms",
        default="direct,ring",
        help="names, or FILE.py:function for your own, separated by commas",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    comm = ringdp.init()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[comm.rank % os.cpu_count()]})
    dist.init_process_group("gloo")
    compared: dict[tuple[str, str], AllReduce] = {
        **{
            (name, "shm"): partial(comm.all_reduce, algorithm=name)
            for name in arguments.algorithms.split(",")
        },
        ("gloo", "gloo"): dist.all_reduce,
    }
    rows = [row for size in SIZES for row in measure(comm, compared, size)]
    if comm.rank == 0:
        machine = fitted(rows)
        print("bytes       algorithm      min µs  median µs  predicted  busbw GB/s  #wrong")
        for r in rows:
            predicted = predicted_us(r, machine)
            said = "-" if predicted is None else f"{predicted:.1f}"
            print(
                f"{r.bytes:<11,} {r.algorithm:<12} {r.min_us:>8.1f} {r.p50_us:>10.1f} {said:>10} "
                f"{r.busbw:>11.3f} {r.wrong:>7}"
            )
        print(
            "predicted from the fit "
            + ", ".join(f"{k} {v:.3g}" for k, v in machine._asdict().items())
        )
        if arguments.json:
            write(arguments.json, rows)
    dist.destroy_process_group()
    comm.close()


def measure(
    comm: ringdp.Communicator, compared: dict[tuple[str, str], AllReduce], size: int
) -> list[Row]:
    buffer = torch.empty(size // 4)
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    wrong: dict[tuple[str, str], int] = defaultdict(int)
    for round_ in range(ROUNDS + 1):
        for name, all_reduce in compared.items():
            for _ in range(CALLS):
                buffer.fill_(comm.rank + 1)
                comm.barrier()
                start = time.perf_counter()
                all_reduce(buffer)
                if round_:  # the first one warms up
                    times[name].append(time.perf_counter() - start)
            wrong[name] += int((buffer != comm.size * (comm.size + 1) // 2).sum())
    rows = []
    for name, mine in times.items():
        slowest = torch.tensor(mine, dtype=torch.float64)
        comm.all_reduce(slowest, op="max")
        what = ("all_reduce", *name)
        rows.append(Row.measured(what, comm.size, size, "float32", slowest.tolist(), wrong[name]))
    return rows


if __name__ == "__main__":
    main()
