"""Communication hooks, including torch's own, unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel.distributed import _BufferCommHookLocation

from ringdp import Communicator, DistributedDataParallel
from tests.equal import equal
from tests.parallel.ddp.cases import WIDTH, Wrap, backward, error_text, mlp, ours_and_torchs
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


def triple(state: list[int], bucket: Any) -> torch.futures.Future[Tensor]:
    assert bucket.is_last() == (bucket.index() == 1)
    assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
    assert sum(g.nbytes for g in bucket.gradients()) == bucket.buffer().nbytes
    state.append(bucket.index())
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    with torch.enable_grad():  # the result has a history, which must not become the bucket's
        future.set_result(bucket.buffer() * torch.tensor(3.0, requires_grad=True))
    return future


@on_ranks(2)
def test_a_hook_gets_undivided_gradients_and_returns_the_result(comm: Communicator) -> None:
    seen: list[int] = []
    net = DistributedDataParallel(mlp(), process_group=comm, bucket_cap_mb=0.005)
    assert len(net.reducer.buckets) == 2
    single = copy.deepcopy(net.module)
    net.register_comm_hook(seen, triple)
    mine, alone = backward(net, 0, comm.rank), backward(single, 0, comm.rank)
    assert seen == [0, 1]
    assert equal(mine, [3 * g for g in alone])
    assert not any(bucket.tensor().requires_grad for bucket in net.reducer.buckets)
    error_text(lambda: net.register_comm_hook(seen, triple))


def state_and_hook(name: str) -> tuple[Any, Callable[..., Any]]:
    if name == "powerSGD":
        state = powerSGD_hook.PowerSGDState(
            None, 2, start_powerSGD_iter=2, min_compression_rate=0.1
        )
        return state, powerSGD_hook.powerSGD_hook
    if name == "fp16 powerSGD":
        state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
        return state, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    return None, getattr(default_hooks, name)


HOOKS = ["allreduce_hook", "fp16_compress_hook", "bf16_compress_hook", "powerSGD", "fp16 powerSGD"]


@pytest.mark.parametrize("name", HOOKS)
@on_ranks(2)
def test_torchs_hooks_give_torchs_bits(comm: Communicator, name: str) -> None:
    """PowerSGD starts collectives in gloo's threads, where those of several buckets would mix."""

    def found(wrap: Wrap) -> list[Tensor]:
        net = wrap(mlp(), bucket_cap_mb=1 if "SGD" in name else 0.005)
        net._check_comm_hook = lambda hook: None  # torch's check for bf16 wants a GPU
        net.register_comm_hook(*state_and_hook(name))
        return [g for step in range(5) for g in backward(net, step, comm.rank)]

    assert equal(*ours_and_torchs(found))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(WIDTH, 3, dtype=torch.complex64))
        self.b = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(self.a.dtype) @ self.a * self.b).abs()


@on_ranks(2)
def test_complex_gradients_are_pairs_of_numbers(comm: Communicator) -> None:
    """So that hooks that cast keep both."""
    kind = dist.BuiltinCommHookType.FP16_COMPRESS
    for register in (
        lambda net: net.register_comm_hook(None, default_hooks.fp16_compress_hook),
        lambda net: net._register_builtin_comm_hook(kind),
    ):

        def found(wrap: Wrap, register: Callable[[Any], None] = register) -> list[Tensor]:
            register(net := wrap(Complex()))
            return [g for step in range(3) for g in backward(net, step, comm.rank)]

        ours, theirs = ours_and_torchs(found)
        assert all(g.imag.any() for g in ours)
        assert equal(ours, theirs)
    net = DistributedDataParallel(Complex(), process_group=comm, bucket_cap_mb=1e-6)
    net.register_comm_hook([], triple)
    single = copy.deepcopy(net.module)
    alone = backward(single, 0, comm.rank)
    assert equal(backward(net, 0, comm.rank), [3 * g for g in alone])


@on_ranks(1)
def test_a_hook_must_return_a_future(comm: Communicator) -> None:
    for hook in (lambda _s, _b: 3, lambda _s, b: torch.futures.Future().set_result(b.buffer())):
        net = DistributedDataParallel(mlp(), process_group=comm)
        net.register_comm_hook(None, hook)
        text = error_text(lambda n=net: backward(n, 0, comm.rank))
        assert "must return a torch.futures.Future" in text


def two(_state: object, bucket: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result([bucket.buffer()] * 2)
    return future


@on_ranks(1)
def test_a_hook_must_return_one_tensor(comm: Communicator) -> None:
    net = DistributedDataParallel(mlp(), process_group=comm)
    net.register_comm_hook(None, two)
    text = error_text(lambda: backward(net, 0, comm.rank))
    assert text.startswith("the communication hook two must give one tensor, not [tensor(")


def record_and_triple(seen: list[Any], bucket: Any) -> torch.futures.Future[Tensor]:
    seen += [bucket.gradients(), bucket.parameters()]
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer() * 3)
    return future


@on_ranks(2)
def test_a_hook_gets_sparse_gradients(comm: Communicator) -> None:
    seen: list[Any] = []
    net = DistributedDataParallel(nn.Embedding(4, 2, sparse=True), process_group=comm)
    net.register_comm_hook(seen, record_and_triple)
    net(torch.tensor([1, 1, 3])).sum().backward()
    ((gradient,), (parameter,)) = seen
    assert parameter is net.module.weight
    assert gradient.is_sparse
    assert gradient.shape == parameter.shape
    assert equal([parameter.grad.to_dense()], [3 * gradient.to_dense()])


class CountsForwards(nn.Module):
    """Adds to a buffer in every forward, and records its value on entry."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 3)
        self.register_buffer("count", torch.zeros(2))
        self.entered: list[list[float]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.entered.append(self.count.tolist())
        self.count += 1 + dist.get_rank()
        return self.layer(x)


def sum_buffers(state: list[str], buffers: dict[str, Tensor]) -> list[torch.futures.Future[Any]]:
    state.extend(buffers)
    return [dist.all_reduce(b, async_op=True).get_future() for b in buffers.values()]


def sum_buffers_and_wait(state: list[str], buffers: dict[str, Tensor]) -> None:
    """The forward needs the results."""
    for future in sum_buffers(state, buffers):
        future.wait()


@pytest.mark.parametrize("place", list(_BufferCommHookLocation))
@on_ranks(2)
def test_buffer_hooks_work_as_torchs(comm: Communicator, place: _BufferCommHookLocation) -> None:
    before = place == _BufferCommHookLocation.PRE_FORWARD

    def found(wrap: Wrap) -> tuple[list[str], Any, Any]:
        seen: list[str] = []
        net = wrap(CountsForwards())
        net._register_buffer_comm_hook(seen, sum_buffers_and_wait if before else sum_buffers, place)
        for step in range(3):
            backward(net, step, comm.rank)
        return seen, net.module.entered, net.module.count.tolist()

    ours, theirs = ours_and_torchs(found)
    assert ours == theirs
    assert ours[0] == ["count"] * 3
