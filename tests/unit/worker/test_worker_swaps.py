"""The copies between the tiers: their order, their waiters, and waits that do not end."""

from __future__ import annotations

import asyncio
import random
import threading

import numpy as np
import pytest
import pytest_asyncio

from pinyon.core.errors import InvalidArgument
from pinyon.paging import Swap
from pinyon.paging.second_tier import NO_SLOT
from services.worker.kv import swaps as module
from services.worker.kv.arrivals import LayerLost
from services.worker.kv.swaps import Swaps

LAYERS, BLOCKS, SLOTS = 3, 6, 4
WAIT_S = 30.0


class Slow(Swaps):
    """A copier that makes one copy for each permission."""

    def __init__(self, pool: np.ndarray, slots: int) -> None:
        self.out = 0
        self.let = threading.Semaphore(0)
        super().__init__(pool, slots, self._count)

    def _count(self, out: int) -> None:
        self.out += out

    def _copy(self, layer: int, swap: Swap) -> None:
        assert self.let.acquire(timeout=WAIT_S)
        super()._copy(layer, swap)


@pytest_asyncio.fixture
async def swaps():
    pool = np.arange(BLOCKS * LAYERS * 4, dtype=np.float32).reshape(BLOCKS, LAYERS, 2, 2)
    swaps = Slow(pool, SLOTS)
    swaps.pool = pool
    swaps.start()
    yield swaps
    swaps.let.release(10_000)
    await swaps.close()


async def test_copies_are_made_in_order_whatever_they_are(swaps):
    rng = random.Random(1)
    blocks = [[swaps.pool[block, layer].copy() for layer in range(LAYERS)] for block in range(BLOCKS)]
    slots = [[np.zeros((2, 2), np.float32)] * LAYERS for _ in range(SLOTS)]
    swaps.let.release(10_000)
    parts = out_of = 0
    for _ in range(60):
        batch = []
        for _ in range(rng.randrange(1, 5)):
            block, out, into = rng.randrange(BLOCKS), rng.randrange(-1, SLOTS), rng.randrange(-1, SLOTS)
            batch.append(Swap(block, out, into))
            coming = slots[into]
            if out != NO_SLOT:
                slots[out] = blocks[block]
            if into != NO_SLOT:
                blocks[block] = coming
            parts += (out != NO_SLOT) + (into != NO_SLOT)
            out_of += out != NO_SLOT
        swaps.submit(batch)
    await swaps.settled(range(BLOCKS))
    np.testing.assert_array_equal(swaps.pool, np.array(blocks))
    assert swaps.out == out_of
    assert swaps.bytes == parts * swaps.pool[0].nbytes
    assert swaps.under_way == 0
    assert swaps.seconds > 0


async def test_a_layer_is_waited_for_and_not_those_above_it(swaps):
    swaps.submit([Swap(0, 1, NO_SLOT), Swap(2, 2, NO_SLOT)])
    swaps.submit([Swap(3, 3, NO_SLOT)])
    assert swaps.ready([5, 4, 2, 5]) == 2
    assert swaps.of([[1, 4], [5]]) is None
    swapping = swaps.of([[1, 0], [2]])
    swaps.let.release(2)  # layer 0 of both
    await asyncio.to_thread(swapping.wait, 0)
    waiting = asyncio.ensure_future(asyncio.to_thread(swapping.wait, 1))
    settled = swaps.settled([2])
    swaps.let.release(1)
    await asyncio.sleep(0)
    assert not waiting.done()
    swaps.let.release(3)
    await waiting
    await asyncio.to_thread(swapping.wait_all)
    await settled
    assert swaps.ready([5, 4, 2, 5]) == 4
    assert swaps.ready([3]) == 0, "its own batch is not over"
    assert swaps.under_way == 1


async def test_a_block_is_settled_when_the_last_of_its_copies_is_over(swaps):
    swaps.submit([Swap(0, 1, NO_SLOT)])
    swaps.submit([Swap(0, NO_SLOT, 1)])
    settled = swaps.settled([0])
    swaps.let.release(LAYERS)
    while swaps.under_way > 1:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert not settled.done()
    swaps.let.release(LAYERS)
    await settled
    assert swaps.settled([0]).done()


async def test_a_copy_that_fails_fails_all_that_waits(swaps, monkeypatch):
    """The failure comes long before they would give up, and blocks that arrived are there."""
    monkeypatch.setattr(module, "WAIT_S", 10 * WAIT_S)
    broken = asyncio.Event()
    swaps.on_broken = broken.set
    swaps.submit([Swap(0, 1, NO_SLOT)])
    swaps.submit([Swap(BLOCKS, 2, NO_SLOT)])  # this block does not exist
    swaps.submit([Swap(1, 3, NO_SLOT)])
    fine, settled = swaps.settled([0]), swaps.settled([1])
    waiting = asyncio.ensure_future(asyncio.to_thread(swaps.of([[1]]).wait, 0))
    swaps.let.release(100)
    await asyncio.wait_for(broken.wait(), WAIT_S)
    await fine
    for failed in (settled, waiting, swaps.settled([1])):
        with pytest.raises(LayerLost, match="second tier"):
            await asyncio.wait_for(failed, WAIT_S)


async def test_waits_end_though_the_copies_do_not(swaps, monkeypatch):
    monkeypatch.setattr(module, "WAIT_S", 0.01)
    swaps.submit([Swap(0, 1, NO_SLOT)])
    with pytest.raises(LayerLost, match="layer 2"):
        swaps.of([[0]]).wait(2)
    with pytest.raises(LayerLost, match="second tier"):
        await swaps.settled([0])
    swaps.settled([0]).cancel()  # a cancelled waiter does no harm
    swaps.let.release(LAYERS)
    while swaps.under_way:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_what_was_submitted_is_copied_before_it_is_closed():
    pool = np.ones((2, LAYERS, 2, 2), np.float32)
    swaps = Swaps(pool, 1, lambda _: None)
    swaps.start()
    swaps.submit([Swap(0, 0, NO_SLOT)] * 50)
    await swaps.close()
    assert (swaps._tier[0] == 1).all()
    assert not swaps._thread.is_alive()


def test_more_memory_than_there_is(monkeypatch):
    def none(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "zeros", none)
    with pytest.raises(InvalidArgument, match="no memory for 7 blocks"):
        Swaps(np.ones((2, LAYERS, 2, 2), np.float32), 7, lambda _: None)
