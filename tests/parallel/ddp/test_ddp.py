"""DistributedDataParallel: buckets, memory and traffic, copies, and whole training loops."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ringdp import Communicator, DistributedDataParallel
from ringdp.parallel.ddp.bucketing import Gradient, assign
from tests.equal import equal
from tests.parallel.ddp.cases import (
    TORCHS,
    WIDTH,
    Branches,
    Transformer,
    Wrap,
    backward,
    gloo,
    gradients,
    loss,
    mlp,
    ours_and_torchs,
    rows,
)
from tests.parallel.small import REFERENCES
from tests.ranks import on_ranks

pytestmark = pytest.mark.process


# ---- buckets

SIZES = st.lists(st.tuples(st.integers(1, 900), st.sampled_from("fd")), min_size=1, max_size=30)


@given(SIZES, st.integers(1, 2000), st.integers(1, 2000))
def test_buckets_equal_torchs(sizes, first, cap):
    """torch assigns in parameter order; it sorts as we do if there is only one dtype."""
    sizes = [(n, "f") for n, _ in sizes]
    tensors = [torch.empty(n, dtype=torch.uint8) for n, _ in sizes]
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, [first, cap], [], [])
    facts = [Gradient(n, kind) for n, kind in sizes]
    assert assign(facts, range(len(facts)), [first, cap]) == theirs


@given(SIZES, st.integers(1, 2000), st.integers(1, 2000), st.data())
def test_buckets_hold_each_gradient_once_in_order_with_one_dtype(sizes, first, cap, data):
    facts = [Gradient(n, kind, sparse=n % 7 == 0) for n, kind in sizes]
    bucket_order = data.draw(st.permutations(range(len(facts))))
    buckets = assign(facts, bucket_order, [first, cap])
    assert sorted(i for b in buckets for i in b) == sorted(bucket_order)
    for bucket in buckets:
        assert len({facts[i].kind for i in bucket}) == 1
        assert bucket == sorted(bucket, key=bucket_order.index)
        assert len(bucket) == 1 or not any(facts[i].sparse for i in bucket)
        limit = max(first, cap)
        assert sum(facts[i].bytes for i in bucket[:-1]) < limit
    ends = [bucket_order.index(b[-1]) for b in buckets]
    assert ends == sorted(ends)


class ReversedLayers(nn.Module):
    """Uses its layers in the reverse of their order of registration."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x[:, :3]


@on_ranks(2)
def test_buckets_are_rebuilt_once_and_reduced_as_soon_as_complete(comm: Communicator) -> None:
    net = DistributedDataParallel(ReversedLayers(), process_group=comm, bucket_cap_mb=0)
    events: list[str] = []

    def buckets() -> list[str]:
        names = {id(p): n for n, p in net.module.named_parameters()}
        return [names[id(b.slots[0].parameter)] for b in net.reducer.buckets]

    first = buckets()
    backward(net, 0, comm.rank)
    net(rows(1, comm.rank))
    second = buckets()
    for bucket in net.reducer.buckets:
        start = bucket.start
        bucket.start = lambda i=bucket.index, s=start: (events.append(f"reduce {i}"), s())[1]
    for i, layer in enumerate(net.module.layers):
        layer.weight.register_hook(lambda _g, i=i: events.append(f"gradient {i}"))
    backward(net, 2, comm.rank)
    assert first == [f"layers.{i}.weight" for i in (3, 2, 1, 0)]
    assert second == [f"layers.{i}.weight" for i in (0, 1, 2, 3)]
    assert events == [f"{what} {i}" for i in range(4) for what in ("gradient", "reduce")]


# ---- memory


@pytest.mark.parametrize("as_views", [False, True])
@on_ranks(2)
def test_gradients_that_are_referenced_keep_their_values(
    comm: Communicator, as_views: bool
) -> None:
    """While a reference of any form is held to a gradient of the last step, it keeps its value,
    unless gradients are views of the buckets."""
    net = DistributedDataParallel(mlp(), gradient_as_bucket_view=as_views, process_group=comm)
    (bucket,) = net.reducer.buckets
    first = backward(net, 0, comm.rank)
    bucket = net.reducer.buckets[0]
    for hold in REFERENCES:
        before = backward(net, 0, comm.rank)
        kept = hold(next(net.parameters()))
        copied = copy.deepcopy(kept)
        after = backward(net, 1, comm.rank)
        assert equal(before, first)
        assert not equal(before, after)
        same = bool((torch.as_tensor(kept) == torch.as_tensor(copied)).all())
        assert same != as_views
        del kept
    flat = net.reducer.buckets[0].flat.data_ptr()
    for step in range(3):  # without such references no other memory is allocated
        backward(net, step, comm.rank)
        assert net.reducer.buckets[0].flat.data_ptr() == flat
    for p in net.parameters():
        p.grad.detach_()
        assert bucket.flat.dtype == p.grad.dtype


@pytest.mark.parametrize("n", [1, 2])
@on_ranks()
def test_bytes_sent_equal_the_formula_and_no_sync_sends_none(comm: Communicator) -> None:
    """The formula: 2(n-1)/n of the bytes of all gradients."""
    net = DistributedDataParallel(mlp(), process_group=comm)
    sent = []
    for step in range(3):
        if step == 1:  # the second forward sends one message about how buckets are rebuilt
            net.reducer._rebuild_buckets()
        before = net.reducer.comm.sent_bytes()
        with net.no_sync() if step == 2 else nullcontext():
            backward(net, step, comm.rank)
        sent.append(net.reducer.comm.sent_bytes() - before)
    share = 2 * (comm.size - 1) * sum(p.nbytes for p in net.parameters()) // comm.size
    assert sent == [share, share, 0]


@on_ranks(2)
def test_a_model_can_be_wrapped_again(comm: Communicator) -> None:
    model = mlp()
    net = DistributedDataParallel(model, process_group=comm)
    backward(net, 0, comm.rank)
    reference = weakref.ref(net.reducer)
    del net
    gc.collect()
    assert reference() is None
    again = DistributedDataParallel(model, process_group=comm)
    backward(again, 1, comm.rank)


# ---- what torch's own class cannot do


@on_ranks(2)
def test_unused_parameters_with_several_forwards(comm: Communicator) -> None:
    """Compared with the same computation in one process."""
    net = DistributedDataParallel(
        Branches(0, differ=False), find_unused_parameters=True, process_group=comm
    )
    single = copy.deepcopy(net.module)
    (loss(net(rows(0, comm.rank))) + loss(net(rows(1, comm.rank)))).backward()
    for rank in range(comm.size):
        ((loss(single(rows(0, rank))) + loss(single(rows(1, rank)))) / comm.size).backward()
    for (name, p), q in zip(net.module.named_parameters(), single.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) == name.startswith(("never", "branches.1",
                                                                        "branches.2"))  # fmt: skip
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)


# ---- copies and state


@pytest.mark.parametrize("named", [False, True])
@on_ranks(2)
def test_copies_and_state_dicts_are_as_torchs(comm: Communicator, named: bool) -> None:
    """With `named`, over torch's default group given by name."""
    gloo()
    net = DistributedDataParallel(Transformer(), process_group=dist.group.WORLD if named else None)
    theirs = TORCHS(Transformer())
    assert list(net.state_dict()) == list(theirs.state_dict())
    assert list(net.module.state_dict()) == list(theirs.module.state_dict())
    theirs.load_state_dict(net.state_dict())
    net.load_state_dict(theirs.state_dict())
    net.module.load_state_dict(theirs.module.state_dict())
    expected = backward(net, 0, comm.rank)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in (copy.deepcopy(net), torch.load(file, weights_only=False)):
        with torch.inference_mode():
            assert torch.equal(other(rows(0, comm.rank)), net(rows(0, comm.rank)))
        assert equal(backward(other, 0, comm.rank), expected)
        backward(other, 1, comm.rank)
        assert equal(gradients(net), expected), "a copy's gradients are separate"


# ---- whole loops


def digits() -> TensorDataset:
    seed = torch.Generator().manual_seed(0)
    x = torch.randn(48, WIDTH, generator=seed)
    return TensorDataset(x, (x[:, 0] > 0).long())


@on_ranks(2)
def test_a_whole_loop_has_torchs_losses(comm: Communicator) -> None:
    """DistributedSampler, GradScaler, clipping and a schedule, compared with torch's class."""

    def found(wrap: Wrap) -> list[float]:
        net = wrap(mlp())
        sampler = DistributedSampler(digits(), comm.size, comm.rank, seed=3)
        loader = DataLoader(digits(), batch_size=8, sampler=sampler)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        losses = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    value = nn.functional.cross_entropy(net(x), y)
                scaler.scale(value).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                losses.append(value.item())
            schedule.step()
        return losses

    ours, theirs = ours_and_torchs(found)
    assert ours == theirs
    assert ours[-1] < ours[0]


@on_ranks(1)
def test_a_single_rank_has_its_own_gradients(comm: Communicator) -> None:
    net = DistributedDataParallel(mlp())
    single = copy.deepcopy(net.module)
    assert equal(backward(net, 0, 0), backward(single, 0, 0))
