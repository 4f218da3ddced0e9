"""Bench rows: statistics, predictions of the fitted model, and reading back a results file."""

import re
from pathlib import Path

import pytest

from ringdp.cli.bench.cases import Task
from ringdp.cli.bench.rows import Report, best_peer, measured, predicted, read
from ringdp.cli.files import write_json
from ringdp.errors import UsageError
from ringdp.schedule.cost import Machine, closed, seconds
from tests.cli.bench.rows import peer, row


def test_percentiles_and_bandwidths() -> None:
    times = [k * 1e-6 for k in range(1, 102)]  # 1 to 101 µs
    task = Task("all_reduce", "ring", False, "float32", "sum", count=51_000 // 4)
    r = measured(task, "shm", 4, times, bound=2e-6, wrong=3)
    assert (r.min_us, r.p20_us, r.p50_us, r.p80_us) == (1, 21, 51, 81)
    assert r.algbw == 1.0  # 51 kB in 51 µs
    assert r.busbw == 1.5  # on 4 ranks 2 * 3 / 4 of algbw
    assert (r.bound_us, r.wrong) == (2, 3)


def test_predictions_equal_the_model_that_made_the_times() -> None:
    machine = Machine(alpha=2e-6, beta=1e-10, gamma=3e-11)
    made = [
        row(
            algorithm=algorithm,
            ranks=n,
            bytes=size,
            p50_us=seconds(closed("all_reduce", algorithm, n), machine, size) * 1e6,
        )
        for algorithm in ("ring", "doubling")
        for n in (3, 4)
        for size in (1 << 10, 1 << 16, 1 << 22)
    ]
    for r in predicted([*made, peer("gloo", 1.0)]):
        if r.ours:
            assert r.predicted_us == pytest.approx(r.p50_us, rel=1e-3)
        else:
            assert r.predicted_us is None


@pytest.mark.parametrize("name", ["all_to_all_v", "send"])
def test_uneven_parts_and_messages_have_no_prediction(name: str) -> None:
    unpriced = row(collective=name, predicted_us=None)
    assert predicted([unpriced]) == [unpriced]
    assert not unpriced.built_in


def test_the_time_of_a_send_is_that_of_one_message_of_a_lap() -> None:
    task = Task("send", "auto", False, "float32", "sum", count=1000)
    r = measured(task, "shm", 4, [8e-6], bound=1e-6, wrong=0)
    assert (r.p50_us, r.algbw, r.busbw, r.bound_us) == (2, 2, 2, 1)


def test_registered_buffers_are_fitted_separately() -> None:
    sizes = (1 << 10, 1 << 16, 1 << 22)
    private = [row(bytes=s, p50_us=1 + s * 1e-4) for s in sizes]
    shared = [row(bytes=s, p50_us=1 + s * 2e-5, registered=True) for s in sizes]
    for r in predicted(private + shared):
        assert r.predicted_us == pytest.approx(r.p50_us, rel=1e-3)


def test_own_algorithms_are_priced_by_their_schedule(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from ringdp.schedule import schedule\ndef mine(n):\n"
        "    return schedule('all_reduce', 'ring', n)\n",
        encoding="utf-8",
    )
    rows = [row(algorithm=f"{tmp_path}/own.py:mine", bytes=s, p50_us=s / 1e3) for s in (1000, 2000)]
    assert all(r.predicted_us == pytest.approx(r.p50_us, rel=1e-3) for r in predicted(rows))


def test_the_best_peer_has_the_same_size() -> None:
    rows = [row(), peer("gloo", 300.0), peer("mpich", 200.0), peer("openmpi", 1.0, size=1024)]
    best = best_peer(rows, rows[0])
    assert best is not None
    assert best.transport == "mpich"
    assert best_peer(rows[:1], rows[0]) is None


def test_a_report_is_read_back_as_written(tmp_path: Path) -> None:
    report = Report({"cpu": "one"}, {"ours": "ringdp 0"}, [row(), peer("gloo", 3.0)])
    write_json(tmp_path / "r.json", report)
    assert read(tmp_path / "r.json") == report
    before = (tmp_path / "r.json").read_text(encoding="utf-8")
    older = re.sub(r',\s*"calls": 0', "", before)  # a file that predates this field
    (tmp_path / "r.json").write_text(older, encoding="utf-8")
    assert older != before
    assert read(tmp_path / "r.json") == report


OTHERS = ["[]", "{}", "no", "[" * 200_000, '{"rows": 3}', '{"rows": [{}], "machine": {}}']


@pytest.mark.parametrize("text", OTHERS, ids=lambda text: text[:8])
def test_files_without_results_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match="holds no results"):
        read(tmp_path / "r.json")
