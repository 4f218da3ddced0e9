"""How ranks find each other: under torchrun, and where its variables are wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ringdp

pytestmark = pytest.mark.process

TORCHRUN = """
import sys, torch, ringdp
comm = ringdp.init(timeout=20)
x = torch.tensor([float(comm.rank + 1)])
comm.all_reduce(x)
sys.stdout.write(f"rank {comm.rank} of {comm.size}: {x.item()}\\n")  # whole lines, unbuffered too
"""


def test_init_under_torchrun(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(TORCHRUN)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node=2", str(script)),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2: 3.0", "rank 1 of 2: 3.0"]


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_torchruns_variables_in_part_are_refused(monkeypatch, missing):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(ringdp.UsageError, match=missing):
        ringdp.init()
