"""Work beside the event loop: bounded, and a tenant leaves places to the others. Compressed bodies are such work."""

from __future__ import annotations

import asyncio
import gzip
import random
import threading
import zlib

import pytest

from pinyon.core.errors import Unavailable
from pinyon.frontdoor.gzip import INLINE_BYTES, Inflater
from pinyon.frontdoor.off_loop import OffLoop
from pinyon.http.answer import HttpError
from pinyon.http.budget import Budget


@pytest.fixture
def off_loop():
    made = OffLoop()
    yield made
    made.close()


async def test_one_tenant_leaves_places_to_others():
    go = threading.Event()
    off_loop = OffLoop(threads=1, waiting_max=7)
    running: list[asyncio.Task[bool]] = []

    async def more(name: str, count: int) -> int:
        """Returns how many of ``count`` more calls are refused."""
        began = [asyncio.ensure_future(off_loop.run(name, go.wait, 30)) for _ in range(count)]
        await asyncio.sleep(0)  # each is refused at once or not at all
        refused = [each for each in began if each.done()]
        running.extend(each for each in began if not each.done())
        for each in refused:
            assert isinstance(each.exception(), Unavailable)
        return len(refused)

    try:
        assert await more("anna", 10) == 6, "half of all"
        assert await more("bert", 10) == 8, "half of what is left"
        assert await more("", 10) == 8, "who has no name takes what there is"
        go.set()
        assert all(await asyncio.gather(*running))
        running.clear()
        go.clear()
        assert await more("anna", 10) == 6, "all came back"
        go.set()
        await asyncio.gather(*running)
    finally:
        go.set()
        off_loop.close()


async def test_what_the_work_raises_is_raised(off_loop):
    with pytest.raises(ZeroDivisionError):
        await off_loop.run("", lambda: 1 // 0)


# -- compressed bodies: a small one may be large when decompressed, and neither form holds up the event loop

HEADER = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
EMPTY_BLOCK = b"\0\0\0\xff\xff"
"""A stored block without bytes."""


def padded(data: bytes, blocks: int) -> bytes:
    """Returns a gzip member of ``data`` behind ``blocks`` empty blocks."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    end = zlib.crc32(data).to_bytes(4, "little") + len(data).to_bytes(4, "little")
    return HEADER + EMPTY_BLOCK * blocks + packer.compress(data) + packer.flush() + end


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
