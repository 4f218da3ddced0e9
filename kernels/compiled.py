"""How the CUDA driver launches a kernel that Triton compiled.

Triton's own launcher works out the same at every launch, which takes longer than the launch itself.
What is not exactly as expected here is left to it: a kernel that takes more than a plain launch,
another version of Triton, another kind of device.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ctypes import CDLL, c_void_p, cast
from functools import cache
from typing import Any, NamedTuple

from ringdp._core import Driver, Launch

# Triton's types -> their kinds in csrc/launches.hpp. A type's last two digits are its bits.
KINDS = {"i32": "i", "u32": "i", "i64": "i", "u64": "i", "fp32": "f", "fp64": "d"}
POINTER = "u64"
NULL = "0"  # the kind of a pointer to scratch memory
# What Triton says about a kernel that takes a plain launch.
PLAIN = {
    "num_ctas": 1,
    "launch_cooperative_grid": False,
    "launch_pdl": False,
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
}


class Variant(NamedTuple):
    """A kernel compiled for some types, constants and alignments."""

    function: int  # the driver's handle
    threads: int
    shared: int  # bytes
    kinds: str  # of its arguments
    taken: tuple[int, ...]  # places of the values that it takes before those of `unspecialized`

    def launch(self, programs: int, values: tuple[Any, ...]) -> Launch:
        """A launch for these values, still to be run with those of `unspecialized`."""
        given = tuple(values[i] for i in self.taken)
        return Launch(
            driver(), self.function, programs, self.threads, self.shared, self.kinds, given
        )


def variant_of(compiled: Any, unspecialized: Sequence[str]) -> Variant | None:
    """Return how to launch Triton's CompiledKernel; None if Triton must, and in the interpreter.

    The code takes the arguments that are no constants of this variant, and after them pointers to
    scratch memory, which are null since it needs none.
    """
    try:
        metadata, signature = compiled.metadata, compiled.src.signature
        if any(getattr(metadata, name) != value for name, value in PLAIN.items()):
            return None
        taken = {name: kind for name, kind in signature.items() if kind != "constexpr"}
        (head,) = re.findall(r"\.entry[^{]*", compiled.asm["ptx"])
        (threads,) = re.findall(r"\.reqntid (\d+)\s*(?:\.maxnreg \d+\s*)?$", head)
        bits = [int(x) for x in re.findall(r"\.param (?:\.[a-z](\d+) )?", head)]
        types = [POINTER if kind.startswith("*") else kind for kind in taken.values()]
        scratch = len(bits) - len(types)
        if bits != [int(kind[-2:]) for kind in [*types, *[POINTER] * scratch]]:
            return None
        early = [i for i, x in enumerate(signature) if x in taken and x not in unspecialized]
        kinds = "".join(KINDS[kind] for kind in types) + NULL * scratch
        return Variant(compiled.function, int(threads), metadata.shared, kinds, tuple(early))
    except (AttributeError, KeyError, ValueError):
        return None


@cache
def driver() -> Driver:
    library = CDLL("libcuda.so.1")  # Triton has loaded it
    names = "cuCtxGetCurrent", "cuStreamIsCapturing", "cuLaunchKernel", "cuGetErrorString"
    return Driver([cast(getattr(library, name), c_void_p).value for name in names])
