"""Bench inputs and the checks of results: each collective compared with numpy, and every wrong
element counted."""

import numpy as np
import pytest
import torch

from ringdp.cli.bench.cases import (
    CASES,
    DTYPES,
    EVERY,
    Task,
    constant,
    elements,
    exchanged,
    pattern,
    wrong_constant,
    wrong_pattern,
)

N, COUNT = 4, 40


def reference(collective: str, inputs: list[np.ndarray], rank: int) -> np.ndarray | None:
    """The result for a sum, in numpy."""
    uneven = np.array([4, 8, 12, 16])  # parts of COUNT
    match collective:
        case "all_gather_v":
            return np.concatenate(inputs)
        case "gather_v":
            return None if rank else np.concatenate(inputs)
    stacked = np.stack(inputs)
    match collective:
        case "reduce_scatter_v":
            return np.split(stacked.sum(0), uneven.cumsum())[rank]
        case "scatter_v":
            return np.split(stacked[0], uneven.cumsum())[rank]
        case "all_to_all_v":
            ends = [np.roll(uneven, q).cumsum() for q in range(N)]
            return np.concatenate([np.split(stacked[q], ends[q])[rank] for q in range(N)])
        case "all_reduce":
            return stacked.sum(0)
        case "reduce_scatter":
            return stacked.sum(0).reshape(N, -1)[rank]
        case "all_gather":
            return stacked.reshape(-1)
        case "broadcast":
            return stacked[0]
        case "reduce":
            return None if rank else stacked.sum(0)
        case "gather":
            return None if rank else stacked.reshape(-1)
        case "scatter":
            return stacked[0].reshape(N, -1)[rank]
        case "all_to_all":
            return stacked.reshape(N, N, -1)[:, rank].reshape(-1)
        case "fold":
            parts = np.split(stacked[rank].copy(), N)
            parts[rank] += np.split(stacked[(rank + 1) % N], N)[rank]
            return np.concatenate(parts)
        case "pull":
            return stacked[(rank + 1) % N]
        case "send":
            return stacked[(rank - 1) % N]
        case "copy":
            return stacked[rank]
    return None


def task(collective: str, dtype: str = "float32", op: str = "sum") -> Task:
    return Task(collective, "auto", False, dtype, op, COUNT)


@pytest.mark.parametrize("rank", [0, 1, N - 1])
@pytest.mark.parametrize("name", EVERY)
def test_wrong_elements_are_counted(name: str, rank: int) -> None:
    case = EVERY[name]
    sizes = [case.takes(COUNT, N, q) for q in range(N)]
    inputs = [pattern(q, size, "float64").numpy() for q, size in enumerate(sizes)]
    right = reference(name, inputs, rank)
    if right is None:
        anything = torch.zeros(sizes[rank])
        assert wrong_pattern(case, anything, task(name), rank, N) == 0
        assert wrong_constant(case, anything, task(name), 5, rank, N) == 0
        return
    output = torch.from_numpy(right).float()
    assert wrong_pattern(case, output, task(name), rank, N) == 0
    output[1] += 1
    assert wrong_pattern(case, output, task(name), rank, N) == 1
    call = 5
    constants = [np.full(size, constant(q, call), np.float64) for q, size in enumerate(sizes)]
    right = reference(name, constants, rank)
    output = torch.from_numpy(right).float()
    assert wrong_constant(case, output, task(name), call, rank, N) == 0
    output[-2:] += 1
    assert wrong_constant(case, output, task(name), call, rank, N) == 2


@pytest.mark.parametrize("op", ["sum", "min", "max"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_expected_results_are_exact_in_every_dtype(dtype: str, op: str) -> None:
    n = 64
    case = CASES["all_reduce"]
    inputs = np.stack([pattern(q, COUNT, "float64").numpy() for q in range(n)])
    right = getattr(inputs, op)(0)
    output = torch.from_numpy(right).to(getattr(torch, dtype))
    assert wrong_pattern(case, output, task("all_reduce", dtype, op), 0, n) == 0


def test_inputs_differ_between_ranks_calls_and_elements() -> None:
    assert not torch.equal(pattern(0, 100, "int32"), pattern(1, 100, "int32"))
    assert len(pattern(0, 100, "int32").unique()) == 2
    for rank in range(N):
        assert {constant(rank, call) for call in range(1 << N)} == {1, 2}
    assert len({tuple(constant(q, call) for q in range(4)) for call in range(16)}) == 16


def test_element_counts_are_multiples_of_the_parts() -> None:
    assert elements(CASES["all_reduce"], "float32", 1024, 3) == 256
    assert elements(CASES["reduce_scatter"], "float32", 1024, 3) == 255
    assert elements(CASES["all_gather"], "bfloat16", 1024, 3) == 510
    assert elements(CASES["all_to_all"], "int8", 1024, 3) == 1023
    assert elements(CASES["all_to_all_v"], "int8", 1024, 3) == 1020  # parts of 1, 2 and 3 units


def test_uneven_parts_of_a_rank_are_1_to_n_units() -> None:
    gather, swap = CASES["all_gather_v"], CASES["all_to_all_v"]
    assert [gather.takes(60, 3, rank) for rank in range(3)] == [10, 20, 30]
    assert gather.gives is not None
    assert gather.gives(60, 3, 1) == swap.takes(60, 3, 1) == 60
    received, sent = zip(*(exchanged(60, 3, rank) for rank in range(3)), strict=True)
    assert sent == ([10, 20, 30], [30, 10, 20], [20, 30, 10])
    assert list(map(list, zip(*sent, strict=True))) == list(received)
    assert gather.bus(3) == swap.bus(3) == 5 / 6
