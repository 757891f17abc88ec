"""FIFO by hand: what came first goes first, and reading does not help."""

from __future__ import annotations

import pytest

from pinyon.eviction import EvictionPolicy, Fifo
from pinyon.eviction.fifo import REMEMBERED_MIN
from pinyon.paging import BlockPool


def test_reading_does_not_help() -> None:
    fifo: EvictionPolicy[str] = Fifo()
    fifo.insert("abcd")
    fifo.touch("a")
    fifo.remove("b")
    assert (len(fifo), "b" in fifo) == (3, False)
    assert fifo.victim() == "a"
    fifo.insert("b")  # it was read, and is older than the others all the same
    fifo.insert("a")  # it went: it is new
    assert [fifo.victim() for _ in range(5)] == ["b", "c", "d", "a", None]


def test_what_is_being_read_does_not_go() -> None:
    fifo: Fifo[str] = Fifo()
    fifo.insert("ab")
    fifo.remove("a")
    assert fifo.victim() == "b"
    assert fifo.victim() is None
    with pytest.raises(KeyError):
        fifo.touch("a")
    with pytest.raises(KeyError):
        fifo.remove("a")


def test_what_never_comes_back_is_forgotten() -> None:
    fifo: Fifo[int] = Fifo()
    for item in range(3 * REMEMBERED_MIN):
        fifo.insert([item])
        fifo.remove([item])
    assert len(fifo._absent) <= REMEMBERED_MIN
    assert len(fifo._queue) <= REMEMBERED_MIN + 1
    fifo.insert([3 * REMEMBERED_MIN - 1, 0])
    assert [fifo.victim(), fifo.victim()] == [3 * REMEMBERED_MIN - 1, 0]


def test_a_pool_counts_what_it_evicts() -> None:
    pool = BlockPool(3, Fifo())
    taken = pool.allocate(3)
    assert taken is not None
    for block in taken:
        pool.publish(block, bytes([block]))
        pool.release([block])
    ((_, first),) = pool.acquire([bytes([taken[0]])])
    pool.release([first])
    assert pool.allocate(1) == [first]
    assert pool.evicted == 1
