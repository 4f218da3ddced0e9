"""Two hosts on one machine: network namespaces, between which lies a cable.

Needs root, and the commands ip, tc (for a rate) and unshare (for pids of their own).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

PORT = 29471  # free in new namespaces
ALONE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]  # sees no other processes


class Host(NamedTuple):
    name: str
    cable: str  # at most 15 characters
    address: str

    def signal(self, signum: int) -> None:
        """Signal all of its processes, the last one first."""
        shown = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, encoding="utf-8", check=False
        )
        for pid in reversed(shown.stdout.split()):
            with suppress(ProcessLookupError):
                os.kill(int(pid), signum)


HOSTS = [
    Host(f"ringdp{os.getpid()}{at}", f"rdp{os.getpid() % 10**7}{at}", f"10.97.31.{number}")
    for number, at in enumerate("ab", start=1)
]


@contextmanager
def two_hosts(rate: str | None = None) -> Iterator[list[Host]]:
    """`rate`: of the cable, both ways, in tc's words, such as 1gbit. Raises OSError, or
    CalledProcessError with tc's or ip's stderr, where they cannot be made. What still runs there at
    the end is killed."""
    for command in ("ip", "unshare", "tc"):
        if shutil.which(command) is None:
            raise OSError(f"needs the command {command}")
    try:
        for host in HOSTS:
            _run("ip", "netns", "add", host.name)
        _run("ip", "link", "add", HOSTS[0].cable, "type", "veth", "peer", "name", HOSTS[1].cable)
        for name, cable, address in HOSTS:
            within = ["ip", "-n", name]
            _run("ip", "link", "set", cable, "netns", name)
            _run(*within, "addr", "add", f"{address}/24", "dev", cable)
            for device in (cable, "lo"):
                _run(*within, "link", "set", device, "up")
            _run("ip", "netns", "exec", name, *ALONE, "true")  # that too may be forbidden
            if rate:
                limit = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
                _run("tc", "-n", name, "qdisc", "add", "dev", cable, *limit)
        yield HOSTS
    finally:
        for host in HOSTS:
            host.signal(signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)


def torchrun(
    host: Host,
    ranks: int,
    arguments: Sequence[str],
    logs: Path,
    output: IO[str] | None = None,
    *,
    sees_others: bool = False,
) -> subprocess.Popen[bytes]:
    """Start torchrun on one of the two hosts, with that many ranks. `logs`: a folder, which
    torchrun does not remove. `sees_others`: processes see those of the other host, too."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
    command += [f"--nproc-per-node={ranks}", f"--node-rank={HOSTS.index(host)}"]
    command += [f"--master-addr={HOSTS[0].address}", f"--master-port={PORT}", f"--log-dir={logs}"]
    alone = [] if sees_others else ALONE
    own = {"GLOO_SOCKET_IFNAME": host.cable, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    return subprocess.Popen(
        ["ip", "netns", "exec", host.name, *alone, *command, *arguments],
        env=os.environ | own,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        start_new_session=True,
    )


def finish(nodes: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[Host]:
    """Wait for what `torchrun` has started on both. Returns those that were late, whose processes
    have printed where they were."""
    until = time.monotonic() + seconds
    while any(node.poll() is None for node in nodes) and time.monotonic() < until:
        time.sleep(0.05)
    late = [host for host, node in zip(HOSTS, nodes, strict=True) if node.poll() is None]
    for host in late:
        host.signal(signal.SIGABRT)
    for node in nodes:
        node.wait(seconds)
    return late


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, encoding="utf-8")
