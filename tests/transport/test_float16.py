"""csrc's float16: values and rounding are numpy's, bit for bit."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.builds import Build, Builds

BUILDS = {"float16": Build("transport/float16.cpp", ("-O2", "-shared", "-fPIC"), ())}
HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16)


@pytest.fixture(scope="module")
def own(builds: Builds) -> ctypes.CDLL:
    return ctypes.CDLL(str(builds[BUILDS["float16"]]))


def convert(function, x: np.ndarray, dtype: type) -> np.ndarray:
    out = np.empty(x.shape, dtype)
    pointers = (ctypes.c_void_p(a.ctypes.data) for a in (out, x))
    function(*pointers, ctypes.c_size_t(x.size))
    return out


def same(a: np.ndarray, b: np.ndarray, bits: type) -> bool:
    nan = np.isnan(b)
    return np.array_equal(nan, np.isnan(a)) and np.array_equal(
        a[~nan].view(bits), b[~nan].view(bits)
    )


def test_every_value_is_widened_as_by_numpy(own):
    assert same(convert(own.widen, HALVES, np.float32), HALVES.astype(np.float32), np.uint32)


def test_ties_and_their_neighbours_are_rounded_as_by_numpy(own):
    halves = np.sort(HALVES[np.isfinite(HALVES)]).astype(np.float32)
    halves = np.concatenate([halves, np.float32([-(2**16), 2**16])])
    ties = (np.sort(halves)[1:] + np.sort(halves)[:-1]) / 2
    neighbours = [np.nextafter(ties, np.float32(way)) for way in (-np.inf, np.inf)]
    anything = np.random.default_rng(0).integers(0, 1 << 32, 1_000_000, np.uint32).view(np.float32)
    for x in (halves, ties, *neighbours, anything, np.float32([np.inf, -np.inf, np.nan])):
        with np.errstate(over="ignore", invalid="ignore"):
            expected = x.astype(np.float16)
        assert same(convert(own.narrow, x, np.float16), expected, np.uint16)
