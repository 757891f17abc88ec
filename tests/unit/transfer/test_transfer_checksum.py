"""Checksums: the bytes that they cover, and the conditions for computing them."""

from __future__ import annotations

import random

import pytest

from pinyon.transfer import InvalidTransfer, Transports
from pinyon.transfer.transports.tcp.wire import Digest, checksum, seed_of

DATA = random.Random(5).randbytes(100_000)


def test_pieces_do_not_matter() -> None:
    view = memoryview(DATA)
    whole = checksum([view], 7)
    assert whole == checksum([view[:1], view[1:50_000], view[50_000:]], 7)
    digest = Digest(seed=7)
    for start in range(0, len(view), 999):
        digest.update(view[start : start + 999])
    assert digest.intdigest() == whole


def test_a_flipped_bit_a_swap_and_another_request_show() -> None:
    view = memoryview(DATA)
    whole = checksum([view], seed_of(b"this request"))
    flipped = bytearray(DATA)
    flipped[77_777] ^= 1
    assert checksum([memoryview(flipped)], seed_of(b"this request")) != whole
    assert checksum([view[50_000:], view[:50_000]], seed_of(b"this request")) != whole
    assert checksum([view], seed_of(b"that request")) != whole


def test_modes() -> None:
    assert Transports().checksum == "on"
    assert Transports(checksum="off").checksum == "off"


@pytest.mark.parametrize("mode", ["auto", "", "On", "sometimes"])
def test_whether_bytes_are_checked_is_said_plainly(mode: str) -> None:
    with pytest.raises(InvalidTransfer):
        Transports(checksum=mode)
