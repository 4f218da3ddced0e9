"""How ringdp and torch over gloo are called for every collective: real ranks get right results."""

import torch.distributed as dist

from ringdp.cli.bench.cases import CASES, Task
from ringdp.cli.bench.contenders import Contender, Ours, Round, Torchs
from ringdp.cli.bench.peers import EVEN_ONLY
from ringdp.cli.bench.worker import buffers_of, run
from ringdp.comm import Communicator
from tests.parallel.ddp.cases import gloo
from tests.ranks import on_ranks


@on_ranks(3)
def test_every_call_gives_the_right_result(comm: Communicator) -> None:
    gloo()
    ours, torchs = object.__new__(Ours), object.__new__(Torchs)
    ours._comm = comm
    ours.barrier, torchs.barrier = comm.barrier, dist.barrier

    def measure(contender: Contender, name: str) -> None:
        contender.rank, contender.ranks = comm.rank, comm.size
        task = Task(name, "auto", False, "int32", "sum", count=60)
        times = run(contender, Round(task, number=0, calls=2), buffers_of(contender, task))
        assert (len(times.nanoseconds), times.wrong) == (2, 0), name

    for name in CASES:
        measure(ours, name)
        if name not in EVEN_ONLY["gloo"]:
            measure(torchs, name)
