"""The peer-memory kernels: run as threads, under ThreadSanitizer, on a GPU, and as compiled
code."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from bench.virtual import VirtualRanks
from ringdp.errors import CollectiveMismatch, CollectiveTimeout, CommunicationError
from ringdp.schedule import fifo_depth, fuse, project, schedule
from ringdp.schedule.program import Program
from ringdp.transport.base import DTYPES, OPS, Op
from ringdp.transport.peer import kernels as peer
from ringdp.transport.peer.jobs import greeted, kernel_name
from ringdp.transport.peer.kernels import HostKernels, Kernels
from ringdp.transport.simulator import simulate
from tests.builds import Build, Builds
from tests.limits import address_space_limit
from tests.transport.peer_build import EXACT, SOURCE, WithoutRank, reason_to_skip
from tests.transport.test_sanitizers import OPTIONS, racing, run, write_programs

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip()),
        ],
    ),
]
CASES = [
    ("all_reduce", "ring"),
    ("all_reduce", "two_way_ring"),
    ("all_reduce", "direct"),
    ("all_reduce", "halving"),
    ("reduce_scatter", "ring"),
    ("reduce_scatter", "direct"),
    ("all_gather", "ring"),
    ("all_gather", "direct"),
    ("broadcast", "direct"),
    ("all_to_all", "direct"),
]
SLAB = 256  # bytes; small, so that even small tensors take several slabs per chunk
# bytes of a buffer; generating inputs takes seconds on a CPU, and `make gpu` limits a test's time
FILLING = 5 << 20
# Seconds that a rank waits. On a GPU all blocks run at once, and the wait must end before `make
# gpu` kills the test, so that the error says who waited for whom.
TIMEOUT = {"cpu": 60, "cuda": 5}


@pytest.fixture
def kernels(device: str) -> Kernels:
    return peer.kernels_on(torch.device(device))


def programs(collective: str, algorithm: str, n: int) -> list[Program]:
    rank_programs = schedule(collective, algorithm, n)
    return [fuse(project(rank_programs, rank)) for rank in range(n)]


def inputs(n: int, elems: int, dtype: torch.dtype) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(elems + n)
    if dtype.is_floating_point:
        return [torch.randn(elems, generator=g, dtype=torch.float64).to(dtype) for _ in range(n)]
    high = 2 if dtype == torch.bool else 100
    return [torch.randint(0, high, (elems,), generator=g).to(dtype) for _ in range(n)]


def virtual(n: int, kernels: Kernels, device: str) -> VirtualRanks:
    return VirtualRanks(
        n, channels=2, slab=SLAB, device=device, kernels=kernels, timeout=TIMEOUT[device]
    )


def compare(
    ranks: VirtualRanks,
    rank_programs: list[Program],
    elems: int,
    dtype: torch.dtype,
    op: Op,
    device: str,
) -> None:
    want = inputs(len(rank_programs), elems, dtype)
    got = [x.to(device, copy=True) for x in want]
    simulate(rank_programs, want, op)
    ranks.run(rank_programs, got, op)
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_kernels_equal_the_simulator(kernels: Kernels, device: str, n: int) -> None:
    """Every algorithm and length, one after another over the same windows."""
    ranks = virtual(n, kernels, device)
    for collective, algorithm in CASES:
        if algorithm == "halving" and n == 3:
            continue
        rank_programs = programs(collective, algorithm, n)
        assert fifo_depth(rank_programs) <= 4
        lengths = (0, n, 100 * n) if collective == "all_to_all" else (0, 1, n, 67, 1031)
        for elems in lengths:
            compare(ranks, rank_programs, elems, torch.float32, "sum", device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_op_equals_the_simulator(
    kernels: Kernels, device: str, dtype: torch.dtype
) -> None:
    """16-bit floats are rounded where the simulator rounds them, in a ring and in rank order."""
    ranks = virtual(3, kernels, device)
    ops = [op for op in OPS if not (dtype.is_floating_point and op in ("band", "bor", "bxor"))]
    for algorithm in ("ring", "direct"):
        rank_programs = programs("all_reduce", algorithm, 3)
        for op in ops if dtype != torch.bool else ("sum", "prod"):
            compare(ranks, rank_programs, 701, dtype, op, device)


@pytest.mark.parametrize("device", DEVICES)
def test_unaligned_buffers_are_accepted(kernels: Kernels, device: str) -> None:
    ranks = virtual(2, kernels, device)
    rank_programs = programs("all_reduce", "ring", 2)
    whole = [x.to(device) for x in inputs(2, 1031, torch.bfloat16)]
    want = [x[1:].cpu().clone() for x in whole]
    simulate(rank_programs, want)
    ranks.run(rank_programs, [x[1:] for x in whole])
    assert all(torch.equal(a, b[1:].cpu()) for a, b in zip(want, whole, strict=True))


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("n", [2, 5])
def test_launches_that_fill_the_gpu_equal_the_simulator(
    kernels: Kernels, device: str, n: int
) -> None:
    """With every dtype, so every kernel's register count allows it."""
    ranks = VirtualRanks(n, device=device, kernels=kernels, timeout=TIMEOUT[device])
    for dtype in DTYPES:  # enough data for every channel: see `WORTH`
        elems = FILLING // dtype.itemsize + 1
        compare(ranks, programs("all_reduce", "ring", n), elems, dtype, "sum", device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_dead_rank_is_named_and_all_waits_end(kernels: Kernels, device: str) -> None:
    ranks = VirtualRanks(
        3, channels=2, slab=SLAB, device=device, kernels=WithoutRank(kernels), timeout=0.1
    )
    rank_programs = programs("broadcast", "binomial", 3)
    assert {row.recv_peer for p in rank_programs[1:] for row in p} == {
        0
    }  # every wait is for the dead rank
    with pytest.raises(CollectiveTimeout, match=r"rank [12] waited longer than 0.1 s for rank 0"):
        ranks.run(rank_programs, [x.to(device) for x in inputs(3, 100, torch.float32)])


@pytest.mark.parametrize("device", DEVICES)
def test_different_lengths_are_a_mismatch(kernels: Kernels, device: str) -> None:
    ranks = virtual(2, kernels, device)
    rank_programs = programs("all_reduce", "ring", 2)
    buffers = [torch.ones(size, device=device) for size in (20, 24)]
    with pytest.raises(CollectiveMismatch, match="of another launch or length"):
        ranks.run(rank_programs, buffers)


def test_a_launch_without_enough_threads_raises_communication_error() -> None:
    ranks = VirtualRanks(2, channels=64, slab=128, device="cpu", kernels=HostKernels(), timeout=60)
    buffers = list(torch.ones(2, 64 << 5))
    with (
        address_space_limit(32 << 20),
        pytest.raises(CommunicationError, match="lacks threads, or memory, for 64 channels"),
    ):
        ranks.run(programs("all_reduce", "ring", 2), buffers)
    ranks.run(programs("all_reduce", "ring", 2), buffers)
    assert torch.all(buffers[0] == 2)


BUILDS = {"peer": Build(SOURCE, (EXACT, *OPTIONS, "-fsanitize=thread"), relaxes=True)}


def program_files(at: Path, algorithm: str, n: int) -> list[str]:
    return write_programs(list(map(greeted, programs("all_reduce", algorithm, n))), at)


@pytest.mark.process
def test_thread_sanitizer_finds_no_race_and_every_wait_ends(tmp_path: Path, builds: Builds) -> None:
    program = str(builds[BUILDS["peer"]])
    for algorithm in ("ring", "direct"):
        for n, mode in ((3, "sum"), (2, "sum"), (3, "dead"), (3, "mistaken")):
            done = run([program, mode, *program_files(tmp_path, algorithm, n)])
            assert done.returncode == 0, done.stderr


@pytest.mark.process
def test_thread_sanitizer_finds_a_relaxed_release(tmp_path: Path, builds: Builds) -> None:
    """Shows that the test above would find a race."""
    assert racing(builds[BUILDS["peer"]], "flag", ["sum", *program_files(tmp_path, "ring", 2)])


def cuobjdump(*arguments: str) -> str:
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    done = subprocess.run([tool, *arguments, peer.FATBIN], capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not peer.FATBIN.exists(), reason="built without nvcc")
def test_the_fatbin_has_every_kernel_without_spills() -> None:
    usage = cuobjdump("-res-usage")
    found = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+)\s+SHARED:\d+ LOCAL:(\d+)", usage)
    assert {name for name, *_ in found} == {kernel_name(dtype) for dtype in DTYPES}
    for _, registers, stack, local in found:
        # a multiprocessor's registers
        assert int(registers) * peer.THREADS * peer.TOGETHER <= 65536
        assert (stack, local) == ("0", "0")


@pytest.mark.skipif(not peer.FATBIN.exists(), reason="built without nvcc")
def test_the_fatbin_has_16_byte_accesses_and_flags_at_system_scope() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        functions = cuobjdump("-sass", "-fun", kernel_name(dtype)).split("Function :")[1:]
        assert functions
        for sass in functions:
            names = set(re.findall(r"\b(?:LD|ST)[GL]?\.[A-Z0-9.]*", sass))
            assert {"LD.E.128", "ST.E.128", "LDG.E.64.STRONG.SYS", "STG.E.64.STRONG.SYS"} <= names
            assert not any(name.startswith(("LDL", "STL")) for name in names)
            # For chunks that begin unaligned, a thread still has 8 loads of each input in flight.
            assert dtype != torch.bfloat16 or sass.count(" LD.E.U16 ") >= 2 * 8
