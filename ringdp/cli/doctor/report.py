"""`ringdp doctor`: reports what is installed and works, and how to mend what does not.

A check is a function that returns a Check. ringdp can run if every needed check is well; the others
show what else would be possible, or faster.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from ringdp import _core
from ringdp.cli.console import folding, put
from ringdp.transport.device.streams import advice_to_install
from ringdp.transport.nccl.library import HOST
from ringdp.transport.peer.kernels import FATBIN

MIB = 1 << 20
SECONDS = 60.0  # for a compiler's version or an import: broken ones may hang


class Check(NamedTuple):
    """`advice` says what to do, unless all is well. ringdp cannot run without what is `needed`."""

    what: str
    found: str
    advice: str = ""
    needed: bool = False

    @property
    def well(self) -> bool:
        return not self.advice


def python() -> Check:
    return Check("Python", f"{platform.python_version()} at {sys.executable}", needed=True)


def core() -> Check:
    return Check("ringdp's C++", _core.__file__, needed=True)


def compiler() -> Check:
    command = os.environ.get("CXX", "").split() or ["g++"]  # may be "ccache g++", or have options
    advice = "only to build from source: install g++, or set CXX"
    return _tool("C++ compiler", advice, *command)


def make() -> Check:
    return _tool("make", "only for the Makefile: install make, or run its commands", "make")


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
        return Check(what, f"memfd: {error}", advice, needed=True)
    return Check(what, f"memfd works; {_memory()}", needed=True)


def peers() -> Check:
    """Whether a process may open another's descriptors, as ranks open rank 0's segment."""
    what = "other ranks' memory"
    with _child() as (pid, fd):
        try:
            os.close(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY))
        except OSError as error:
            advice = "mount /proc without hidepid; run all ranks as one user, in one container"
            return Check(what, f"/proc/PID/fd: {error.strerror}", advice, needed=True)
    return Check(what, "opens through /proc/PID/fd", needed=True)


def pidfd() -> Check:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        advice = "a rank's death is seen by its pid instead, once its parent has reaped it"
        return Check("pidfd", str(error), advice)
    return Check("pidfd", "a rank's death is seen at once")


def shm_directory() -> Check:
    """ringdp does not use /dev/shm, but torch's data loaders and NCCL do."""
    what = "/dev/shm"
    try:
        free = shutil.disk_usage(what).free
    except OSError as error:
        return Check(what, f"{error.strerror}", "only NCCL and data loaders")
    small = "little for NCCL and for data loaders' workers: free some, or docker run --shm-size=1g"
    return Check(what, f"{free // MIB:,} MiB free", small if free < 256 * MIB else "")


def cores() -> Check:
    count, all_ = len(os.sched_getaffinity(0)), os.cpu_count()
    advice = "" if count > 1 else "ranks take turns on one core: correct, but slow"
    return Check("cores", f"{count} of {all_} may be used", advice)


def torch_() -> Check:
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for the CPU"
    return Check("torch", f"{torch.__version__}, {built}", needed=True)


def triton() -> Check:
    advice = "only for kernels on a GPU: pip install 'triton>=3.6'"
    return _package("Triton", ("triton",), "triton", advice)


def cupy() -> Check:
    """Its binding to NCCL, over ringdp's host library; `nccl` looks for a real one.

    `cupy.cuda.nccl` can be imported even if the binding cannot.
    """
    advice = f"only for the NCCL transport: {advice_to_install()}"
    names = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
    load = f"import ctypes; ctypes.CDLL({str(HOST)!r}, ctypes.RTLD_GLOBAL)"
    return _package("CuPy", names, "cupy_backends.cuda.libs.nccl", advice, before=load)


def nccl() -> Check:
    """Find every libnccl.so.2 that a process could load: two in one process conflict."""
    found = sorted({str(path.resolve()) for path in _libnccl()})
    packages = [p for p in ("nvidia-nccl-cu12", "nvidia-nccl-cu13") if _version(p)]
    what, versions = "libnccl", ", ".join(f"{p} {_version(p)}" for p in packages)
    if len(packages) > 1:
        advice = "they overwrite one another: pip uninstall both, then install one again"
        return Check(what, versions, advice)
    if not found:
        return Check(what, "none", f"only for the NCCL transport: {advice_to_install()}")
    text = f"{len(found)}: {', '.join(found)}" + f" ({versions})" * bool(versions)
    several = f"make sure that one is loaded: LD_PRELOAD={found[0]}"
    return Check(what, text, several if len(found) > 1 else "")


def gpus() -> Check:
    count = torch.cuda.device_count()
    if count == 0:
        driver = Path("/proc/driver/nvidia/version").exists()
        advice = "a driver is there: install a torch built for CUDA" if driver else ""
        return Check("GPUs", "none; ranks use the CPU and shared memory", advice)
    try:
        names = {torch.cuda.get_device_name(i) for i in range(count)}
    except RuntimeError as error:  # the driver counts GPUs even where CUDA cannot start
        reason = str(error).partition("\n")[0]
        return Check("GPUs", f"{count}, but CUDA fails: {reason}", "check the driver: nvidia-smi")
    return Check("GPUs", f"{count}: {', '.join(sorted(names))}")


def peer() -> Check:
    what = "CUDA kernels"
    if FATBIN.exists():
        return Check(what, f"{FATBIN.name}, for peer memory, which takes a GPU and CuPy")
    advice = "only for peer memory: install ringdp again where there is an nvcc"
    return Check(what, f"no {FATBIN.name}", advice)


# Those that fork come first, which is safest before torch starts threads.
CHECKS: tuple[Callable[[], Check], ...] = (
    python, core, compiler, make, memfd, peers, pidfd, shm_directory, cores,
    torch_, triton, cupy, nccl, peer, gpus,
)  # fmt: skip


def examine() -> list[Check]:
    return [check() for check in CHECKS]


def show(checks: Sequence[Check], console: Console, *, as_json: bool) -> int:
    """Print the checks. The exit code is 0 if ringdp can run."""
    runs = all(c.well for c in checks if c.needed)
    if as_json:
        keys = ("what", "found", "well", "needed", "advice")
        found = [{key: getattr(check, key) for key in keys} for check in checks]
        print(json.dumps({"runs": runs, "checks": found}, indent=1))
        return int(not runs)
    table = folding("", "", "", shown=False)
    for check in checks:
        todo = f"\n-> {check.advice}" if check.advice else ""
        mark = "ok" if check.well else "NO" if check.needed else "-"
        table.add_row(mark, check.what, check.found + todo)
    put(console, table)
    console.print("ringdp can run here" if runs else "ringdp cannot run here")
    return int(not runs)


def _tool(what: str, advice: str, name: str, *options: str) -> Check:
    where = shutil.which(name)
    if where is None:
        return Check(what, f"no {name}", advice)
    command = (where, *options, "--version")
    said, failure = _tried(*command)
    if failure:
        return Check(what, f"`{' '.join(command)}` {failure}", advice)
    return Check(what, said.strip().partition("\n")[0] or where)


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


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _package(
    what: str, names: tuple[str, ...], module: str, advice: str, *, before: str = ""
) -> Check:
    """Check that one of the packages is installed, and that a new process can import `module`,
    after the statements `before`."""
    versions = [version for name in names if (version := _version(name))]
    if not versions:
        return Check(what, "not installed", advice)
    _, failure = _tried(sys.executable, "-c", f"{before}\nimport {module}")
    if failure:
        return Check(what, f"{versions[0]}, but `import {module}` {failure}", advice)
    return Check(what, versions[0])


def _tried(*command: str) -> tuple[str, str]:
    """Run a command; return what it printed, and how it failed, which is empty if it did not."""
    try:
        ran = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return "", "hangs"
    except OSError as error:
        return "", f"fails: {error.strerror}"
    last = ran.stderr.strip().splitlines()[-1:] or [f"exit code {ran.returncode}"]
    return ran.stdout or ran.stderr, f"fails: {last[0]}" if ran.returncode else ""


def _libnccl() -> list[Path]:
    """All places where the loader or a package finds libnccl."""
    places = [Path(p) for p in os.environ.get("LD_PRELOAD", "").replace(":", " ").split()]
    paths = [p for p in places if p.name.startswith("libnccl.so") and p.exists()]
    directories = [Path(d) for d in os.environ.get("LD_LIBRARY_PATH", "").split(":") if d]
    directories += [Path("/usr/lib"), Path("/usr/lib64"), Path("/usr/local/lib")]
    directories += Path("/usr/lib").glob("*-linux-gnu")
    directories += Path("/usr/local").glob("cuda*/lib64")
    spec = find_spec("nvidia")
    directories += [
        Path(d, "nccl", "lib") for d in (spec.submodule_search_locations if spec else None) or ()
    ]
    return paths + [d / "libnccl.so.2" for d in directories if (d / "libnccl.so.2").exists()]
