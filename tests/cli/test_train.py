"""`ringdp train` with small models: its JSON, exit code, and agreement of stages and transports."""

import json
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from ringdp.cli import runs, train
from ringdp.cli.console import plain
from ringdp.cli.launch import SignalError
from ringdp.cli.main import main
from ringdp.cli.options import Options
from ringdp.cli.runs import MEMORY, Emit, Progress
from ringdp.cli.timeline.digest import digest
from ringdp.cli.timeline.read import HELD, read
from tests.cli.misbehaving import cannot_write_the_trace
from tests.cli.rows import STAGES
from tests.transport.nccl.faults import LACKS_HOST_NCCL

pytestmark = pytest.mark.process

SMALL = ["train", "--steps", "3", "--batch", "4", "--context", "16", "--seed", "1"]


def test_all_stages_agree_on_two_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    code = main([*SMALL, "--ranks", "2", "--json", str(out)])
    shown = capfd.readouterr().out
    assert code == 0, shown
    assert "Stages 0, 1, 2, 3 are equal bit for bit" in shown
    assert "It writes: " in shown
    runs = json.loads(out.read_bytes())
    assert [run["stage"] for run in runs] == [0, 1, 2, 3]
    for run in runs:
        assert set(run) == {
            *("stage", "ranks", "parameters", "loss", "step_ms", "tokens_per_s"),
            *("memory", "traffic"),
        }
        assert run["ranks"] == 2
        assert run["loss"] == runs[0]["loss"]
        assert len(run["loss"]) == 3
        assert set(run["step_ms"]) == {"p20", "p50", "p80"}
        assert set(run["memory"]) == {*MEMORY, "formula"}
        assert {key: run["memory"][key] for key in MEMORY} == run["memory"]["formula"]
        assert run["traffic"]["sent_bytes_per_step"] == run["traffic"]["formula"] > 0


def test_one_stage_writes_an_object(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["--ranks", "3", "--stage", "3", "--batch", "6", "--no-reference", "--no-sample"]
    assert main([*SMALL, *arguments, "--json", str(out)]) == 0
    run = json.loads(out.read_bytes())
    assert (run["stage"], run["ranks"]) == (3, 3)


def test_losses_are_the_same_over_every_transport(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    losses = {}
    for transport in ("shm", "c10d", "peer-host", *(() if LACKS_HOST_NCCL else ("nccl-host",))):
        out = tmp_path / f"{transport}.json"
        arguments = ["--stage", "3", "--no-reference", "--no-sample", "--transport", transport]
        assert main([*SMALL, *arguments, "--json", str(out)]) == 0
        assert (f" bytes, over {transport}\n" in capfd.readouterr().out) == (transport != "shm")
        losses[transport] = tuple(json.loads(out.read_bytes())["loss"])
    assert len(set(losses.values())) == 1, losses


def test_the_text_may_change_while_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As in `ringdp train --text . >log`."""
    log = tmp_path / "log"
    log.write_bytes(bytes(range(1, 128)))

    def launch(*arguments: Any) -> Any:
        log.write_bytes(b"changed")
        return launched(*arguments)

    launched = train.launch
    monkeypatch.setattr(train, "launch", launch)
    assert main([*SMALL, "--stage", "3", "--no-sample", "--text", str(tmp_path)]) == 0
    assert "Losses stay within the float32 bound" in capfd.readouterr().out


def test_only_the_model_that_is_shown_writes_a_sample(tmp_path: Path) -> None:
    """Writing takes as long as ten steps, and would be half of a short run's trace."""
    text = tmp_path / "text"
    text.write_bytes(bytes(range(1, 128)))
    options = Options(ranks=1, steps=1, batch=1, context=4)
    assert not runs.run_single(options, text.read_bytes(), print).sample
    written = runs.run_stages(runs.Job(options, text), print)
    assert [bool(record.sample) for record in written] == [False, False, False, True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_transport_over_gpus_needs_one(refused) -> None:
    refused("train", "--transport", "nccl", message="needs a CUDA GPU, and torch")


def test_on_gpus_nondeterministic_attention_is_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's memory-efficient kernel, which is disabled, adds with atomics for more than 64
    keys."""
    taken: list[str] = []
    monkeypatch.setattr(runs.gpus, "take", taken.append)
    monkeypatch.setattr(runs.ringdp, "init", lambda transport: sys.exit(transport))
    cuda = torch.backends.cuda
    for transport, left_out in (("nccl-host", False), ("nccl", True)):
        try:
            with pytest.raises(SystemExit, match=transport):
                runs.run_stages(runs.Job(Options(transport=transport), Path()), print)
            assert cuda.mem_efficient_sdp_enabled() != left_out
        finally:
            cuda.enable_mem_efficient_sdp(True)
    assert taken == ["nccl"]


def test_a_trace_of_a_run_can_be_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    traced, page = tmp_path / "run.json", tmp_path / "run.html"
    arguments = ["--stage", "3", "--no-reference", "--no-sample", "--trace", str(traced)]
    assert main([*SMALL, *arguments]) == 0
    assert main(["report", str(traced), "--html", str(page)]) == 0
    shown = capfd.readouterr().out
    assert f"\nwrote {traced}; `ringdp report {traced} --html FILE` makes a page of it\n" in shown
    assert all(re.search(rf"^rank {rank}: in .* computed ", shown, re.M) for rank in range(2))
    found = digest(read(traced))
    assert [(m["rank"], m["stage"]) for m in found["memory"]] == [(0, 3), (1, 3)]
    for engine in found["memory"]:
        held = [p[1:] for p in engine["points"]]
        peaks = [max(of) for of in zip(*held, strict=True)]
        gathered, buckets = HELD.index("gathered"), HELD.index("buckets")
        peaks[buckets] = max(h[gathered] + h[buckets] for h in held) - peaks[gathered]
        assert peaks == engine["formula"]


def test_a_missing_trace_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ended(*_: object) -> NoReturn:
        raise SignalError(signal.SIGINT)

    monkeypatch.setattr(train, "warm_up", lambda _: None)
    monkeypatch.setattr(train, "launch", ended)
    path = tmp_path / "run.json"
    assert main([*SMALL, "--no-reference", "--trace", str(path)]) == 130
    assert capsys.readouterr().err.splitlines() == [
        f"ringdp: no trace was written to {path}",
        "ringdp: ended by SIGINT; every rank has ended",
    ]


def test_runs_are_compared_even_if_their_trace_cannot_be_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "run.json", tmp_path / "out.json"
    asked = Options(
        steps=1, batch=4, context=16, reference=False, sample=False, trace=path, json=out
    )
    assert train.run(asked, plain(), entry=cannot_write_the_trace) == 1
    shown = capfd.readouterr()
    assert "Stages 0, 1, 2, 3 are equal bit for bit" in shown.out
    assert f"wrote {out}\n" in shown.out
    assert f"wrote {path}" not in shown.out
    assert f"ringdp: no trace was written to {path}\n" in shown.err  # rank 0 has said why
    assert "Traceback" not in shown.err


def test_results_are_printed_even_if_they_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "warm_up", lambda _: None)
    monkeypatch.setattr(train, "launch", lambda *_: [STAGES])
    assert main([*SMALL, "--no-reference", "--json", "/dev/full"]) == 1
    shown = capsys.readouterr()
    assert "Stages 0, 1, 2, 3 are equal bit for bit" in shown.out
    assert shown.err == "ringdp: cannot write /dev/full: No space left on device\n"


def test_a_signal_during_the_reference_ends_the_run_in_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default SIGTERM would end the process at once, and leave its temporary directory."""

    def interrupted(*_: object) -> None:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        signal.raise_signal(signal.SIGTERM)

    def interrupted_in_an_import(options: object, data: object, emit: Emit) -> None:
        with suppress(BaseException):
            interrupted()
        emit(Progress("single", 1, 1, 0.0, 0.0, {}))

    for stop in (interrupted, interrupted_in_an_import):
        monkeypatch.setattr(train, "run_single", stop)
        assert main(SMALL) == 128 + signal.SIGTERM
        assert capsys.readouterr().err == "ringdp: ended by SIGTERM; every rank has ended\n"
