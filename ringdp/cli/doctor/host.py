"""Checks of the host by `ringdp doctor`: build tools, and what the kernel allows."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

MIB = 1 << 20


class Check(NamedTuple):
    """`advice` says what to do, if anything. ringdp cannot run without what is `needed`."""

    what: str
    found: str
    well: bool
    needed: bool = False
    advice: str = ""


def python() -> Check:
    version, where = platform.python_version(), sys.executable
    advice = "" if sys.version_info >= (3, 11) else "install Python 3.11 or newer"
    return Check("Python", f"{version} at {where}", not advice, needed=True, advice=advice)


def core() -> Check:
    """Nothing of ringdp can be imported without it, including this command."""
    spec = find_spec("ringdp._core")
    return Check("ringdp's C++", f"{spec and spec.origin}", spec is not None, needed=True)


def compiler() -> Check:
    name = os.environ.get("CXX", "g++")
    advice = "only to build from source: install g++, or set CXX"
    return _tool("C++ compiler", name, advice)


def make() -> Check:
    return _tool("make", "make", "only for the Makefile: install make, or run its commands")


def memfd() -> Check:
    what = "shared memory"
    try:
        fd = os.memfd_create("ringdp-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, MIB)
            os.posix_fallocate(fd, 0, MIB)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        finally:
            os.close(fd)
    except OSError as error:
        advice = "Linux 3.17 or newer, and a sandbox that allows memfd_create, are needed"
        return Check(what, f"memfd: {error}", well=False, needed=True, advice=advice)
    return Check(what, f"memfd works; {_memory()}", well=True, needed=True)


def peers() -> Check:
    """Whether a process may open another's descriptors, as ranks open rank 0's segment."""
    what = "other ranks' memory"
    with _child() as (pid, fd):
        try:
            os.close(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY))
        except OSError as error:
            advice = "mount /proc without hidepid; run all ranks as one user, in one container"
            found = f"/proc/PID/fd: {error.strerror}"
            return Check(what, found, well=False, needed=True, advice=advice)
    return Check(what, "opens through /proc/PID/fd", well=True, needed=True)


def pidfd() -> Check:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        advice = "a rank's death is seen by its pid instead, once its parent has reaped it"
        return Check("pidfd", str(error), well=False, advice=advice)
    return Check("pidfd", "a rank's death is seen at once", well=True)


def shm_directory() -> Check:
    """ringdp does not use /dev/shm, but torch's data loaders and NCCL do."""
    what = "/dev/shm"
    try:
        size = shutil.disk_usage(what).total
    except OSError as error:
        return Check(what, f"{error.strerror}", well=False, advice="only NCCL and data loaders")
    advice = "small for NCCL and for data loaders' workers: docker run --shm-size=1g"
    well = size >= 256 * MIB
    return Check(what, f"{size // MIB:,} MiB", well, advice="" if well else advice)


def cores() -> Check:
    count, all_ = len(os.sched_getaffinity(0)), os.cpu_count()
    advice = "" if count > 1 else "ranks take turns on one core: correct, but slow"
    return Check("cores", f"{count} of {all_} may be used", count > 1, advice=advice)


HOST: tuple[Callable[[], Check], ...] = (
    python, core, compiler, make, memfd, peers, pidfd, shm_directory, cores,
)  # fmt: skip


def _tool(what: str, name: str, advice: str) -> Check:
    where = shutil.which(name)
    if where is None:
        return Check(what, f"no {name}", well=False, advice=advice)
    said = subprocess.run([where, "--version"], capture_output=True, encoding="utf-8", check=False)
    lines = (said.stdout or said.stderr).splitlines()
    return Check(what, lines[0] if lines else where, well=True)


def _memory() -> str:
    """The available memory, and the container's limit if it has one."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    fields = dict(line.split(":") for line in lines)
    available = int(fields["MemAvailable"].split()[0]) // 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="utf-8").strip() if limit.exists() else "max"
    within = f", {int(text) // MIB:,} MiB in this container" if text.isdigit() else ""
    return f"{available:,} MiB of memory available{within}"


@contextmanager
def _child() -> Iterator[tuple[int, int]]:
    """Fork an idle process; yield its pid and a descriptor that is open in it."""
    fd = os.memfd_create("ringdp-doctor", os.MFD_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    try:
        yield pid, fd
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(fd)
