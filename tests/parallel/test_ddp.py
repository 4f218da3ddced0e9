"""DistributedDataParallel: when it reduces, what it holds, errors, uneven inputs, hooks, copies."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ringdp import Communicator, DistributedDataParallel, ModelError, UsageError
from ringdp.parallel.ddp.assign import Gradient, assign
from tests.parallel.ddp_cases import WIDTH, Branches, Outputs, Transformer, loss, mlp, rows
from tests.parallel.test_ddp_parity import gloo

pytestmark = pytest.mark.process

TORCHS = nn.parallel.DistributedDataParallel


def gradients(net: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def backward(net: nn.Module, step: int, rank: int) -> list[Tensor]:
    net.zero_grad()
    loss(net(rows(step, rank))).backward()
    return gradients(net)


# ---- buckets

SIZES = st.lists(st.tuples(st.integers(1, 900), st.sampled_from("fd")), min_size=1, max_size=30)


@given(SIZES, st.integers(1, 2000), st.integers(1, 2000))
def test_buckets_are_torchs(sizes, first, cap):
    """torch cuts in the order of parameters, and sorts as we do where no dtype is mixed."""
    sizes = [(n, "f") for n, _ in sizes]
    tensors = [torch.empty(n, dtype=torch.uint8) for n, _ in sizes]
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, [first, cap], [], [])
    facts = [Gradient(n, kind) for n, kind in sizes]
    assert assign(facts, range(len(facts)), first=first, cap=cap) == theirs


@given(SIZES, st.integers(1, 2000), st.integers(1, 2000), st.data())
def test_buckets_hold_every_gradient_once_of_one_kind_in_order(sizes, first, cap, data):
    facts = [Gradient(n, kind, sparse=n % 7 == 0) for n, kind in sizes]
    order = data.draw(st.permutations(range(len(facts))))
    buckets = assign(facts, order, first=first, cap=cap)
    assert sorted(i for b in buckets for i in b) == sorted(order)
    for bucket in buckets:
        assert len({facts[i].kind for i in bucket}) == 1
        assert bucket == sorted(bucket, key=order.index)
        assert len(bucket) == 1 or not any(facts[i].sparse for i in bucket)
        limit = max(first, cap)
        assert sum(facts[i].bytes for i in bucket[:-1]) < limit
    ends = [order.index(b[-1]) for b in buckets]
    assert ends == sorted(ends)


class Backwards(nn.Module):
    """Uses its layers in the reverse of their order of registration."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x[:, :3]


def order(comm: Communicator) -> list[list[str]]:
    """Names in each bucket before and after the first backward, and what the second one did."""
    net = DistributedDataParallel(Backwards(), process_group=comm, bucket_cap_mb=0)
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
    return [first, second, events]


def test_a_bucket_is_reduced_as_soon_as_it_is_whole_in_an_order_learned_once(ranks):
    first, second, events = ranks(2)(order)[0]
    assert first == [f"layers.{i}.weight" for i in (3, 2, 1, 0)]
    assert second == [f"layers.{i}.weight" for i in (0, 1, 2, 3)]
    assert events == [f"{what} {i}" for i in range(4) for what in ("gradient", "reduce")]


# ---- memory


def held(comm: Communicator, as_views: bool) -> None:
    """Gradients of the last step stay what they are while somebody holds them, in any form."""
    net = DistributedDataParallel(mlp(), gradient_as_bucket_view=as_views, process_group=comm)
    (bucket,) = net.reducer.buckets
    first = backward(net, 0, comm.rank)
    bucket = net.reducer.buckets[0]
    for hold in (
        lambda p: p.grad,
        lambda p: p.grad.view(-1)[1:],
        lambda p: p.grad.numpy(),
        lambda p: p.grad.detach(),
    ):
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
    for step in range(3):  # nobody holds them: no other memory is taken
        backward(net, step, comm.rank)
        assert net.reducer.buckets[0].flat.data_ptr() == flat
    for p in net.parameters():
        p.grad.detach_()
        assert bucket.flat.dtype == p.grad.dtype


@pytest.mark.parametrize("as_views", [False, True])
def test_gradients_that_somebody_holds_keep_their_values(ranks, as_views):
    ranks(2)(held, as_views)


def traffic(comm: Communicator) -> list[tuple[int, int]]:
    """(bytes sent by an iteration, what 2(n-1)/n of all gradients are)."""
    net = DistributedDataParallel(mlp(), process_group=comm)
    sent = []
    for step in range(3):
        if step == 1:  # before the second forward one message says how buckets are rebuilt
            net.reducer.rebuild()
        before = net.reducer.comm.sent_bytes()
        with net.no_sync() if step == 2 else nullcontext():
            backward(net, step, comm.rank)
        sent.append(net.reducer.comm.sent_bytes() - before)
    share = 2 * (comm.size - 1) * sum(p.nbytes for p in net.parameters()) // comm.size
    return list(zip(sent, [share, share, 0], strict=True))


@pytest.mark.parametrize("n", [1, 2])
def test_an_iteration_sends_its_share_and_no_sync_nothing(ranks, n):
    for pairs in ranks(n)(traffic):
        assert [sent for sent, _ in pairs] == [formula for _, formula in pairs]


def goes(comm: Communicator) -> None:
    model = mlp()
    net = DistributedDataParallel(model, process_group=comm)
    backward(net, 0, comm.rank)
    gone = weakref.ref(net.reducer)
    del net
    gc.collect()
    assert gone() is None
    again = DistributedDataParallel(model, process_group=comm)
    backward(again, 1, comm.rank)


def test_a_model_can_be_wrapped_again(ranks):
    ranks(2)(goes)


# ---- errors


def says(attempt: Callable[[], object], kind: type[Exception] = ModelError) -> str:
    with pytest.raises(kind) as error:
        attempt()
    return str(error.value)


def refused(comm: Communicator) -> list[str]:
    def wrap(model: Any = None, **options: Any) -> DistributedDataParallel:
        return DistributedDataParallel(model or mlp(), process_group=comm, **options)

    net = wrap(Outputs())
    loss(net(rows(0, comm.rank))["predictions"][0]).backward()
    unfinished = says(lambda: net(rows(1, comm.rank)))
    assert "Parameter indices which did not receive grad for rank" in unfinished
    assert issubclass(ModelError, RuntimeError)
    sync = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    sparse = wrap(nn.Sequential(nn.Embedding(3, 2, sparse=True)))
    return [
        unfinished.splitlines()[-1],
        says(lambda: wrap(mlp().requires_grad_(False))),
        says(lambda: wrap(nn.LazyLinear(3))),
        says(lambda: wrap(sync), UsageError),
        says(lambda: wrap(device_ids=[0]), UsageError),
        says(lambda: wrap(bucket_cap_mb=-1), UsageError),
        says(lambda: DistributedDataParallel(mlp(), process_group=3), UsageError),
        says(lambda: wrap().register_comm_hook(None, 3), UsageError),
        says(lambda: pickle.dumps(wrap())),
        says(lambda: sparse.module[0].weight.sum().backward() or sparse(torch.tensor([0]))[0]
             .mul(sparse.module[0].weight).sum().backward()),
    ]  # fmt: skip


def test_a_wrong_model_or_argument_is_told(ranks):
    expected = (
        "Parameters which did not receive grad for rank 0: b.weight, b.bias",
        "no trainable parameter",
        "uninitialized",
        "ringdp.SyncBatchNorm",
        "device_ids",
        "at least 0",
        "ringdp.Communicator",
        "callable",
        "default process group",
        "to have sparse gradient",
    )
    for text, word in zip(ranks(2)(refused)[0], expected, strict=True):
        assert word in text


def unequal(comm: Communicator) -> list[str]:
    models = [
        nn.Sequential(nn.Linear(2, 3 + comm.rank)),
        nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + comm.rank))),
        nn.Sequential(nn.Linear(2, 2).to([torch.float32, torch.float64][comm.rank])),
    ]
    return [says(lambda m=m: DistributedDataParallel(m, process_group=comm)) for m in models]


def test_models_that_differ_are_told_on_every_rank(ranks):
    for shapes, counts, dtypes in ranks(2)(unequal):
        assert "params[0], '0.weight' with sizes [4, 2]" in shapes
        assert "on rank 1, appears not to match" in shapes
        assert "process 0: '0.weight' with sizes [3, 2]" in shapes
        assert "Rank 0 has 2 params, while rank 1 has inconsistent 4 params: '1.weight'" in counts
        assert "torch.float64" in dtypes


def twice(comm: Communicator, **options: Any) -> str:
    from tests.parallel.ddp_cases import Checkpointed

    net = DistributedDataParallel(
        Checkpointed(reentrant=True, twice=True), process_group=comm, **options
    )
    return says(lambda: backward(net, 0, comm.rank))


def test_a_gradient_made_twice_is_told(ranks):
    for text in ranks(2)(twice):
        assert "inner.2.bias has been marked as ready twice" in text
        assert "use_reentrant=False" in text


# ---- what torch's own class cannot do


def opaque(comm: Communicator) -> None:
    """Unused parameters with several forwards, and reentrant checkpoints, as in one process."""
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


def test_unused_parameters_with_several_forwards(ranks):
    ranks(2)(opaque)


# ---- hooks


def noop(state: list[int], bucket: Any) -> torch.futures.Future[Tensor]:
    assert bucket.is_last() == (bucket.index() == 1)
    assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
    assert sum(g.numel() for g in bucket.gradients()) == bucket.buffer().numel()
    state.append(bucket.index())
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer() * 3)
    return future


def hooked(comm: Communicator) -> None:
    seen: list[int] = []
    net = DistributedDataParallel(mlp(), process_group=comm, bucket_cap_mb=0.005)
    assert len(net.reducer.buckets) == 2
    single = copy.deepcopy(net.module)
    net.register_comm_hook(seen, noop)
    mine, alone = backward(net, 0, comm.rank), backward(single, 0, comm.rank)
    assert seen == [0, 1]
    assert equal(mine, [3 * g for g in alone])
    says(lambda: net.register_comm_hook(seen, noop))


def test_a_hook_sees_undivided_gradients_and_gives_the_result(ranks):
    ranks(2)(hooked)


def states(name: str) -> tuple[Any, Callable[..., Any]]:
    if name == "powerSGD":
        state = powerSGD_hook.PowerSGDState(
            None, 2, start_powerSGD_iter=2, min_compression_rate=0.1
        )
        return state, powerSGD_hook.powerSGD_hook
    if name == "fp16 powerSGD":
        state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
        return state, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    return None, getattr(default_hooks, name)


def torchs_hook(comm: Communicator, name: str) -> None:
    """PowerSGD starts collectives in gloo's threads, so several buckets would get in their way."""
    gloo()
    found = []
    for wrap in (DistributedDataParallel, TORCHS):
        torch.manual_seed(0)
        net = wrap(mlp(), bucket_cap_mb=1 if "SGD" in name else 0.005)
        net._check_comm_hook = lambda hook: None  # torch's asks for a GPU for bf16
        net.register_comm_hook(*states(name))
        found.append([g for step in range(5) for g in backward(net, step, comm.rank)])
    assert equal(*found)


HOOKS = ["allreduce_hook", "fp16_compress_hook", "bf16_compress_hook", "powerSGD", "fp16 powerSGD"]


@pytest.mark.parametrize("name", HOOKS)
def test_torchs_hooks_give_torchs_bits(ranks, name):
    ranks(2)(torchs_hook, name)


def wrong_hook(comm: Communicator) -> list[str]:
    said = []
    for hook in (lambda _s, _b: 3, lambda _s, b: torch.futures.Future().set_result(b.buffer())):
        net = DistributedDataParallel(mlp(), process_group=comm)
        net.register_comm_hook(None, hook)
        said.append(says(lambda n=net: backward(n, 0, comm.rank), UsageError))
    return said


def test_a_hook_that_gives_no_future_is_told(ranks):
    for text in ranks(1)(wrong_hook)[0]:
        assert "must return a torch.futures.Future" in text


# ---- uneven inputs


def uneven(comm: Communicator, options: dict[str, bool], make: str) -> None:
    """Rank r has 2 + 2r batches, and the second of every two of them accumulates."""
    gloo()
    found = []
    for wrap in (DistributedDataParallel, TORCHS):
        torch.manual_seed(comm.rank)
        model = {"batch norm": lambda: nn.Sequential(mlp(), nn.BatchNorm1d(3)), "mlp": mlp}[make]()
        net = wrap(model)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        seen = []
        with net.join(**options):
            for step in range(2 + 2 * comm.rank):
                optimizer.zero_grad()
                with net.no_sync():
                    loss(net(rows(step, comm.rank, 1))).backward()
                loss(net(rows(step, comm.rank))).backward()
                seen += gradients(net)
                optimizer.step()
        found.append(seen + [t.clone() for t in net.state_dict().values()])
    assert equal(*found)


@pytest.mark.parametrize("options", [{}, {"divide_by_initial_world_size": False}])
@pytest.mark.parametrize("make", ["mlp", "batch norm"])
def test_uneven_inputs_give_torchs_bits(ranks, options, make):
    ranks(2)(uneven, options, make)


def uneven_unused(comm: Communicator) -> list[list[float]]:
    net = DistributedDataParallel(Branches(comm.rank), find_unused_parameters=True)
    with net.join():
        for step in range(1 + comm.rank):
            backward(net, step, comm.rank)
    with net.join(enable=False):
        backward(net, 9, comm.rank)
    return [p.flatten().tolist() for p in net.parameters()]


def test_uneven_inputs_with_unused_parameters(ranks):
    first, *others = ranks(3)(uneven_unused)
    assert all(other == first for other in others)


def thrown(comm: Communicator) -> str:
    net = DistributedDataParallel(mlp(), process_group=comm)

    def train() -> None:
        with net.join(throw_on_early_termination=True):
            for step in range(1 + comm.rank):
                backward(net, step, comm.rank)

    return says(train)


def test_uneven_inputs_can_be_an_error_on_every_rank(ranks):
    for text in ranks(2)(thrown):
        assert "Detected at least one rank that exhausted inputs: [0]" in text


# ---- copies and state


def copied(comm: Communicator) -> None:
    gloo()
    net, theirs = DistributedDataParallel(Transformer()), TORCHS(Transformer())
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
        assert equal(backward(other, 0, comm.rank), expected)
        backward(other, 1, comm.rank)
        assert equal(gradients(net), expected), "a copy has gradients of its own"


def test_copies_and_states_are_as_torchs(ranks):
    ranks(2)(copied)


# ---- whole loops


def digits() -> TensorDataset:
    seed = torch.Generator().manual_seed(0)
    x = torch.randn(48, WIDTH, generator=seed)
    return TensorDataset(x, (x[:, 0] > 0).long())


def whole_loop(comm: Communicator) -> list[list[float]]:
    """DistributedSampler, GradScaler, clipping and a schedule, beside torch's class."""
    gloo()
    found = []
    for wrap in (DistributedDataParallel, TORCHS):
        torch.manual_seed(0)
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
        found.append(losses)
    return found


def test_a_whole_loop_has_torchs_losses(ranks):
    for ours, theirs in ranks(2)(whole_loop):
        assert ours == theirs
        assert ours[-1] < ours[0]


def no_group(comm: Communicator) -> None:
    """Over torch's default group, where ringdp.init has not been called."""
    gloo()
    from ringdp.comm import rendezvous

    world, rendezvous._world = rendezvous._world, None
    try:
        net = DistributedDataParallel(mlp())
        explicit = DistributedDataParallel(
            copy.deepcopy(net.module), process_group=dist.new_group([0, 1])
        )
        assert equal(backward(net, 0, comm.rank), backward(explicit, 0, comm.rank))
    finally:
        rendezvous._world = world


def test_it_works_over_torchs_groups(ranks):
    ranks(2)(no_group)


def alone(comm: Communicator) -> None:
    net = DistributedDataParallel(mlp())
    single = copy.deepcopy(net.module)
    assert equal(backward(net, 0, 0), backward(single, 0, 0))


def test_one_rank_has_its_own_gradients(ranks):
    ranks(1)(alone)
