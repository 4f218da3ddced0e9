"""Stamps and calls come back as they were sent, and what makes no sense is nothing."""

from __future__ import annotations

import pytest
import torch

from ringdp.transport.base import Stamped
from ringdp.transport.device.stamp import STAMP_BYTES, packed, unpacked
from ringdp.transport.records import SITE_BYTES, format_call, parse_call

CALL = (3, 1 << 60, 12_345, b"train.py:40".ljust(SITE_BYTES, b"\0"))


def test_a_stamp_comes_back():
    stamped = Stamped(CALL, (1 << 62) - 1)
    data = packed(stamped)
    assert (data.dtype, data.shape) == (torch.uint8, (STAMP_BYTES,))
    found = unpacked(data)
    assert (found.call[:3], found.digest, found.short) == (CALL[:3], stamped.digest, stamped.short)


def test_any_bytes_are_a_stamp():
    found = unpacked(torch.full((STAMP_BYTES,), 255, dtype=torch.uint8))
    assert found.call == (-1, -1, -1, b"")


def test_a_call_comes_back_from_the_store():
    assert parse_call(format_call(CALL)) == CALL


@pytest.mark.parametrize(
    "text", ["", "1 2 3", "1 2 x 00", "1 2 3 00", f"-1 2 3 {'00' * SITE_BYTES}"]
)
def test_what_makes_no_sense_is_no_call(text: str):
    assert parse_call(text) is None
