"""Where reused KV is asked for, and where not for a while."""

from __future__ import annotations

from pinyon.core.errors import PinyonError, ResourceExhausted, Unavailable
from pinyon.core.fetch_span import FetchSpan, KvSource
from pinyon.core.layout import KvLayout
from pinyon.core.request import RequestClass, SamplingParams
from services.worker.abort import Abort
from services.worker.kv.fetch import Fetched, Fetcher
from services.worker.orders import PrefillOrder

LAYOUT = KvLayout(1, 1, 8, 16, "float32")
KEYS = [bytes([number]) * 16 for number in range(4)]
PEER = FetchSpan("peer", "peer:1", KvSource.PEER, 0, 4)
STORE = FetchSpan("store", "store:1", KvSource.STORE, 0, 4)


class Source:
    """Delivers everything, or fails by address."""

    def __init__(self) -> None:
        self.errors: dict[str, PinyonError] = {}
        self.asked: list[str] = []

    async def fetch(self, address, keys, *_, **__) -> int:
        self.asked.append(address)
        if address in self.errors:
            raise self.errors[address]
        return len(keys)


class World:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.source = Source()
        self.fetcher = Fetcher(self.source, None, LAYOUT, lambda: self.now_s, 1.0)  # type: ignore[arg-type]

    async def fetch(self, *spans: FetchSpan) -> Fetched:
        order = PrefillOrder("id", RequestClass(), None, KEYS, SamplingParams(1), 0, spans, False, "")  # type: ignore[arg-type]
        return await self.fetcher.fetch(order, KEYS, [0, 1, 2, 3], 0, Abort(), "")


async def test_a_source_that_failed_is_not_asked_until_its_pause_ends() -> None:
    world = World()
    world.source.errors["peer:1"] = Unavailable("gone")
    assert (await world.fetch(PEER)).blocks == 0
    assert (await world.fetch(PEER)).blocks == 0
    assert world.source.asked == ["peer:1"]
    assert world.fetcher.failures == 1
    assert (await world.fetch(PEER, STORE)).store_blocks == 4  # whoever else has it is asked at once
    world.now_s = 0.6
    world.source.errors.clear()
    assert (await world.fetch(PEER, STORE)).peer_blocks == 4
    assert world.source.asked == ["peer:1", "store:1", "peer:1"]


async def test_a_busy_source_has_not_failed() -> None:
    world = World()
    world.source.errors["peer:1"] = ResourceExhausted("all leases are taken")
    assert (await world.fetch(PEER)).blocks == 0
    world.source.errors.clear()
    assert (await world.fetch(PEER)).peer_blocks == 4
