"""`ringdp bench` as a command: real ranks, refused options, and processes that all end."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import metadata
from multiprocessing import Pipe
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from ringdp.cli import launch
from ringdp.cli.bench import command, groups, peers, run, worker
from ringdp.cli.bench.cases import Task
from ringdp.cli.bench.contenders import Failure, Round, Times
from ringdp.cli.bench.groups import probe_ranks
from ringdp.cli.bench.options import Options
from ringdp.cli.bench.rows import Report, read
from ringdp.cli.bench.run import FEWEST, Step
from ringdp.cli.doctor.job import family
from ringdp.cli.launch import RankError
from ringdp.cli.main import main
from ringdp.transport.store.processes import has_ended
from tests.cli.conftest import SECONDS, printed, processes
from tests.transport.nccl.faults import only_with_host_nccl
from tests.waiting import wait_until

RINGDP = str(Path(sys.executable).with_name("ringdp"))
REFUSED = {
    "collective": (["all_reduc"], "COLLECTIVE is 'all_reduc'; allowed: all_reduce, "),
    "what else it times": (["kernel"], "all_to_all_v, send, kernels, error"),
    "ranks": (["all_reduce", "--ranks", "1"], "--ranks is 1; allowed: a whole number from 2"),
    "min": (["all_reduce", "--min", "1X"], "--min is '1X'; allowed: bytes, as in 4096, 1K"),
    "min of thousands of digits": (["all_reduce", "--min", "9" * 5000], "99'; allowed: bytes, as"),
    "min zero": (["all_reduce", "--min", "0"], "--min is 0; allowed"),
    "min small": (["all_gather", "--min", "4"], "--min is 4; allowed: at least 2 float32"),
    "min uneven": (["all_gather_v", "--min", "8"], "--min is 8; allowed: at least 3 float32"),
    "max": (
        ["all_reduce", "--max", "512"],
        "--max is 512; allowed: from --min, which is 1K, to 4G",
    ),
    "factor": (["all_reduce", "--factor", "1"], "--factor is 1; allowed"),
    "dtype": (["all_reduce", "--dtype", "int4"], "--dtype is 'int4'; allowed: float32, "),
    "op": (["all_reduce", "--op", "avg"], "--op is 'avg'; allowed: sum, prod, min, max"),
    "op of a move": (["all_gather", "--op", "max"], "--op is for what is reduced: all_reduce, "),
    "algorithm": (["all_reduce", "--algorithm", "fast"], "no all_reduce algorithm 'fast'"),
    "no algorithm": (["all_reduce", "--algorithm", ","], "--algorithm is empty; allowed: auto"),
    "algorithm of all_to_all_v": (
        ["all_to_all_v", "--algorithm", "direct"],
        "--algorithm: all_to_all_v takes none; allowed: auto",
    ),
    "algorithm of messages": (
        ["send", "--algorithm", "direct"],
        "--algorithm: send takes none; allowed: auto",
    ),
    "algorithm of uneven parts": (
        ["gather_v", "--algorithm", "ring"],
        "no gather algorithm 'ring'",
    ),
    "own": (["all_reduce", "--algorithm", "/no.py:f"], "cannot read /no.py"),
    "transport": (["all_reduce", "--transport", "tcp"], "--transport is 'tcp'; allowed: shm, c10d"),
    "no transport": (["all_reduce", "--transport", ","], "--transport is empty; allowed: shm, "),
    "registered": (
        ["all_reduce", "--transport", "shm,c10d", "--registered"],
        "allowed: --transport shm",
    ),
    "NCCL's own": (
        ["all_reduce", "--transport", "shm,c10d", "--algorithm", "nccl"],
        "no all_reduce algorithm 'nccl'",
    ),
    "peer": (["all_reduce", "--peer", "mpi"], "allowed: gloo, mpich, openmpi, torch-nccl"),
    "peer of uneven parts": (
        ["all_gather_v", "--peer", "gloo"],
        "--peer gloo has no all_gather_v; allowed: mpich, openmpi",
    ),
    "peer dtype": (
        ["all_reduce", "--peer", "mpich", "--dtype", "bfloat16"],
        "--peer mpich has no bfloat16; allowed: float32, ",
    ),
    "peer on a GPU": (
        ["all_reduce", "--peer", "gloo,torch-nccl"],
        "--peer torch-nccl needs a CUDA GPU and a torch built with NCCL, and torch ",
    ),
    "rounds": (["all_reduce", "--rounds", "0"], "--rounds is 0; allowed"),
    "json": (["all_reduce", "--json", "/nowhere/out.json"], "cannot write /nowhere/out.json"),
    "nothing": ([], "collective"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_refused_in_one_line(arguments: list[str], message: str, refused) -> None:
    refused("bench", *arguments, message=message)


@pytest.mark.parametrize("missing", ["mpi4py", "mpich"])
def test_a_missing_peer_package_is_named_with_its_installation(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def distribution(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(peers, "find_spec", lambda name: None if name == missing else object())
    monkeypatch.setattr(peers, "distribution", distribution)
    assert main(["bench", "all_reduce", "--peer", "mpich"]) == 2
    assert f"--peer mpich: {missing} is not installed" in (error := capsys.readouterr().err)
    assert "pip install 'ringdp[bench]'" in error


def test_ranks_of_a_peer_ignore_the_variables_of_other_launchers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for k, variable in enumerate(("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK")):
        monkeypatch.setenv(variable, str(k))
    assert [worker.rank_of(name) for name in ("gloo", "mpich", "openmpi")] == [0, 1, 2]


@pytest.mark.process
def test_a_run_measures_checks_and_writes_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    command = ["bench", "all_reduce", "--min", "1K", "--max", "4K", "--rounds", "2"]
    command += ["--peer", "gloo", "--algorithm", "auto,ring", "--json", str(out)]
    assert main(command) == 0
    assert "× peer" in capsys.readouterr().out
    report = read(out)
    assert list(report.contenders) == ["shm", "gloo"]
    assert [(r.algorithm, r.bytes) for r in report.rows] == [
        (name, size) for size in (1024, 4096) for name in ("auto", "ring", "gloo")
    ]
    for r in report.rows:
        assert 0 < r.min_us <= r.p20_us <= r.p50_us <= r.p80_us
        assert r.bound_us > 0
        assert (r.predicted_us is None) == (r.transport == "gloo")
        assert r.wrong == 0
        assert r.calls >= 2 * FEWEST
    assert json.loads(out.read_bytes())["machine"]["cores"]
    expected = {"op": "sum", "rounds": 2, "min": 1024, "max": 4096}
    assert expected.items() <= report.asked.items()


@pytest.mark.process
def test_several_transports_and_nccls_own_algorithm_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only_with_host_nccl()
    out = tmp_path / "rows.json"
    command = ["bench", "all_gather", "--min", "4K", "--max", "4K", "--rounds", "1"]
    command += ["--transport=c10d,nccl-host,peer-host", "--algorithm=ring,nccl", "--json", str(out)]
    assert main(command) == 0
    report = read(out)
    assert list(report.contenders) == ["c10d", "nccl-host", "peer-host"]
    assert [(r.transport, r.algorithm, r.predicted_us is None, r.wrong) for r in report.rows] == [
        ("c10d", "ring", False, 0),
        ("nccl-host", "ring", False, 0),
        ("nccl-host", "nccl", True, 0),
        ("peer-host", "ring", False, 0),
    ]
    assert "transport" in capsys.readouterr().out


@pytest.mark.parametrize("width", [40, 80])
def test_the_progress_line_is_complete(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(options: Options, on_step: Callable[[Step], None]) -> Report:
        on_step(Step(0.5, 64 << 20, "openmpi registered"))
        return Report({}, {}, [])

    monkeypatch.setattr(command, "measure", measure)
    options = Options("reduce_scatter")
    text = printed(lambda console: command.watch(options, console), width)
    shown = re.sub(r"\x1b\[[0-9?]*[a-zA-Z]", "", text)
    assert {"reduce_scatter", "67,108,864", "openmpi", "registered", "0:00:00"} <= {*shown.split()}


@pytest.fixture(scope="module")
def endless(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[], tuple[subprocess.Popen[str], Path]]]:
    """endless(): a run that measures until it is ended, and its temporary directory. Two are
    started at once, since starting takes long and uses one core."""
    command = (RINGDP, "bench", "all_reduce", "--min", "1K", "--max", "1K", "--rounds", "10000")
    with processes() as start:
        places = [tmp_path_factory.mktemp("run") for _ in range(2)]
        started = [(start("env", f"TMPDIR={place}", *command), place) for place in places]
        yield started.pop


@pytest.mark.process
def test_a_signal_ends_every_rank(endless) -> None:
    process, _ = endless()
    assert process.stdout.readline() == "measuring 1,024 bytes\n"
    below = family(process.pid)[1:]
    groups = 2  # shm and the speed probe: a process each, which forks its ranks
    others = 2  # the process that forks those, and multiprocessing's resource tracker
    assert len(below) == others + groups + 2 + probe_ranks(2, len(os.sched_getaffinity(0)))
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signal.SIGTERM
    assert stderr == "ringdp: ended by SIGTERM; every rank has ended\n"
    assert_gone(below)


@pytest.mark.process
def test_a_killed_run_leaves_no_folder(endless) -> None:
    process, place = endless()
    assert process.stdout.readline() == "measuring 1,024 bytes\n"
    below = family(process.pid)[1:]
    assert {name.partition("-")[0] for name in os.listdir(place)} == {"ringdp", "pymp"}
    process.kill()
    assert_gone(below)
    assert os.listdir(place) == []


@pytest.mark.process
def test_a_signal_while_a_process_starts_ends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[ForkServerProcess] = []

    def interrupted(function: Callable[..., object], *arguments: object) -> ForkServerProcess:
        started.append(process := launch.fork(function, *arguments))
        if arguments:  # a group's
            signal.raise_signal(signal.SIGINT)
        return process

    monkeypatch.setattr(groups, "fork", interrupted)
    assert main(["bench", "all_reduce", "--min", "1K", "--max", "1K"]) == 130
    assert [process.is_alive() for process in started] == [False, False]
    assert capsys.readouterr().err == "ringdp: ended by SIGINT; every rank has ended\n"


@pytest.mark.process
def test_a_rank_that_dies_ends_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also if the temporary directory's name is too long for sockets."""
    long = tmp_path / ("x" * 110)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(groups, "HURRY", 0.1)  # seconds; for a rank that waits for the dead one
    round_ = Round(Task("all_reduce", "auto", False, "float32", "sum", 256), number=0, calls=3)
    cores = os.sched_getaffinity(0)
    with groups.groups(["shm"], 2, sorted(cores), largest=4096, pin=False) as started:
        alone = started["shm"]
        assert [os.sched_getaffinity(pid) for pid in alone._pids] == [cores, cores]
        assert tempfile.gettempdir() == str(long)
        assert len(alone.run(round_)) == 2
        ranks = alone._pids
        os.kill(ranks[0], signal.SIGKILL)
        with pytest.raises(RankError, match=r"shm (died|failed) in all_reduce of 256 float32"):
            alone.run(round_)
    assert_gone(ranks)


def test_an_error_of_a_rank_comes_after_the_output_of_all(tmp_path: Path) -> None:
    """NCCL's warnings, for example, and errors of threads, which may say why the rank failed."""
    group = object.__new__(groups.Group)
    group.name, group._log = "nccl", (tmp_path / "log").open("wb", buffering=0)
    group._log.write(b"NCCL WARN why\n")
    here, there = Pipe()
    there.send(Failure("Traceback\n"))
    found = "NCCL WARN why\nTraceback\nringdp: a rank of nccl failed in a round"
    with pytest.raises(RankError, match=f"^{found}$"):
        group._receive(here, "in a round")


@pytest.mark.process
def test_a_rank_that_hangs_as_it_starts_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = socket.socket(socket.AF_UNIX)

    def silent(function: Callable[..., object], *arguments: object) -> ForkServerProcess:
        """Of a group: a rank that connects, and says nothing."""
        if not arguments:
            return launch.fork(function)
        _, address, places, *_ = arguments
        assert places == ",".join(map(str, cores))  # to which ranks pin themselves
        pipe.connect(address)
        return launch.fork(time.sleep, 600)

    monkeypatch.setattr(groups, "fork", silent)
    monkeypatch.setattr(groups, "START_TIMEOUT", 0.1)
    monkeypatch.setattr(groups, "HURRY", 0.1)
    cores = sorted(os.sched_getaffinity(0))
    with (
        pipe,
        pytest.raises(RankError, match=r"shm did not start: it said nothing for 0\.1 s"),
        groups.groups(["shm"], 2, cores, largest=4096),
    ):
        pass


def assert_gone(pids: list[int]) -> None:
    wait_until(lambda: all(map(has_ended, pids)), SECONDS)


class Scripted:
    """Stands in for the rank processes: every call takes a microsecond, and something happens from
    the second size on."""

    version = "1"

    def __init__(self, happens: Callable[[], None]) -> None:
        self.counts: set[int] = set()
        self.happens = happens

    def run(self, command: Round) -> list[Times]:
        self.counts.add(command.task.count)
        if len(self.counts) > 1:
            self.happens()
        return [Times([1000] * command.calls, 0)] * 2


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Path]]:
    """scripted(happens): a run of three sizes by `Scripted`; its exit code, and its file."""

    def scripted(happens: Callable[[], None]) -> tuple[int, Path]:
        ranks = {name: Scripted(happens) for name in ("shm", "probe")}
        monkeypatch.setattr(run, "groups", lambda *_, **__: nullcontext(ranks))
        file = tmp_path / "rows" / "rows.json"
        file.parent.mkdir()
        sizes = ["--min", "1K", "--max", "16K", "--rounds", "1", "--json", str(file)]
        return main(["bench", "all_reduce", *sizes]), file

    return scripted


def test_rows_measured_before_a_failure_are_written(scripted) -> None:
    def die() -> None:
        raise RankError("rank 1 died")

    code, file = scripted(die)
    assert code == 1
    assert {row.bytes for row in read(file).rows} == {1024}


def test_rows_are_shown_even_if_they_cannot_be_written(scripted, tmp_path: Path, capsys) -> None:
    code, file = scripted(lambda: shutil.rmtree(tmp_path / "rows", ignore_errors=True))
    shown = capsys.readouterr()
    assert code == 1
    assert shown.err == f"ringdp: cannot write {file}: No such file or directory\n"
    assert {"1,024", "4,096", "16,384"} <= {*shown.out.split("all_reduce, 2 ranks")[1].split()}
