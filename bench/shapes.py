"""Times the kernels in other launch shapes than their own: is their own still the fastest?

    python -m bench.shapes [KERNEL ...] [--json F] [--rounds N]    # on a GPU; all, if none is named

A shape is what a kernel's constants and the compiler's options say: elements of a program, threads,
programs, registers. For each one the kernel's module is loaded anew and its constants are replaced.
As in `ringdp bench kernels`, all shapes take turns with a copy that moves as many bytes. They must
give the same bits, or for a norm the same sum but for its rounding.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.results import parser
from ringdp.cli.bench.kernel_cases import CASES
from ringdp.cli.bench.kernels import COPY, Timer, copy_of, interleaved, timer_of
from ringdp.cli.files import write_json
from ringdp.kernels.jit import Kernel
from ringdp.kernels.repeats import Repeats

SIZES = (64 << 20, 256 << 20)  # bytes of a float32 buffer
OWN = "as it is"


class Shape(NamedTuple):
    """What replaces constants of a kernel's module, and options of its compiler."""

    constants: Mapping[str, int] = MappingProxyType({})
    options: Mapping[str, int] = MappingProxyType({})

    def __str__(self) -> str:
        return ", ".join(f"{k} {v}" for k, v in {**self.constants, **self.options}.items()) or OWN


Call = Callable[[], Tensor]


class Case(NamedTuple):
    module: str  # of ringdp.kernels, or bench
    kernel: str  # the name in the module
    call: Callable[[ModuleType, int, torch.device], Call]  # for so many elements
    shapes: list[Shape]  # beside its own


def norm(of: torch.dtype, module: ModuleType, elems: int, device: torch.device) -> Call:
    x = torch.ones(elems * 4 // of.itemsize, dtype=of, device=device)
    return lambda: module.squared_norm_triton([x])


def pipelined(of: torch.dtype, module: ModuleType, elems: int, device: torch.device) -> Call:
    made: Call = module.PipelinedNorm(torch.ones(elems * 4 // of.itemsize, dtype=of, device=device))
    return made


def giving(out: Tensor, act: Callable[[], object]) -> Call:
    """A call that returns what `act` writes to."""

    def call() -> Tensor:
        act()
        return out

    return call


def flatten(module: ModuleType, elems: int, device: torch.device) -> Call:
    size = -(-elems // 64)
    places = list(range(0, elems, size))
    tensors = [torch.ones(min(size, elems - at), device=device) for at in places]
    out, to = torch.empty(elems, device=device), {"into_flat": True, "repeats": Repeats()}
    return giving(out, lambda: module.copy(tensors, out, -1.0, places, "out", **to))


def unscale(module: ModuleType, elems: int, device: torch.device) -> Call:
    x, found = torch.ones(elems, device=device), torch.zeros(1, device=device)
    out = torch.empty_like(x)
    return giving(out, lambda: module.unscale_triton(x, out, found, -1.0))


def stochastic(module: ModuleType, elems: int, device: torch.device) -> Call:
    x = torch.linspace(1, 2, elems, device=device)
    out = torch.empty(elems, dtype=torch.bfloat16, device=device)
    return giving(out, lambda: module.stochastic_round_triton(x, out, module.keys(1), 0))


def fold(module: ModuleType, elems: int, device: torch.device) -> Call:
    parts, out = torch.ones(8, elems, device=device), torch.empty(elems, device=device)
    return giving(out, lambda: module.fold_triton(parts, out, torch.float32))


def adamw(module: ModuleType, elems: int, device: torch.device) -> Call:
    state = [torch.full((elems,), 0.1, device=device) for _ in range(4)]
    copy = torch.empty(elems, dtype=torch.bfloat16, device=device)
    factors = module.factors_of(1, 0.0, 0.9, 0.999, 1e-8, 0.0)
    return giving(copy, lambda: module.adamw_triton(*state, copy, factors))


BLOCKS = [Shape({"BLOCK": n}) for n in (512, 1024, 2048, 4096)]
NORMS = [
    *(Shape({"PROGRAMS": n}) for n in (264, 396, 528, 660, 1056)),
    *(Shape({"BLOCK": n}) for n in (4096, 16384)),
    Shape({"THREADS": 128, "PROGRAMS": 1584}, {"num_warps": 4}),
    Shape({"THREADS": 512, "PROGRAMS": 396}, {"num_warps": 16}),
    # With more registers the compiler has 6 of a chunk's 8 loads in flight at once, or all, not 2.
    # So many programs are then resident on an H200's 132 multiprocessors.
    Shape({"PROGRAMS": 660}, {"maxnreg": 48}),
    Shape({"PROGRAMS": 528}, {"maxnreg": 64}),
    Shape({"PROGRAMS": 396}, {"maxnreg": 80}),
    Shape({"PROGRAMS": 528, "BLOCK": 4096}, {"maxnreg": 64}),
    Shape({"PROGRAMS": 264, "THREADS": 512}, {"num_warps": 16, "maxnreg": 64}),
]
# A program holds STAGES - 1 chunks in shared memory, of which an H200's multiprocessor has 227 KiB:
# this, too, bounds how many programs are resident at once.
PIPELINED = [
    Shape({"STAGES": 1}),
    Shape({"STAGES": 2}),
    Shape({"STAGES": 4, "PROGRAMS": 528}),
    Shape({"PROGRAMS": 528}),
    Shape({"PROGRAMS": 396}),
    Shape({"BLOCK": 8192, "STAGES": 1}),
    Shape({"BLOCK": 8192, "STAGES": 2}),
    Shape({"BLOCK": 8192, "PROGRAMS": 396}),
    Shape({"BLOCK": 2048, "STAGES": 5}),
    Shape({"THREADS": 128, "BLOCK": 1024, "STAGES": 8}, {"num_warps": 4}),
    Shape({"THREADS": 128, "BLOCK": 2048, "STAGES": 4, "PROGRAMS": 1056}, {"num_warps": 4}),
    Shape({"THREADS": 512, "BLOCK": 8192, "PROGRAMS": 396}, {"num_warps": 16}),
]
SWEEPS: dict[str, Case] = {
    **{
        f"squared_norm{name}{how}": Case(module, kernel, partial(call, of), shapes)
        for module, kernel, call, shapes, how in (
            ("ringdp.kernels.norm", "squared_norm_kernel", norm, NORMS, ""),
            ("bench.pipelined", "pipelined_norm_kernel", pipelined, PIPELINED, " pipelined"),
        )
        for of, name in ((torch.float32, ""), (torch.bfloat16, " of bfloat16"))
    },
    "flatten": Case(
        "ringdp.kernels.copying",
        "copy_kernel",
        flatten,
        [Shape({"CHUNK": n << 10}) for n in (2, 8, 16)],
    ),
    "unscale": Case("ringdp.kernels.unscale", "unscale_kernel", unscale, BLOCKS),
    "stochastic_round": Case(
        "ringdp.kernels.stochastic", "stochastic_round_kernel", stochastic, BLOCKS
    ),
    "fold": Case("ringdp.kernels.fold", "fold_kernel", fold, BLOCKS),
    "adamw": Case("ringdp.kernels.adamw", "adamw_kernel", adamw, BLOCKS),
}


@dataclass(frozen=True)
class Row:
    kernel: str
    size: int  # bytes of a float32 buffer
    shape: str
    min_us: float
    p50_us: float
    max_us: float
    percent_of_copy: float  # by medians


def shaped(case: Case, shape: Shape) -> ModuleType:
    """The kernel's module, loaded anew, in this shape."""
    spec = importlib.util.find_spec(case.module)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in shape.constants.items():
        assert hasattr(module, name), f"{case.module} has no {name}"
        setattr(module, name, value)
    kernel: Kernel = getattr(module, case.kernel)
    kernel.options |= shape.options
    return module


def measure(
    name: str, elems: int, device: torch.device, rounds: int, timer: Timer
) -> tuple[list[Row], dict[str, str]]:
    """Rows of one kernel, and why shapes have none."""
    case = SWEEPS[name]
    calls = {
        str(shape): case.call(shaped(case, shape), elems, device)
        for shape in [Shape(), *case.shapes]
    }
    wrong, want = dict[str, str](), calls[OWN]().clone()
    for shape, call in list(calls.items()):
        try:
            off = (call() - want).abs().max().item()
        except Exception as e:
            wrong[shape] = f"{type(e).__name__}: {e}"
            del calls[shape]
            continue
        if not off <= (elems * 2.0**-52 * want.item() if want.dim() == 0 else 0):
            wrong[shape] = f"its result is off by {off}"
    moves = CASES[name.split()[0]].moves
    times, failed = interleaved(calls | {COPY: copy_of(moves, elems, device)}, rounds, timer)
    copied = median(times.pop(COPY))
    rows = [
        Row(
            name,
            4 * elems,
            shape,
            *(round(1e6 * t, 2) for t in (min(found), median(found), max(found))),
            percent_of_copy=round(100 * copied / median(found), 1),
        )
        for shape, found in times.items()
    ]
    return rows, wrong | failed


def main() -> int:
    made = parser(__doc__, rounds=10)
    made.add_argument("kernels", nargs="*", help=", ".join(SWEEPS))
    args = made.parse_args()
    if unknown := set(args.kernels) - set(SWEEPS):
        made.error(f"there is no {', '.join(unknown)}, but {', '.join(SWEEPS)}")
    if not torch.cuda.is_available():
        print("launch shapes are a GPU's, and torch finds none here", file=sys.stderr)
        return 2
    found: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "rows": [], "wrong": {}}
    device = torch.device("cuda")
    for name in args.kernels or SWEEPS:
        for size in SIZES:
            rows, wrong = measure(name, size // 4, device, args.rounds, timer_of(size, device))
            print(f"\n{name}, {size:,} bytes")
            for row in sorted(rows, key=lambda row: row.p50_us):
                print(
                    f"{row.p50_us:9.2f} µs ({row.min_us:.2f} to {row.max_us:.2f}), "
                    f"{row.percent_of_copy:5.1f} % of a copy: {row.shape}"
                )
            found["rows"] += map(asdict, rows)
            found["wrong"] |= {f"{name}, {shape}": why for shape, why in wrong.items()}
            for shape, why in wrong.items():
                print(f"{shape}: {why}")
            write_json(args.json, found)
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
