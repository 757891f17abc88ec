"""Checksums: what they cover, when they are taken, and what a wrong one does."""

from __future__ import annotations

import random

import pytest

from pinyon.transfer import InvalidTransfer
from pinyon.transfer.checksum import ChecksumPolicy, Digest, checksum, seed_of

DATA = random.Random(5).randbytes(100_000)


def test_pieces_do_not_matter() -> None:
    view = memoryview(DATA)
    whole = checksum([view], 7)
    assert whole == checksum([view[:1], view[1:50_000], view[50_000:]], 7)
    digest = Digest(seed=7)
    for start in range(0, len(view), 999):
        digest.update(view[start : start + 999])
    assert digest.intdigest() == whole


def test_a_flipped_bit_an_exchanged_piece_and_another_request_show() -> None:
    view = memoryview(DATA)
    whole = checksum([view], seed_of(b"this request"))
    flipped = bytearray(DATA)
    flipped[77_777] ^= 1
    assert checksum([memoryview(flipped)], seed_of(b"this request")) != whole
    assert checksum([view[50_000:], view[:50_000]], seed_of(b"this request")) != whole
    assert checksum([view], seed_of(b"that request")) != whole


def test_modes() -> None:
    assert ChecksumPolicy("on", 1.0).wanted(1 << 30, 1000)
    assert not ChecksumPolicy("off", 1e12).wanted(1, 1)
    with pytest.raises(InvalidTransfer):
        ChecksumPolicy("sometimes", 1e9)


def test_auto_takes_what_costs_little() -> None:
    fast, slow = ChecksumPolicy("auto", 30e9), ChecksumPolicy("auto", 30e9)
    for _ in range(100):  # loopback: 50 us and 5 GB/s; a network card: 50 us and 1 GB/s
        fast.observe(4096, 50e-6)
        slow.observe(4096, 50e-6)
        fast.observe(1 << 20, 50e-6 + (1 << 20) / 5e9)
        slow.observe(1 << 20, 50e-6 + (1 << 20) / 1e9)
    assert fast.wanted(4096, 1)
    assert not fast.wanted(16 << 20, 1)
    assert slow.wanted(16 << 20, 1)
    assert not slow.wanted(4096, 100)  # each buffer costs a call
    slow.observe(1 << 20, 0.0)  # a clock that stands still changes little and breaks nothing
    assert slow.wanted(4096, 1)
