"""`triton.jit` put off to the first launch, and later launches that cost the host little.

A decorated function is plain Python until it is launched, so a machine without Triton can import
its module. At each launch Triton looks up which compiled variant the arguments need, which takes
longer than the launch itself; here the answer is kept. Leaves out: Triton's hooks, which see the
first launch only, and helpers: a kernel may call `tl` only, not another decorated function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ringdp._core import Launch

from .address import address
from .compiled import Variant, variant_of


class Kernel:
    """A kernel: `launch(...)` launches it; `function` is Triton's own object, for compilers.

    `unspecialized`: names of the last arguments, whose values never need another variant. Numbers
    among them are annotated with their dtype.
    `capturable`: whether a CUDA graph may contain it, which repeats the arguments of its capture.
    `options`: the compiler's, such as `num_warps`. Fusion of multiply-adds is off by default, since
    the references round each operation.
    """

    def __init__(
        self,
        fn: Callable[..., None],
        unspecialized: tuple[str, ...],
        options: dict[str, int],
        *,
        capturable: bool,
    ) -> None:
        self.fn, self.unspecialized, self.capturable = fn, unspecialized, capturable
        self.options = {"enable_fp_fusion": False} | options
        self.__doc__ = fn.__doc__
        self._variants: dict[tuple[Any, ...], Variant | None] = {}

    @cached_property
    def function(self) -> Any:
        """A JITFunction, or an InterpretedFunction where TRITON_INTERPRET=1 at the first use."""
        import triton
        import triton.language as tl

        self.fn.__globals__["tl"] = tl
        return triton.jit(self.fn, do_not_specialize=self.unspecialized)

    def launch(self, programs: int, *args: Any, **constants: Any) -> Launch | None:
        """On the first argument's device, whichever is the current one, and its current stream.

        `args` begin with a tensor; integers are not negative. `constants` are all the `constexpr`
        parameters in order, with torch's dtypes. Returns a Launch that repeats it while this device
        is the current one and the tensors stay where they are; None if the device is not, if only
        Triton can launch it, and in the interpreter. Raises RuntimeError during the capture of a
        CUDA graph, unless it is capturable, and ValueError as `address` does: a GPU that reads what
        was freed is of no more use.
        """
        device = args[0].get_device()  # -1: the interpreter
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self.launch(programs, *args, **constants)
            return None
        if device >= 0 and not self.capturable and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self.fn.__name__} was launched in the capture of a CUDA graph, which would "
                "repeat its step, its seed or its table of addresses; call it outside the graph"
            )
        values = tuple(address(x) if isinstance(x, Tensor) else x for x in args)
        late = len(args) - len(self.unspecialized)
        key = (device, *map(_variant, args[:late], values), *constants.values())
        if known := self._variants.get(key):
            launch = known.launch(programs, values)
            if launch.run(raw_stream(device), values[late:]):
                return launch
        named = {name: triton_dtype(x) for name, x in constants.items()}
        compiled = self.function[(programs,)](*args, **named, **self.options)
        if key not in self._variants:
            self._variants[key] = variant_of(compiled, self.unspecialized)
        found = self._variants[key]
        return found and found.launch(programs, values)


def raw_stream(device: int) -> int:
    """The current stream's handle; `torch.cuda.current_stream` would make an object for it."""
    return torch._C._cuda_getCurrentRawStream(device) if device >= 0 else 0


def jit(
    *, unspecialized: tuple[str, ...] = (), capturable: bool = False, **options: int
) -> Callable[[Callable[..., None]], Kernel]:
    """A decorator: see Kernel."""
    return lambda fn: Kernel(fn, unspecialized, options, capturable=capturable)


def _variant(x: Any, value: Any) -> Any:
    """A key for an argument, equal only if Triton would compile the same variant for it.

    `value` is the argument, or a tensor's address.
    """
    kind = type(x)
    if kind is int:
        return x if x == 1 else (x & 15 == 0, x >> 31 > 0, x >> 63)
    if kind is not float and isinstance(x, Tensor):  # isinstance is the slower test
        return x.dtype, value & 15
    return kind


def triton_dtype(constant: Any) -> Any:
    """Triton's name for a torch dtype, and any other constant as it is."""
    if not isinstance(constant, torch.dtype):
        return constant
    import triton.language as tl

    return getattr(tl, str(constant).removeprefix("torch."))


def sixteens(*tensors: Tensor) -> Iterable[tuple[int, int, Sequence[Tensor]]]:
    """Note [16-byte accesses]

    A masked access stays 16 bytes wide only if Triton knows that the mask changes at a multiple of
    16 elements, that is, if the length is such a multiple. Any other length takes two launches: one
    up to the last multiple, and one for the fewer than 16 elements that are left. Yields for each
    the first element, the number of elements, and the slices of the tensors [..., elems]. Flat
    buffers are padded, so the second launch is rare.
    """
    elems = tensors[0].shape[-1]
    body = elems & ~15
    if body == elems > 0:
        return ((0, elems, tensors),)  # as they are: slices would cost as much as the launch
    return [
        (first, last - first, [x[..., first:last] for x in tensors])
        for first, last in ((0, body), (body, elems))
        if first < last
    ]
