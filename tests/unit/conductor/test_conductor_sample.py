"""The conductor indexes a sample of the keys that instances report, and places by this sample."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.block_keys import chain_block_keys, namespace, pack_keys
from pinyon.core.request import Role
from pinyon.messages.instance import info_to_proto
from pinyon.placement.kvcache_centric import KvCacheCentric
from pinyon.placement.policy import PlacementRequest
from pinyon.placement.scheduler import Scheduler
from pinyon.runtime.telemetry import Telemetry
from services.conductor.app import Conductor, build
from services.conductor.intake import ReportIntake, in_turns
from services.conductor.membership import SPARSER_S, Reporter
from services.conductor.metrics import ConductorMetrics
from services.conductor.settings import ConductorSettings
from tests.unit.placement.conftest import LAYOUT, info, make_fleet

Report = conductor_pb2.ReportSessionRequest
PROMPT = chain_block_keys(namespace("m", "l", "t"), bytes(4 * 100), 1)


class World:
    def __init__(self, **settings: object) -> None:
        self.now_s = 0.0
        made = ConductorSettings(listen="127.0.0.1:0", settle_ms=0, **settings)
        self.conductor: Conductor = build(made, CollectorRegistry(), Telemetry("conductor", "c"), self.clock)
        fleet, membership = self.conductor.fleet, self.conductor.membership
        metrics = ConductorMetrics(CollectorRegistry(), fleet, membership)
        self.intake = ReportIntake(fleet, membership, metrics, self.clock, self.conductor.planned)

    def clock(self) -> float:
        return self.now_s

    def register(self, name: str, role: Role, block_tokens: int = 16) -> Reporter:
        layout = replace(LAYOUT, block_tokens=block_tokens) if role is not Role.STORE else None
        return self.intake.register(Report(registration=info_to_proto(info(name, role, layout=layout))))

    async def tell(self, reporter: Reporter, blocks: range) -> conductor_pb2.ReportSessionResponse | None:
        keys = pack_keys(PROMPT[blocks.start : blocks.stop])
        snapshot = conductor_pb2.CacheSnapshot(seq=0, keys=keys, first=True, last=True)
        return await in_turns(self.intake.apply(reporter, Report(snapshot=snapshot)))

    def held(self, reporter: Reporter, every: int) -> int:
        return self.conductor.fleet.index.match(pack_keys(PROMPT), every=every).held_by(reporter.state)


async def test_who_sends_all_keys_is_indexed_by_the_sample():
    world = World(index_stride_tokens=64)
    worker = world.register("p0", Role.PREFILL)
    assert worker.every == 4
    await world.tell(worker, range(50))
    index = world.conductor.fleet.index
    assert index.blocks_of(worker.state) == len(index) == 12
    assert world.held(worker, 4) == 48
    delta = conductor_pb2.CacheDelta(seq=1, stored_keys=pack_keys(PROMPT[50:60]), removed_keys=pack_keys(PROMPT[20:50]))
    await in_turns(world.intake.apply(worker, Report(deltas=[delta])))
    assert world.held(worker, 4) == 20
    assert index.blocks_of(worker.state) == 5 + 3
    index.check_integrity()


async def test_without_a_stride_all_keys_are_indexed():
    world = World(index_stride_tokens=1)
    worker, store = world.register("p0", Role.PREFILL), world.register("s0", Role.STORE)
    assert (worker.every, store.every) == (1, 1)
    await world.tell(worker, range(50))
    assert world.held(worker, 1) == 50


async def test_a_store_node_is_asked_for_what_the_longest_blocks_need():
    world = World(index_stride_tokens=128)
    store = world.register("s0", Role.STORE)
    assert store.every == 64, "nobody needs more of it"
    assert await in_turns(world.intake.apply(store, Report())) is None
    world.register("p0", Role.PREFILL, 16)
    answer = await in_turns(world.intake.apply(store, Report()))
    assert answer is not None
    assert (answer.sample_every, answer.resync, store.every) == (8, False, 8)
    world.register("p1", Role.PREFILL, 8)
    assert await in_turns(world.intake.apply(store, Report())) is None, "it is told more than the shorter blocks need"
    world.register("p2", Role.PREFILL, 64)
    answer = await world.tell(store, range(50))
    assert answer is not None
    assert (answer.sample_every, store.every) == (2, 2)
    assert world.conductor.fleet.index.blocks_of(store.state) == 50 // 8
    assert world.held(store, 8) == 48
    assert world.held(store, world.conductor.fleet.common_sample) == 48, "who names no layout sees what is known of all"
    await world.tell(store, range(50))
    assert world.conductor.fleet.index.blocks_of(store.state) == 25


async def test_a_store_node_is_asked_for_less_once_less_was_enough():
    world = World(index_stride_tokens=128)
    store, _, dense = (
        world.register("s0", Role.STORE),
        world.register("p0", Role.PREFILL, 16),
        world.register("p1", Role.PREFILL, 64),
    )
    index = world.conductor.fleet.index
    answer = await world.tell(store, range(50))
    assert answer is not None
    assert answer.sample_every == 2
    await world.tell(store, range(50))
    assert index.blocks_of(store.state) == 25
    for _ in range(3):  # the instance restarts, and nothing changes
        await in_turns(world.intake.apply(dense, Report(leaving=True)))
        for _ in range(3):
            assert await in_turns(world.intake.apply(store, Report())) is None
            world.now_s += SPARSER_S / 4
        dense = world.register("p1", Role.PREFILL, 64)
        assert await in_turns(world.intake.apply(store, Report())) is None
        world.now_s += SPARSER_S
    await in_turns(world.intake.apply(dense, Report(leaving=True)))
    assert await in_turns(world.intake.apply(store, Report())) is None
    world.now_s += SPARSER_S
    answer = await in_turns(world.intake.apply(store, Report()))
    assert answer is not None
    assert (answer.sample_every, answer.resync, store.every) == (8, True, 8)
    assert world.held(store, 8) == 48, "until the snapshot is here, what was told before counts"
    before = conductor_pb2.CacheDelta(
        seq=1, stored_keys=pack_keys(PROMPT[50:60]), removed_keys=pack_keys(PROMPT[40:48])
    )
    await in_turns(world.intake.apply(store, Report(deltas=[before])))  # the report was on its way when the answer came
    assert world.held(store, 8) == 40
    answer = await world.tell(store, range(56))
    assert answer is not None
    assert not answer.HasField("sample_every")
    assert index.blocks_of(store.state) == 7, "nothing is left of the denser sample"
    assert world.held(store, 8) == world.held(store, world.conductor.fleet.common_sample) == 56
    index.check_integrity()


async def test_a_store_node_goes_on_as_before_while_none_computes():
    """The first instance that comes back finds all that it held."""
    world = World(index_stride_tokens=128)
    store, worker = world.register("s0", Role.STORE), world.register("p0", Role.PREFILL, 64)
    await world.tell(store, range(50))
    await world.tell(store, range(50))
    assert world.held(store, 2) == 50
    await in_turns(world.intake.apply(worker, Report(leaving=True)))
    for _ in range(3):
        assert await in_turns(world.intake.apply(store, Report())) is None
        world.now_s += SPARSER_S
    world.register("p0", Role.PREFILL, 64)
    assert await in_turns(world.intake.apply(store, Report())) is None
    assert (store.every, world.held(store, 2)) == (2, 50)


async def test_placements_reuse_up_to_the_last_block_of_the_sample():
    world = World(index_stride_tokens=64)
    fleet = world.conductor.fleet
    holder, _, _ = (
        world.register("p0", Role.PREFILL),
        world.register("p1", Role.PREFILL),
        world.register("d", Role.DECODE),
    )
    await world.tell(holder, range(50))
    scheduler = Scheduler(fleet, KvCacheCentric())
    only_p0 = PlacementRequest("r", "m", 16 * 71, pack_keys(PROMPT[:71]), 8, exclude=frozenset({"p1"}))
    decision = scheduler.schedule(only_p0, 0.0)
    assert (decision.prefill.info.instance_id, decision.local_blocks) == ("p0", 48)
    assert fleet.inflight.expected.of(holder.state) == (71 - 48) // 4
    after = scheduler.schedule(replace(only_p0, request_id="s"), 0.0)
    assert after.local_blocks == 68, "what the first one computes is expected as far as the sample goes"


def test_it_goes_to_what_has_been_enough_all_the_time():
    reporter = Reporter(make_fleet(("s0", Role.STORE)).instances()[0], 0.0, every=1)
    assert not reporter.wants(2, 0.0)
    assert not reporter.wants(4, SPARSER_S - 1.0)
    assert reporter.wants(4, SPARSER_S)
    assert reporter.every == 2
    assert not reporter.wants(2, SPARSER_S + 1.0)
