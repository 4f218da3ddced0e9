"""Arithmetic of PTX instructions on arrays. A nan that arises has the bits that a GPU gives it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Lanes = np.ndarray[Any, np.dtype[Any]]

NATURAL = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}  # types of register contents
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOAT = {32: np.float32, 64: np.float64}
HALVES = {"f16": torch.float16, "bf16": torch.bfloat16}
REALS = (*HALVES, "f32", "f64")


def bits_of(kind: str) -> int:
    """Bits of a type; for a packed type, of each half."""
    return int(re.findall(r"\d+", kind)[0]) if kind != "pred" else 1


def rounded(x: Lanes, kind: str) -> Lanes:
    """Rounds float32 to nearest even; returns the 16-bit patterns."""
    narrow = torch.from_numpy(x.copy()).to(HALVES[kind]).view(torch.uint16).numpy()
    return np.where(np.isnan(x), np.uint16(0x7FFF), narrow)


def real_of(x: Lanes, kind: str) -> Lanes:
    if kind in HALVES:
        return torch.from_numpy(x.copy()).view(HALVES[kind]).float().numpy()
    return x.view(FLOAT[bits_of(kind)])


def as_bits(x: Lanes) -> Lanes:
    bits = x.view(NATURAL[8 * x.itemsize])
    return np.where(np.isnan(x), np.uint32(0x7FFFFFFF), bits) if x.dtype == np.float32 else bits


def _shifted(x: Lanes, by: Lanes, left: bool) -> Lanes:
    """Shifts; by the register's width or more, only the sign of a signed number remains."""
    by = by.astype(np.uint32)
    most = np.minimum(by, 8 * x.itemsize - 1).astype(x.dtype)
    far = x >> (8 * x.itemsize - 1) if not left and x.dtype.kind == "i" else x.dtype.type(0)
    return np.where(by < 8 * x.itemsize, x << most if left else x >> most, far)


def _permuted(a: Lanes, b: Lanes, how: Lanes) -> Lanes:
    both, out = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32), np.zeros_like(a)
    for i in range(4):
        byte = (how >> np.uint32(4 * i) & np.uint32(7)).astype(np.uint64)
        out |= (both >> byte * np.uint64(8)).astype(np.uint8).astype(a.dtype) << a.dtype.type(8 * i)
    return out


def quotient(a: Lanes, b: Lanes) -> Lanes:
    """The quotient, truncated toward zero."""
    return (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(a.dtype)


OPERATIONS: dict[str, Callable[..., Lanes]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mad": lambda a, b, c: a * b + c,
    "fma": lambda a, b, c: a * b + c,  # of floats: exact only where a factor is 1
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "neg": np.negative,
    "min": np.minimum,
    "max": np.maximum,
    "sqrt": np.sqrt,
    "shl": lambda a, by: _shifted(a, by, left=True),
    "shr": lambda a, by: _shifted(a, by, left=False),
    "bfe": lambda a, at, count: a >> at & (a.dtype.type(1) << count) - a.dtype.type(1),
    "popc": lambda a: np.bitwise_count(a).astype(a.dtype),
    "prmt": _permuted,
}
COMPARISONS: dict[str, Callable[[Lanes, Lanes], Lanes]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
