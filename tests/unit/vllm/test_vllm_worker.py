"""The workers' side of the connector: each job is reported once, whatever happens to it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from pinyon.core.orders import FetchSpan, KvSource
from pinyon.runtime.loop_thread import LoopThread
from pinyon.store.writer import PutOutcome
from pinyon.transfer import TransferEngine
from pinyon.vllm.jobs import LoadJob, SaveJob, StepJobs
from pinyon.vllm.lending import Lending
from pinyon.vllm.prompt_keys import shard_keys
from pinyon.vllm.worker import WorkerSide
from tests.unit.vllm.layered import LayeredMemory
from tests.waiting import wait_until

KEYS = [bytes([number]) * 16 for number in range(1, 6)]
PEER = FetchSpan("b", "b:1", KvSource.PEER, 2, 4)
STORE = FetchSpan("kv", "kv:1", KvSource.STORE, 4, 5)


class Store:
    """A store whose answers the test gives."""

    def __init__(self) -> None:
        self.reads: list[tuple[Any, ...]] = []
        self.puts: list[list[bytes]] = []
        self.looks: list[list[bytes]] = []
        self.arrives: list[int] | Exception = [2, 1]
        self.outcome: PutOutcome | Exception = PutOutcome.STORED
        self.held: Future[Any] | None = None
        self.failed: frozenset[str] = frozenset()

    def failed_sources(self) -> frozenset[str]:
        return self.failed

    def look(self, keys: Sequence[bytes], size: int, timeout_s: float) -> Future[Any]:
        self.looks.append(list(keys))
        return _done((FetchSpan("kv", "kv:1", KvSource.STORE, 0, 1),))

    def read(self, spans: Any, keys: Any, places: Any, size: int, timeout_s: float, terms: Any) -> Future[Any]:
        self.reads.append((spans, keys, places, terms))
        return _done(self.arrives)

    def put(self, objects: Any, size: int, timeout_s: float, request_class: Any, places: Any) -> Future[Any]:
        self.puts.append([key for key, _ in objects])
        if self.held is not None:
            return self.held
        outcome = self.outcome
        return _done(outcome if isinstance(outcome, Exception) else (outcome,) * len(objects))


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


class Rank:
    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.now_s = 100.0
        self.thread, self.store, self.engine = LoopThread("test"), Store(), TransferEngine()
        self.memory = LayeredMemory(self.engine)
        self.lending = Lending(self.engine, self.memory, 5.0, 30.0, lambda: self.now_s)  # type: ignore[arg-type]
        self.side = WorkerSide(
            self.thread, self.store, self.memory, self.lending if ranks == 1 else None, rank=rank, ranks=ranks,  # type: ignore[arg-type]
            load_s=2.0, store_s=2.0, store_queue_s=5.0, clock=lambda: self.now_s,
        )  # fmt: skip
        self.saved: dict[int, int] = {}

    def load(self, *spans: FetchSpan) -> tuple[set[str], set[int]]:
        self.side.load(StepJobs(loads=[LoadJob(1, "r", 2, KEYS[:3], [5, 6, 7], spans)]))
        received: set[str] = set()
        failed: set[int] = set()

        def taken() -> bool:
            done, bad = self.side.take()
            received.update(done)
            failed.update(bad)
            return bool(received)

        wait_until(taken, "the load is reported")
        assert self.side.take() == (set(), set()), "it is reported once"
        return received, failed

    def save(self, *numbers: int) -> None:
        self.side.end(StepJobs(saves=[SaveJob(number, [0], KEYS[:1], [number]) for number in numbers]))

    def until_saved(self, *numbers: int) -> None:
        def all_of_them() -> bool:
            news = self.side.news()
            self.saved |= {} if news is None else news.saved
            return set(self.saved) == set(numbers)

        wait_until(all_of_them, f"the jobs {numbers} are done")


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.thread.close(5.0)


def test_a_load_reads_the_spans_into_vllm_s_blocks(rank: Rank) -> None:
    assert rank.load(PEER, STORE) == ({"r"}, set())
    ((spans, keys, places, terms),) = rank.store.reads
    assert (spans, keys) == ((PEER, STORE), KEYS[:3])
    assert places == [rank.memory.kv.pieces(block) for block in (5, 6, 7)]
    assert terms.first_block == 2
    news = rank.side.news()
    assert news is not None
    (loaded,) = news.loaded
    assert (loaded.peer_blocks, loaded.store_blocks) == (2, 1)


def test_blocks_that_do_not_come_are_named(rank: Rank) -> None:
    rank.store.arrives = [1]
    assert rank.load(PEER, STORE) == ({"r"}, {6, 7})


def test_a_load_that_fails_is_reported_with_all_its_blocks(rank: Rank) -> None:
    rank.store.arrives = OSError("gone")
    assert rank.load(PEER, STORE) == ({"r"}, {5, 6, 7})


def test_a_load_after_the_end_is_reported_too(rank: Rank) -> None:
    rank.thread.close(5.0)
    assert rank.load(PEER, STORE) == ({"r"}, {5, 6, 7})


def test_each_rank_looks_up_and_saves_its_own_part() -> None:
    rank = Rank(1, 2)
    try:
        own = shard_keys(KEYS[:3], 1, 2)
        assert rank.load() == ({"r"}, set())
        assert rank.store.looks == [own]
        assert set(own).isdisjoint(shard_keys(KEYS[:3], 0, 2) + KEYS)
        rank.save(3)
        rank.until_saved(3)
        assert rank.store.puts == [own[:1]]
    finally:
        rank.thread.close(5.0)


@pytest.mark.parametrize("outcome", [PutOutcome.STORED, PutOutcome.FAILED, PutOutcome.NO_SPACE, OSError("gone")])
def test_a_save_is_reported_once_whatever_comes_of_it(rank: Rank, outcome: PutOutcome | Exception) -> None:
    rank.store.outcome = outcome
    rank.save(1, 2)
    rank.until_saved(1, 2)
    assert rank.side.news() is None


def test_a_store_that_takes_nothing_is_left_alone_for_a_while(rank: Rank) -> None:
    rank.store.outcome = PutOutcome.FAILED
    rank.save(1)
    rank.until_saved(1)
    rank.save(2)
    rank.until_saved(1, 2)
    assert len(rank.store.puts) == 1
    rank.now_s += 1.5
    rank.save(3)
    rank.until_saved(1, 2, 3)
    assert len(rank.store.puts) == 2


def test_saves_that_wait_too_long_are_dropped(rank: Rank) -> None:
    held = rank.store.held = Future()
    rank.save(1, 2, 3)
    wait_until(lambda: len(rank.store.puts) == 2, "two puts run, and one waits")
    rank.now_s += 6.0
    held.set_result((PutOutcome.STORED,))
    rank.until_saved(1, 2, 3)
    assert len(rank.store.puts) == 2


def test_a_put_waits_for_the_device_to_compute(rank: Rank) -> None:
    computed = threading.Event()
    rank.memory.fence = lambda: computed.wait  # type: ignore[method-assign]
    jobs = StepJobs(saves=[SaveJob(1, [0], KEYS[:1], [1])], complete=[(KEYS[0], 1)])
    rank.side.end(jobs)
    assert rank.side.news() is None
    assert not rank.store.puts
    computed.set()
    rank.until_saved(1)
    wait_until(lambda: rank.lending._block_of == {KEYS[0]: 1}, "the block is lent")


def test_sources_that_failed_are_told(rank: Rank) -> None:
    rank.store.failed = frozenset(("b:1",))
    news = rank.side.news()
    assert news is not None
    assert news.failed_sources == {"b:1"}
    assert rank.side.news() is None
