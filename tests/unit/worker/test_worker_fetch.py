"""The sources that reused KV is read from, and those that are avoided for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from pinyon.api.conductor.v1.conductor_pb2 import FetchMeasurement
from pinyon.core.errors import Cancelled, DeadlineExceeded, PinyonError, ResourceExhausted, Unavailable
from pinyon.core.layout import KvLayout
from pinyon.core.orders import FetchSpan, KvSource, PrefillOrder
from pinyon.core.request import RequestClass, SamplingParams
from pinyon.store.kv_memory import KvMemory
from pinyon.store.reader import ReadResult
from pinyon.store.records import NodeRecord
from services.worker.kv.fetch import MEASURED_SPANS_MAX, Fetched, Fetcher, SpanRead, WantedBlocks
from services.worker.orders.abort import Abort
from services.worker.orders.limits import WorkerLimits

LAYOUT = KvLayout(1, 1, 8, 16, "float32")
KEYS = [bytes([number]) * 16 for number in range(4)]
PEER = FetchSpan("peer", "peer:1", KvSource.PEER, 0, 4)
STORE = FetchSpan("store", "store:1", KvSource.STORE, 0, 4)
TIMEOUT_S = 60.0


class Source:
    """A source that delivers everything, fails by address, or delivers nothing; each read takes ``takes_s``."""

    def __init__(self) -> None:
        self.errors: dict[str, PinyonError] = {}
        self.nothing: dict[str, bool | None] = {}
        self.lacks: dict[str, set[bytes]] = {}
        """The missing keys, by address."""
        self.asked: list[str] = []
        self.reads: list[tuple[str, int]] = []
        """The address and number of blocks of each read."""
        self.offered_s: list[float] = []
        self.held: asyncio.Event | None = None
        """The event for which reads of one block wait."""
        self.entered = asyncio.Event()
        self.passed: Callable[[], None] = lambda: None

    async def read(self, address, keys, places, block_bytes, timeout_s, **_) -> ReadResult:
        self.asked.append(address)
        self.offered_s.append(timeout_s)
        self.reads.append((address, len(keys)))
        self.passed()
        if self.held is not None and len(keys) == 1:
            self.entered.set()
            await self.held.wait()
        if address in self.errors:
            raise self.errors[address]
        if address in self.nothing:
            return ReadResult(0, self.nothing[address])
        lacks = self.lacks.get(address, set())
        leading = next((place for place, key in enumerate(keys) if key in lacks), len(keys))
        return ReadResult(leading, worked=True)


class Index:
    """An index that names the store's nodes; with ``error`` it raises, and with ``hangs`` it never answers."""

    def __init__(self) -> None:
        self.runs = [("kv-0", 1), ("kv-1", 2)]
        self.others: list[tuple[str, int]] = []
        """Further copies, for those who could not read the first ones."""
        self.error: Exception | None = None
        self.hangs = False
        self.asked: list[list[bytes]] = []
        self.entered = asyncio.Event()

    async def leading(self, keys, object_bytes, timeout_s, without=()) -> list[tuple[NodeRecord, int]]:
        assert (object_bytes, timeout_s) == (LAYOUT.block_bytes, TIMEOUT_S)
        self.asked += [list(keys)] if not without else []
        self.entered.set()
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return [
            (NodeRecord(name, "0" * 32, f"{name}:1"), count) for name, count in (self.others if without else self.runs)
        ]


class World:
    def __init__(self, timeout_s: float = TIMEOUT_S, layout: KvLayout = LAYOUT) -> None:
        self.now_s = 0.0
        self.source = Source()
        self.index = Index()
        self.fetcher = Fetcher(
            self.source,
            KvMemory([]),
            layout,
            lambda: self.now_s,
            WorkerLimits(fetch_timeout_s=timeout_s),
            store=self.index,  # type: ignore[arg-type]
        )

    async def fetch(
        self, *spans: FetchSpan, first: int = 0, ask_store: bool = False, abort: Abort | None = None
    ) -> Fetched:
        order = PrefillOrder(
            "id", RequestClass(), None, KEYS, SamplingParams(1), 0, spans, False, "", ask_store=ask_store
        )  # type: ignore[arg-type]
        return await self.fetcher.fetch(WantedBlocks(order, KEYS, [0, 1, 2, 3], abort or Abort(), ""), first)


@pytest.fixture
async def world() -> World:
    return World()


async def test_what_nobody_planned_is_fetched_from_the_store(world: World) -> None:
    assert (await world.fetch()).blocks == 0
    assert not world.index.asked, "a conductor has decided"
    world.source.lacks["kv-0:1"] = set(KEYS[2:])
    fetched = await world.fetch(first=1, ask_store=True)
    assert world.index.asked == [KEYS[1:]]
    assert (fetched.blocks, fetched.store_blocks) == (3, 3)
    assert world.source.asked == ["kv-0:1", "kv-1:1"]


@pytest.mark.parametrize("error", [Unavailable("Redis has gone"), ValueError("a defect")], ids=["away", "broken"])
async def test_a_store_that_cannot_be_asked_costs_no_prompt(error, world: World) -> None:
    world.index.error = error
    assert (await world.fetch(ask_store=True)).blocks == 0
    assert not world.source.asked
    assert world.fetcher.failures == 0


async def test_a_cancelled_prompt_does_not_wait_for_the_store() -> None:
    world, abort = World(), Abort()
    world.index.hangs = True
    fetching = asyncio.ensure_future(world.fetch(ask_store=True, abort=abort))
    async with asyncio.timeout(TIMEOUT_S):
        await world.index.entered.wait()
        abort.fire(Cancelled("the client has gone"))
        with pytest.raises(Cancelled):
            await fetching
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_source_that_failed_is_not_asked_until_its_pause_ends(world: World) -> None:
    world.source.errors["peer:1"] = Unavailable("gone")
    assert (await world.fetch(PEER)).blocks == 0
    assert (await world.fetch(PEER)).blocks == 0
    assert world.source.asked == ["peer:1"]
    assert world.fetcher.failures == 1
    assert (await world.fetch(PEER, STORE)).store_blocks == 4  # another holder is asked at once
    world.now_s = 0.6
    world.source.errors.clear()
    assert (await world.fetch(PEER, STORE)).peer_blocks == 4
    assert world.source.reads == [("peer:1", 4), ("store:1", 4), ("peer:1", 1), ("peer:1", 3)]


async def test_what_a_source_lacks_is_read_from_another_copy(world: World) -> None:
    world.source.lacks["peer:1"] = set(KEYS[1:])
    world.source.lacks["kv-7:1"] = {KEYS[3]}
    world.index.others = [("kv-7", 2), ("kv-8", 1)]
    fetched = await world.fetch(PEER)
    assert (fetched.peer_blocks, fetched.store_blocks) == (1, 3)
    assert world.source.reads == [("peer:1", 4), ("kv-7:1", 3), ("kv-8:1", 1)]


async def test_a_failed_source_is_tried_with_one_block_by_one_prompt(world: World) -> None:
    world.source.errors["peer:1"] = Unavailable("gone")
    await world.fetch(PEER)
    assert world.fetcher.failed_sources() == ["peer:1"]
    world.now_s = 0.6
    assert world.fetcher.failed_sources() == [], "so that it is planned again"
    world.source.held = asyncio.Event()
    trial = asyncio.ensure_future(world.fetch(PEER))
    await world.source.entered.wait()
    assert (await world.fetch(PEER, STORE)).store_blocks == 4, "others leave it alone meanwhile"
    world.source.held.set()
    assert (await trial).blocks == 0
    assert world.fetcher.failed_sources() == ["peer:1"]
    world.source.errors.clear()
    world.now_s = 1.7
    assert (await world.fetch(PEER)).peer_blocks == 4
    assert (await world.fetch(PEER)).peer_blocks == 4
    assert [count for address, count in world.source.reads if address == "peer:1"] == [4, 1, 1, 3, 4]


async def test_a_source_that_has_nothing_is_not_trusted_for_that(world: World) -> None:
    world.source.nothing["peer:1"] = False
    await world.fetch(PEER)
    for world.now_s in (0.6, 0.7, 0.8):
        world.source.nothing["peer:1"] = True  # it answers that the block is missing: its bytes may still not come
        assert (await world.fetch(PEER)).blocks == 0
    world.source.nothing["peer:1"] = False
    world.now_s = 0.9
    await world.fetch(PEER)
    world.now_s = 1.8
    assert world.fetcher.failed_sources() == ["peer:1"], "the pause has doubled"


async def test_what_did_not_come_says_nothing_about_the_speed(world: World) -> None:
    assert (await world.fetch(STORE)).bytes == 4 * LAYOUT.block_bytes
    first, second = (FetchSpan(name, f"{name}:1", KvSource.PEER, *at) for name, at in (("a", (0, 2)), ("b", (2, 4))))
    world.source.lacks["a:1"] = set(KEYS[2:])
    world.source.errors["b:1"] = Unavailable("gone")
    fetched = await world.fetch(first, second)
    assert (fetched.blocks, fetched.bytes) == (2, 0)


async def test_spans_that_arrived_whole_are_measured_one_by_one(world: World) -> None:
    block = LAYOUT.block_bytes

    def passed() -> None:
        world.now_s += 1.0 if world.source.asked[-1] == "peer:1" else 3.0

    world.source.passed = passed
    world.source.lacks = {"peer:1": set(KEYS[1:3]), "store:1": set(KEYS[3:])}
    fetched = await world.fetch(replace(PEER, end=1), replace(STORE, first=1, end=3), replace(PEER, first=3))
    peer = FetchMeasurement(source_id="peer", fetched_bytes=block, fetch_us=1_000_000)
    store = FetchMeasurement(source_id="store", fetched_bytes=2 * block, fetch_us=3_000_000)
    assert fetched.measured() == [peer, store, peer]
    world.source.errors["store:1"] = Unavailable("gone")
    fetched = await world.fetch(replace(PEER, end=1), replace(STORE, first=1))
    assert fetched.measured() == [peer]
    fetched.spans *= 100
    assert len(fetched.measured()) == MEASURED_SPANS_MAX


@pytest.mark.parametrize("border", [0, 1, 2, 3, 4])
async def test_where_the_next_source_takes_over_need_not_be_known(border, world: World) -> None:
    """The plan knows, from a sample of the keys, that one source has block 1 and another block 3."""
    first, second = (FetchSpan(name, f"{name}:1", KvSource.STORE, *at) for name, at in (("a", (0, 2)), ("b", (2, 4))))
    world.source.lacks = {"a:1": set(KEYS[border:]), "b:1": set(KEYS[:border])}
    fetched = await world.fetch(first, second)
    if border < 2:  # the plan was wrong: the first source lacks what was to come from it
        assert (fetched.blocks, fetched.bytes, world.fetcher.failures) == (border, 0, 1)
        return
    assert (fetched.blocks, world.fetcher.failures) == (4, 0)
    assert world.source.reads == [("a:1", 4), ("b:1", 4 - border)][: 1 + (border < 4)]


async def test_a_long_prefix_has_the_time_that_it_takes() -> None:
    """The 40 GB of Mooncake's longest prompts take 3.2 s at 100 Gbit/s."""
    large = replace(LAYOUT, layers=100, kv_heads=1024, head_dim=1024)
    world = World(timeout_s=1.0, layout=large)
    await world.fetch(PEER)
    assert world.source.offered_s == [pytest.approx(1.0 + 4 * large.block_bytes / (1 << 30))]
    assert world.source.offered_s[0] > 2


async def test_an_overdue_read_is_ended_and_its_source_left_alone(monkeypatch) -> None:
    monkeypatch.setattr("services.worker.kv.fetch.OVERRUN_S", 0.0)
    world = World(timeout_s=0.01)
    world.source.held = asyncio.Event()
    assert (await world.fetch(FetchSpan("peer", "peer:1", KvSource.PEER, 0, 1))).blocks == 0
    assert world.fetcher.failed_sources() == ["peer:1"]


async def test_a_busy_source_has_not_failed(world: World) -> None:
    world.source.errors["peer:1"] = ResourceExhausted("all leases are taken")
    assert (await world.fetch(PEER)).blocks == 0
    world.source.errors.clear()
    assert (await world.fetch(PEER)).peer_blocks == 4


async def test_a_silent_source_is_left_alone_and_trusted_only_if_asked(world: World) -> None:
    world.source.nothing["peer:1"] = False
    for _ in range(2):
        assert (await world.fetch(PEER)).blocks == 0
    assert world.source.asked == ["peer:1"]
    world.now_s = 0.6
    world.source.nothing["peer:1"] = None
    await world.fetch(PEER)
    world.source.nothing["peer:1"] = False
    await world.fetch(PEER)
    world.now_s = 1.5
    await world.fetch(PEER)
    assert len(world.source.asked) == 3, "the second pause is twice as long: nothing was learned in between"


async def test_a_source_offered_only_leftover_time_is_not_blamed(world: World) -> None:
    first, second = (FetchSpan(name, f"{name}:1", KvSource.PEER, *at) for name, at in (("a", (0, 2)), ("b", (2, 4))))

    def takes() -> None:
        world.now_s += 54.0  # 54 s of 60 s have passed

    world.source.passed = takes
    world.source.lacks["a:1"] = set(KEYS[2:])
    world.source.errors["b:1"] = DeadlineExceeded("late")
    assert (await world.fetch(first, second)).blocks == 2
    world.source.errors.clear()
    world.source.passed = lambda: None
    assert (await world.fetch(first, second)).blocks == 4


async def test_a_source_that_freezes_after_a_layer_is_left_alone(world: World) -> None:
    reading = asyncio.ensure_future(asyncio.Event().wait())
    layered = SpanRead(PEER, 1.0, 1.0, 0.0)
    layered.reading = reading
    world.fetcher.lost(layered)
    await layered.stop()
    assert (await world.fetch(PEER, STORE)).store_blocks == 4
    assert world.source.asked == ["store:1"]


async def test_a_late_layer_in_leftover_time_blames_no_source(world: World) -> None:
    reading = asyncio.ensure_future(asyncio.Event().wait())
    layered = SpanRead(PEER, 1.0, 6.0, 0.0)
    layered.reading = reading
    world.fetcher.lost(layered)
    await layered.stop()
    assert (await world.fetch(PEER)).peer_blocks == 4


async def test_a_success_does_not_clear_a_failure_after_its_start(world: World) -> None:

    def fails_meanwhile() -> None:
        world.now_s += 0.1
        world.fetcher._avoidance.failed("peer:1", world.now_s)

    world.source.passed = fails_meanwhile
    assert (await world.fetch(PEER)).peer_blocks == 4
    assert (await world.fetch(PEER)).blocks == 0


async def test_nothing_is_measured_of_a_span_that_came_only_in_part() -> None:
    for blocks, told in ((2, 0), (4, 4)):
        world, over = World(), asyncio.Event()

        async def read(address, keys, *_, arrivals, blocks=blocks, over=over, **__) -> ReadResult:
            arrivals.first_layer.set_result(blocks)  # the other blocks are missing
            await over.wait()
            return ReadResult(blocks, worked=True)

        world.source.read = read  # type: ignore[method-assign]
        world.fetcher._layers = object()  # type: ignore[assignment]
        fetched = await world.fetch(PEER)
        assert (fetched.blocks, fetched.layered is not None) == (blocks, True)
        over.set()
        await fetched.layered.reading  # type: ignore[union-attr]
        await asyncio.sleep(0)
        assert fetched.layered.came  # type: ignore[union-attr]
        assert [span.fetched_bytes for span in fetched.measured()] == [told * LAYOUT.block_bytes] * (told > 0)
