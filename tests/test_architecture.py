"""Which package may import which (read from the sources), no import cycles, and the public
names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import get_type_hints

import pytest

import ringdp
import ringdp.kernels
import ringdp.schedule

ROOT = Path(__file__).parent.parent
MODULES = {
    "ringdp." + ".".join(p.relative_to(ROOT / "ringdp").with_suffix("").parts): p
    for p in (ROOT / "ringdp").rglob("*.py")
} | {
    "ringdp.kernels." + p.stem: p for p in (ROOT / "kernels").glob("*.py")
}  # fmt: skip

# Package -> the packages that it may import, besides itself. `_core` is csrc.
MAY = {
    "errors": set(),
    "tape": {"errors"},
    "kernels": {"_core"},
    "schedule": {"errors"},
    "transport": {"schedule", "kernels", "errors", "_core"},
    "comm": {"schedule", "transport", "tape", "errors"},
    "parallel": {"comm", "kernels", "tape", "errors"},
    "cli": {"schedule", "transport", "comm", "parallel", "kernels", "tape", "errors", "", "_core"},
    "": {"comm", "parallel", "errors"},
    "__main__": {"cli"},
}
# Package -> the third-party packages that it may import, besides the standard library.
OUTSIDE = {
    "errors": set(),
    "tape": set(),
    "kernels": {"torch", "triton"},
    "schedule": {"numpy"},
    "transport": {"numpy", "torch", "cupy"},
    "comm": {"torch"},
    "parallel": {"torch", "safetensors"},
    "cli": {"torch", "numpy", "typer", "rich", "click", "mpi4py"},
    "": set(),
    "__main__": set(),
}


def room(module: str) -> str:
    parts = module.split(".")
    name = parts[1] if len(parts) > 1 else ""
    return "" if name == "__init__" else name


@cache
def imports(module: str) -> set[str]:
    """The absolute names of all modules that a module imports, at the top or inside a function."""
    package = module.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{source}.{a.name}" if source == "ringdp" else source for a in node.names}
            found |= {f"{source}.{a.name}" for a in node.names if f"{source}.{a.name}" in MODULES}
    return found


def test_packages_import_only_what_they_may():
    for module, name in ((m, i) for m in MODULES for i in imports(m)):
        here, package = room(module), name.split(".")[0]
        if package == "ringdp":
            there = room(name) if room(name) in MAY or room(name) == "_core" else ""
            assert there == here or there in MAY[here], f"{module} imports {name}"
        elif package not in sys.stdlib_module_names:
            assert package in OUTSIDE[here], f"{module} imports {name}"


def test_transports_import_only_programs_of_the_schedule_package():
    used = {i for m in MODULES if room(m) == "transport" for i in imports(m)}
    assert {i for i in used if room(i) == "schedule" and i in MODULES} == {
        "ringdp.schedule.program"
    }


def test_cupy_is_imported_by_three_files_only():
    users = {m for m in MODULES if "cupy" in imports(m)}
    users |= {m for m in MODULES if 'import_module("cupy' in MODULES[m].read_text(encoding="utf-8")}
    assert users == {
        "ringdp.transport.nccl.library",
        "ringdp.transport.peer.kernels",
        "ringdp.transport.peer.windows",
    }


def test_numpy_is_imported_by_two_files_of_the_schedule_package():
    users = [m for m in MODULES if room(m) == "schedule" and "numpy" in imports(m)]
    assert sorted(users) == ["ringdp.schedule.cost", "ringdp.schedule.program"]


def test_the_engines_files_are_short_enough_to_read():
    lines = {
        module: path.read_text(encoding="utf-8").count("\n")
        for module, path in MODULES.items()
        if room(module) == "parallel"
    }
    assert not {module: count for module, count in lines.items() if count > 350}


def test_there_are_no_import_cycles():
    graph = {m: {i for i in imports(m) if i in MODULES} for m in MODULES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for after in graph[module]:
                visit(after, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


IMPORT = """
import sys, torch, ringdp
from ringdp.kernels import (
    adamw, flatten, fold, squared_norm, stochastic_round, unflatten, unscale
)
heavy = "cupy triton matplotlib typer rich sympy torch.distributed.fsdp torch.distributed.tensor"
print([m for m in heavy.split() if m in sys.modules])
x = [torch.ones(40) for _ in range(4)]
out = torch.empty(64)
flatten(x[:1], out, scale=0.5, offsets=[3])
fold(torch.ones(2, 40), x[0])
adamw(*x, step=1, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
unflatten(out, x[:1], offsets=[3])
unscale(out, out, torch.zeros(1), scale=0.5)
squared_norm(x)
stochastic_round(out, torch.empty(64, dtype=torch.bfloat16), seed=1)
print("triton" in sys.modules)
"""


def test_neither_the_import_nor_kernels_on_the_cpu_load_heavy_modules():
    """Every rank pays for the import; some parts of torch take longer than all of ringdp."""
    command = [sys.executable, "-c", IMPORT]
    run = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
    assert run.stdout.split() == ["[]", "False"]


@pytest.mark.parametrize("name", ringdp.__all__)
def test_annotations_of_public_names_resolve(name: str) -> None:
    public = getattr(ringdp, name)
    for annotated in (public, getattr(public, "__init__", public)):
        if isinstance(annotated, FunctionType | type):
            get_type_hints(annotated)


def test_public_names():
    assert sorted(ringdp.__all__) == [
        "AdamW",
        "CheckpointError",
        "CollectiveMismatch",
        "CollectiveTimeout",
        "CommunicationError",
        "Communicator",
        "DistributedDataParallel",
        "Engine",
        "FullyShardedDataParallel",
        "Link",
        "LossScaler",
        "ModelError",
        "Offload",
        "PeerLost",
        "Precision",
        "RingdpError",
        "ScheduleError",
        "SyncBatchNorm",
        "UsageError",
        "Work",
        "ZeroRedundancyOptimizer",
        "clip_grad_norm_",
        "export",
        "fully_shard",
        "init",
        "initialize",
        "load",
        "save",
        "shard",
        "trace",
    ]
    assert sorted(ringdp.schedule.__all__) == [
        "ALGORITHMS",
        "Builder",
        "Collective",
        "Contract",
        "Program",
        "Row",
        "Schedule",
        "Transfer",
        "contract",
        "fifo_depth",
        "fuse",
        "grid",
        "html",
        "project",
        "proved",
        "schedule",
        "svg",
        "verify",
    ]
    assert sorted(ringdp.kernels.__all__) == [
        "adamw",
        "flatten",
        "fold",
        "squared_norm",
        "stochastic_round",
        "unflatten",
        "unscale",
    ]


@pytest.mark.parametrize("package", [ringdp, ringdp.schedule, ringdp.kernels])
def test_public_names_exist_and_have_docstrings(package):
    for name in package.__all__:
        value = getattr(package, name)
        if isinstance(value, type) or hasattr(value, "__code__"):
            assert value.__doc__, name


def test_text_files_are_opened_with_an_explicit_encoding() -> None:
    """Without `encoding=` Python uses the locale's, which is ASCII under LC_ALL=C."""
    found = [
        f"{file.relative_to(ROOT)}:{call.lineno}"
        for room in ("ringdp", "kernels", "bench", "examples", "tests")
        for file in (ROOT / room).rglob("*.py")
        for call in ast.walk(ast.parse(file.read_bytes()))
        if isinstance(call, ast.Call) and _by_locale(call)
    ]
    assert found == [], 'say encoding="utf-8"'


def _by_locale(call: ast.Call) -> bool:
    """Whether the call reads or writes text of a file or process in the locale's encoding."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    given = {word.arg for word in call.keywords}
    before_mode = 1 if isinstance(call.func, ast.Name) else 0  # open(file, mode) or path.open(mode)
    mode = "".join(map(ast.unparse, call.args[before_mode : before_mode + 1]))
    if name in ("read_text", "write_text") or (
        name == "open" and re.fullmatch("|'[rwax+]+'", mode)
    ):
        return "encoding" not in given
    return "text" in given and name in ("run", "Popen")


def test_tensors_are_made_on_a_device_that_is_named() -> None:
    """Otherwise they are on the caller's default device, such as meta or a GPU, where what is meant
    for the host must not be."""
    found = [
        f"{file.relative_to(ROOT)}:{call.lineno}"
        for module, file in MODULES.items()
        if not module.startswith("ringdp.cli.")
        for call in ast.walk(ast.parse(file.read_bytes()))
        if isinstance(call, ast.Call) and _on_default_device(call)
    ]
    assert found == [], "say device="


def _on_default_device(call: ast.Call) -> bool:
    makers = "arange as_tensor asarray empty full ones scalar_tensor sparse_coo_tensor tensor zeros"
    made = ast.unparse(call.func) in [f"torch.{maker}" for maker in makers.split()]
    return made and "device" not in {word.arg for word in call.keywords}
