"""Checks of packages, libraries and GPUs by `ringdp doctor`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from ringdp.cli.doctor.host import Check
from ringdp.transport.nccl.library import INSTALL
from ringdp.transport.peer.kernels import FATBIN

IMPORT_SECONDS = 60.0  # for an import; a broken package may hang


def torch_() -> Check:
    import torch

    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for the CPU"
    oldest = (2, 11)
    old = tuple(map(int, torch.__version__.split(".")[:2])) < oldest
    advice = "pip install 'torch>=2.11'" if old else ""
    return Check("torch", f"{torch.__version__}, {built}", not old, needed=True, advice=advice)


def triton() -> Check:
    advice = "only for kernels on a GPU: pip install 'triton>=3.6'"
    return _package("Triton", ("triton",), "import triton", advice)


def cupy() -> Check:
    """Its import needs libnccl, so the import is tried."""
    advice = f"only for the NCCL transport: {_extra()}"
    names = ("cupy-cuda12x", "cupy-cuda13x", "cupy")
    return _package("CuPy", names, "from cupy.cuda import nccl", advice)


def nccl() -> Check:
    """Find every libnccl.so.2 that a process could load: two in one process conflict."""
    found = sorted({str(path.resolve()) for path in _libnccl()})
    packages = [p for p in ("nvidia-nccl-cu12", "nvidia-nccl-cu13") if _version(p)]
    what, versions = "libnccl", ", ".join(f"{p} {_version(p)}" for p in packages)
    if len(packages) > 1:
        advice = "they overwrite one another: pip uninstall both, then install one again"
        return Check(what, versions, well=False, advice=advice)
    if not found:
        return Check(what, "none", well=False, advice=f"only for the NCCL transport: {_extra()}")
    text = f"{len(found)}: {', '.join(found)}" + f" ({versions})" * bool(versions)
    if len(found) > 1:
        advice = f"make sure that one is loaded: LD_PRELOAD={found[0]}"
        return Check(what, text, well=False, advice=advice)
    return Check(what, text, well=True)


def gpus() -> Check:
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        driver = Path("/proc/driver/nvidia/version").exists()
        advice = "a driver is there: install a torch built for CUDA" if driver else ""
        return Check("GPUs", "none; ranks use the CPU and shared memory", not driver, advice=advice)
    names = [torch.cuda.get_device_name(i) for i in range(count)]
    return Check("GPUs", f"{count}: {', '.join(sorted(set(names)))}", well=True)


def peer() -> Check:
    what = "CUDA kernels"
    if FATBIN.exists():
        return Check(what, f"{FATBIN.name}, for peer memory, which takes a GPU and CuPy", well=True)
    advice = "only for peer memory: install ringdp again where there is an nvcc"
    return Check(what, f"no {FATBIN.name}", well=False, advice=advice)


PACKAGES: tuple[Callable[[], Check], ...] = (torch_, triton, cupy, nccl, peer, gpus)


def _extra() -> str:
    """How to install CuPy and NCCL: with the extra for torch's CUDA version, if it has one."""
    import torch

    major = str(torch.version.cuda).split(".")[0]
    return f"pip install 'ringdp[cuda{major}]'" if major in ("12", "13") else INSTALL


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _package(what: str, names: tuple[str, ...], code: str, advice: str) -> Check:
    """Check that one of the packages is installed, and that `code` runs in a new process."""
    versions = [version for name in names if (version := _version(name))]
    if not versions:
        return Check(what, "not installed", well=False, advice=advice)
    try:
        tried = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            encoding="utf-8",
            check=False,
            timeout=IMPORT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Check(what, f"{versions[0]}, but `{code}` hangs", well=False, advice="reinstall it")
    if tried.returncode == 0:
        return Check(what, versions[0], well=True)
    last = tried.stderr.strip().splitlines()[-1:] or [f"exit code {tried.returncode}"]
    return Check(what, f"{versions[0]}, but `{code}` fails: {last[0]}", well=False, advice=advice)


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
