"""Compressed bodies: a small body may be large when decompressed, and neither form holds up the event loop."""

from __future__ import annotations

import gzip
import random
import zlib

import pytest

from pinyon.core.errors import Unavailable
from pinyon.frontdoor.gzip import INLINE_BYTES, Inflater
from pinyon.frontdoor.off_loop import OffLoop
from pinyon.http.answer import HttpError
from pinyon.http.budget import Budget

HEADER = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
EMPTY_BLOCK = b"\0\0\0\xff\xff"
"""A stored block without bytes."""


def padded(data: bytes, blocks: int) -> bytes:
    """Returns a gzip member of ``data`` behind ``blocks`` empty blocks."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    end = zlib.crc32(data).to_bytes(4, "little") + len(data).to_bytes(4, "little")
    return HEADER + EMPTY_BLOCK * blocks + packer.compress(data) + packer.flush() + end


@pytest.fixture
def off_loop():
    made = OffLoop()
    yield made
    made.close()


async def test_blocks_that_hold_nothing_are_not_read(off_loop):
    bodies = Budget(1 << 20)
    inflater = Inflater(off_loop, bodies, 1 << 20)
    async with inflater.inflated(padded(b"{}", 10), "") as data:
        assert data == b"{}"
    with pytest.raises(HttpError) as raised:
        async with inflater.inflated(padded(b"{}", 10_000), ""):
            pass
    assert raised.value.status == 400
    assert not bodies.used


async def test_bodies_large_in_either_form_are_inflated_off_the_loop():
    full = OffLoop(threads=1, waiting_max=-1)  # a pool without any place
    try:
        inflater = Inflater(full, Budget(1 << 20), 1 << 20)
        noise = random.Random(1).randbytes(INLINE_BYTES // 2)
        for body in (gzip.compress(noise), padded(noise[:4000], 1000), gzip.compress(bytes(INLINE_BYTES + 1))):
            with pytest.raises(Unavailable):
                async with inflater.inflated(body, ""):
                    pass
        async with inflater.inflated(gzip.compress(bytes(INLINE_BYTES)), "") as data:
            assert data == bytes(INLINE_BYTES)
    finally:
        full.close()
