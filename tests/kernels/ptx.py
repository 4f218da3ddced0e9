"""Executes PTX on the host, so compiled kernels can be compared with the references without a GPU.

Triton's interpreter runs the kernels' Python and ignores alignment hints: if a hint that an address
or a length is a multiple of 16 is wrong, only compiled code goes astray.

All blocks of a launch execute in step, and a register is an array over their threads. At a
divergent branch the blocks split; the part with the last block runs after the other, as it may wait
for the others. The threads of a block must not diverge, which holds in Triton's code. Vector
accesses must be aligned, all accesses must lie in tensors, and a register that was never written
holds noise. Instructions that the kernels do not use are errors. What ptxas does, and the order of
memory accesses, are left out.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.kernels.ptx_code import Code, Line, names
from tests.kernels.ptx_memory import MEMORY, PAGE, Tensors
from tests.kernels.ptx_numbers import (
    COMPARISONS,
    FLOAT,
    HALVES,
    NATURAL,
    OPERATIONS,
    REALS,
    SIGNED,
    Lanes,
    as_bits,
    bits_of,
    quotient,
    real_of,
    rounded,
)

WIDTHS = {"rs": 16, "r": 32, "rd": 64}  # bits of a register, by the prefix of its name
BLOCKS_IN_STEP = 4096  # blocks that execute in step
MAX_INSTRUCTIONS = 100_000  # instructions of a block; more is an endless loop
_tensors = Tensors()


class Blocks:
    """Blocks of a launch that are at the same instruction."""

    def __init__(
        self,
        code: Code,
        blocks: Lanes,
        launched: int,
        arguments: list[int],
        shared: Lanes,  # uint8[blocks, bytes]
        registers: dict[str, Lanes],
    ) -> None:
        self._code, self._blocks, self._launched = code, blocks, launched
        self._arguments, self._shared, self._registers = arguments, shared, registers
        self._lanes = len(blocks) * code.threads

    def run(self, at: int = 0) -> None:
        for _ in range(MAX_INSTRUCTIONS):
            line = self._code.lines[at]
            at += 1
            where = self._registers[line.predicate] != line.negated if line.predicate else None
            if line.name == "ret":
                return
            if line.name != "bra":
                self._do(line, where)
                continue
            to = self._code.labels[line.operands[0]]
            taken = np.ones(1, bool) if where is None else self._of_blocks(where)
            if taken.all():
                at = to
            elif taken.any():
                parts = (self._part(taken), to), (self._part(~taken), at)
                for part, begin in sorted(parts, key=lambda p: p[0]._blocks.max()):
                    part.run(begin)
                return
        raise AssertionError(f"{MAX_INSTRUCTIONS} instructions, and no end")

    def _of_blocks(self, where: Lanes) -> Lanes:
        by_block = where.reshape(-1, self._code.threads)
        assert (by_block == by_block[:, :1]).all(), "the threads of a block diverge"
        return by_block[:, 0]

    def _part(self, some: Lanes) -> Blocks:
        lanes = np.repeat(some, self._code.threads)
        registers = {name: x[lanes] for name, x in self._registers.items()}
        return Blocks(
            *(self._code, self._blocks[some], self._launched, self._arguments),
            *(self._shared[some], registers),
        )

    # --- operands

    def _get(self, name: str, bits: int) -> Lanes:
        threads = self._code.threads
        special = {
            "%tid": lambda: np.tile(np.arange(threads), len(self._blocks)),
            "%ctaid": lambda: np.repeat(self._blocks, threads),
            "%nctaid": lambda: np.full(self._lanes, self._launched),
            "global_smem": lambda: np.zeros(self._lanes, int),
        }
        if (base := name.removesuffix(".x")) in special:
            return special[base]().astype(NATURAL[bits])
        if name in self._registers:
            return self._registers[name]
        if name.startswith("%"):
            noise = np.random.default_rng(0).integers(0, 1 << 63, self._lanes, np.uint64)
            return noise.astype(NATURAL[bits])
        if bits == 1:
            return np.full(self._lanes, name not in ("0", "false"))
        # hexadecimal bits of a float
        prefix, base = (2, 16) if name[:2] in ("0f", "0d") else (0, 0)
        number = int(name[prefix:].rstrip("U"), base) & (1 << bits) - 1
        return np.full(self._lanes, number, NATURAL[bits])

    def _set(self, name: str, value: Lanes, where: Lanes | None) -> None:
        register = re.match(r"%(rs|rd|r)\d", name)
        assert not register or value.itemsize * 8 == WIDTHS[register[1]], (name, value.dtype)
        assert len(value) == self._lanes
        if where is not None:
            value = np.where(where, value, self._get(name, value.itemsize * 8))
        self._registers[name] = value

    def _address(self, operand: str) -> Lanes:
        base, *offset = names(operand)
        return self._get(base, 64) + np.uint64(int(offset[0], 0) if offset else 0)

    def _place(
        self, line: Line, operand: str, bits: int, count: int, where: Lanes | None
    ) -> tuple[Lanes, Any]:
        """The mask of the threads that access memory, and the index of each one's first element."""
        at = self._address(operand)
        mask = np.ones(self._lanes, bool) if where is None else where
        assert not (at[mask] % np.uint64(count * bits // 8)).any(), f"not aligned: {line.text}"
        if "shared" not in line.text:
            assert _tensors.hold(at[mask], count * bits // 8), f"in no tensor: {line.text}"
            at = at - np.uint64(PAGE)
        return mask, (at[mask] // np.uint64(bits // 8)).astype(np.int64)

    def _memory(self, line: Line, bits: int, mask: Lanes) -> tuple[Lanes, tuple[Any, ...]]:
        """The array that is accessed, and an index in front of the element's: the block, if
        shared."""
        if "shared" not in line.text:
            return MEMORY[bits], ()
        block = np.repeat(np.arange(len(self._blocks)), self._code.threads)
        return self._shared.view(NATURAL[bits]), (block[mask],)

    # --- instructions

    def _do(self, line: Line, where: Lanes | None) -> None:
        if act := getattr(self, f"_{line.name}", None):
            act(line, where)
        else:
            self._set(line.operands[0], self._computed(line), where)

    def _bar(self, line: Line, where: Lanes | None) -> None:
        """A barrier: nothing to do, since all threads execute in step."""

    def _ld(self, line: Line, where: Lanes | None) -> None:
        bits, into = bits_of(line.type), names(line.operands[0])
        if line.parts[0] == "param":
            number = self._arguments[int(re.findall(r"_param_(\d+)", line.text)[0])]
            loaded = [np.full(self._lanes, number & (1 << bits) - 1, NATURAL[bits])]
        else:
            mask, at = self._place(line, line.operands[1], bits, len(into), where)
            memory, before = self._memory(line, bits, mask)
            loaded = [np.zeros(self._lanes, NATURAL[bits]) for _ in into]
            for i, value in enumerate(loaded):
                value[mask] = memory[*before, at + i]
        for name, value in zip(into, loaded, strict=True):
            self._set(name, self._widened(value, name, line.type), where)

    def _widened(self, value: Lanes, name: str, kind: str) -> Lanes:
        """Extends a loaded value to the width of its register."""
        bits = WIDTHS[re.findall(r"%([a-z]+)", name)[0]]
        if kind.startswith("s"):
            return value.view(SIGNED[bits_of(kind)]).astype(SIGNED[bits]).view(NATURAL[bits])
        return value.astype(NATURAL[bits])

    def _st(self, line: Line, where: Lanes | None) -> None:
        bits, of = bits_of(line.type), names(line.operands[1])
        mask, at = self._place(line, line.operands[0], bits, len(of), where)
        memory, before = self._memory(line, bits, mask)
        for i, name in enumerate(of):
            memory[*before, at + i] = self._get(name, bits)[mask].astype(NATURAL[bits])

    def _atom(self, line: Line, where: Lanes | None) -> None:
        assert "exch" in line.parts, line.text
        old, place, new = line.operands
        self._ld(line._replace(operands=(old, place)), where)
        self._st(line._replace(operands=(place, new)), where)

    def _mov(self, line: Line, where: Lanes | None) -> None:
        target, source = line.operands
        bits, into, of = bits_of(line.type), names(target), names(source)
        if len(of) > 1 and source.startswith("{"):
            parts = [self._get(name, bits // len(of)) for name in of]
            together = np.stack([p.astype(NATURAL[bits // len(of)]) for p in parts], 1)
            self._set(target, together.view(NATURAL[bits])[:, 0], where)
        elif len(into) > 1:
            parts = self._get(source, bits).view(NATURAL[bits // len(into)])
            for i, name in enumerate(into):
                self._set(name, parts[i :: len(into)].copy(), where)
        else:
            self._set(target, self._get(source, bits).copy(), where)

    def _cvt(self, line: Line, where: Lanes | None) -> None:
        target, *sources = line.operands
        into, of = line.parts[-2:]
        if into.endswith("x2"):  # the first source is the upper half
            reals = (self._get(s, 32).view(np.float32) for s in reversed(sources))
            halves = [rounded(x, into[:-2]) for x in reals]
            self._set(target, np.stack(halves, 1).view(np.uint32)[:, 0], where)
            return
        value = self._get(sources[0], bits_of(of)).astype(NATURAL[bits_of(of)])
        value = value.view(SIGNED[bits_of(of)]) if of[0] == "s" else value
        if of in REALS:
            real, half = real_of(value, of), into in HALVES
            kept = rounded(real, into) if half else as_bits(real.astype(FLOAT[bits_of(into)]))
        else:
            kept = value.astype((SIGNED if of[0] == "s" else NATURAL)[bits_of(into)])
        self._set(target, kept.view(NATURAL[bits_of(into)]), where)

    def _setp(self, line: Line, where: Lanes | None) -> None:
        target, *operands = line.operands
        how, bits = line.parts[0], bits_of(line.type)
        a, b = (self._get(o, bits) for o in operands)
        nan = np.zeros(self._lanes, bool)
        if line.type[0] == "f":
            a, b = a.view(FLOAT[bits]), b.view(FLOAT[bits])
            nan = np.isnan(a) | np.isnan(b)
        elif line.type[0] == "s":
            a, b = a.view(SIGNED[bits]), b.view(SIGNED[bits])
        if how in ("num", "nan"):
            found = nan == (how == "nan")
        else:
            # ltu, neu etc.: true if an operand is nan
            found = np.where(nan, len(how) == 3, COMPARISONS[how[:2]](a, b))
        self._set(target, found, where)

    def _selp(self, line: Line, where: Lanes | None) -> None:
        target, a, b, which = line.operands
        one, other = (self._get(o, bits_of(line.type)) for o in (a, b))
        self._set(target, np.where(self._get(which, 1), one, other), where)

    def _shfl(self, line: Line, where: Lanes | None) -> None:
        assert "bfly" in line.parts, line.text
        target, source, across, *_ = line.operands
        lanes = np.arange(self._lanes) ^ int(across, 0)
        self._set(target, self._get(source, 32)[lanes], where)

    def _redux(self, line: Line, where: Lanes | None) -> None:
        assert "add" in line.parts, line.text
        warps = self._get(line.operands[1], 32).reshape(-1, 32).sum(1, dtype=np.uint32)
        self._set(line.operands[0], np.repeat(warps, 32), where)

    def _ldmatrix(self, line: Line, where: Lanes | None) -> None:
        """Threads 8 i to 8 i + 7 of a warp give the addresses of matrix i's rows of 16 bytes;
        thread t receives word t % 4 of row t // 4."""
        assert "trans" not in line.parts, line.text
        lanes, every = np.arange(self._lanes), np.ones(self._lanes, bool)
        memory, block = self._memory(line, 32, every)
        rows = self._address(line.operands[1]) // np.uint64(4)
        for i, name in enumerate(names(line.operands[0])):
            row = rows[lanes // 32 * 32 + 8 * i + lanes % 32 // 4].astype(np.int64)
            self._set(name, memory[*block, row + lanes % 4], where)

    def _computed(self, line: Line) -> Lanes:
        name, kind, operands = line.name, line.type, line.operands[1:]
        if kind == "pred":
            return OPERATIONS[name](*(self._get(o, 1) for o in operands))
        bits = bits_of(kind)
        whole = 2 * bits if kind.endswith("x2") else bits  # bits of a register
        if kind.removesuffix("x2") in REALS:
            return self._float(line, whole)
        assert not set(line.parts) & {"hi", "sat"}, line.text
        kinds, wide = SIGNED if kind[0] == "s" else NATURAL, "wide" in line.parts
        out = 2 * bits if wide else bits  # bits of the result, and of the addend of a product
        numbers = list[Lanes]()
        for i, operand in enumerate(operands):
            held, each = (out, out) if wide and i == 2 else (whole, bits)
            number = self._get(operand, held).astype(NATURAL[held]).view(kinds[each])
            numbers.append(number.astype(kinds[out]))
        found = (quotient if name == "div" else OPERATIONS[name])(*numbers)
        return found.view(NATURAL[max(out, whole)])

    def _float(self, line: Line, whole: int) -> Lanes:
        assert not set(line.parts) & {"ftz", "approx", "full"}, f"not IEEE's: {line.text}"
        kind = line.type.removesuffix("x2")
        kinds, bits = [kind] * (len(line.operands) - 1), [whole] * (len(line.operands) - 1)
        if line.parts[-2:-1] == ("f32",):  # add.f32.bf16: only the first operand has 16 bits
            kinds, bits, kind, whole = [kind, "f32"], [16, 32], "f32", 32
        reals = [*map(real_of, map(self._get, line.operands[1:], bits), kinds)]
        if line.name == "fma":  # of a factor 1: then it rounds once, as an addition does
            assert any((x == 1).all() for x in reals[:2]), f"fused: {line.text}"
        act = np.divide if line.name == "div" else OPERATIONS[line.name]
        found = np.ascontiguousarray(act(*reals))
        return (rounded(found, kind) if kind in HALVES else as_bits(found)).view(NATURAL[whole])


def launch(code: Code, programs: int, arguments: list[int], shared: int) -> None:
    """Runs a kernel. `arguments` are their bits, in order; `shared` is bytes per block."""
    with np.errstate(all="ignore"):
        for first in range(0, programs, BLOCKS_IN_STEP):
            blocks = np.arange(first, min(first + BLOCKS_IN_STEP, programs))
            shared_memory = np.zeros((len(blocks), -(-max(shared, 8) // 16) * 16), np.uint8)
            Blocks(code, blocks, programs, [*arguments, 0, 0], shared_memory, {}).run()
