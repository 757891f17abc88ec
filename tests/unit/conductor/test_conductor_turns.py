"""The messages and remains of one peer never keep the loop from the others for long."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.request import Role
from pinyon.messages.instance import info_to_proto
from pinyon.placement.fetch_time import fetch_s
from pinyon.placement.index import COLLECT_SLOTS
from pinyon.placement.instances import InstanceState
from pinyon.placement.policy import Fetch, PlacementDecision
from pinyon.runtime.telemetry import Telemetry
from services.conductor.app import Conductor, build
from services.conductor.intake import MEASUREMENTS_MAX, STEP_KEYS, STEP_PARTS, ReportIntake, in_turns
from services.conductor.membership import Reporter
from services.conductor.metrics import ConductorMetrics
from services.conductor.settings import ConductorSettings
from tests.unit.placement.conftest import LAYOUT, info, keys

Report = conductor_pb2.ReportSessionRequest


class World:
    def __init__(self) -> None:
        self.now_s = 100.0
        settings = ConductorSettings(listen="127.0.0.1:0", settle_ms=0)
        self.conductor: Conductor = build(
            settings, CollectorRegistry(), Telemetry("conductor", "c"), lambda: self.now_s
        )
        fleet, membership = self.conductor.fleet, self.conductor.membership
        metrics = ConductorMetrics(CollectorRegistry(), fleet, membership)
        self.intake = ReportIntake(fleet, membership, metrics, lambda: self.now_s, self.conductor.planned)

    def register(self, name: str) -> Reporter:
        return self.intake.register(Report(registration=info_to_proto(info(name, Role.PREFILL))))

    def plan(self, reader: Reporter, source: InstanceState, size_bytes: int, times: int = 1) -> None:
        """Plans a placement that has the instance fetch ``size_bytes``, ``times`` times."""
        fetches = (Fetch(source, 0, -(-size_bytes // LAYOUT.block_bytes)),)
        decision = PlacementDecision(reader.state, reader.state, 0, fetches, transfer_s=0.1, prefill_s=0.1)
        for _ in range(times):
            self.conductor.planned.plan(decision, self.now_s)

    async def turns_during(self, reporter: Reporter, report: Report) -> int:
        """Returns how often other tasks got the loop while a report was taken."""
        taking = asyncio.ensure_future(in_turns(self.intake.apply(reporter, report)))
        turns = 0
        while not taking.done():
            await asyncio.sleep(0)
            turns += 1
        await taking
        return turns


@pytest.fixture
async def world() -> World:
    return World()


def snapshot(*numbers: int) -> conductor_pb2.CacheSnapshot:
    return conductor_pb2.CacheSnapshot(seq=0, keys=keys(*numbers), first=True, last=True)


async def test_large_changes_are_taken_in_turns(world):
    reporter = world.register("p0")
    await in_turns(world.intake.apply(reporter, Report(snapshot=snapshot())))
    count = 5 * STEP_KEYS
    stored = conductor_pb2.CacheDelta(seq=1, stored_keys=keys(*range(count)))
    assert await world.turns_during(reporter, Report(deltas=[stored])) >= 5
    index = world.conductor.fleet.index
    assert (index.blocks_of(reporter.state), index.seq_of(reporter.state)) == (count, 1)
    removed = conductor_pb2.CacheDelta(seq=2, stored_keys=keys(count), removed_keys=keys(*range(count)))
    assert await world.turns_during(reporter, Report(deltas=[removed])) >= 5
    assert (index.blocks_of(reporter.state), index.seq_of(reporter.state)) == (1, 2)


async def test_a_small_change_takes_one_turn(world):
    reporter = world.register("p0")
    await in_turns(world.intake.apply(reporter, Report(snapshot=snapshot(1))))
    delta = conductor_pb2.CacheDelta(seq=1, stored_keys=keys(2), removed_keys=keys(1))
    assert await world.turns_during(reporter, Report(deltas=[delta])) <= 2


async def test_a_session_taken_over_between_the_turns_says_no_more(world):
    reporter = world.register("p0")
    await in_turns(world.intake.apply(reporter, Report(snapshot=snapshot())))
    delta = conductor_pb2.CacheDelta(seq=1, stored_keys=keys(*range(3 * STEP_KEYS)))
    taking = asyncio.ensure_future(in_turns(world.intake.apply(reporter, Report(deltas=[delta]))))
    await asyncio.sleep(0)
    newer = world.register("p0")
    await asyncio.wait({taking})
    assert "another session" in str(taking.exception())
    assert newer.state is reporter.state
    assert world.conductor.fleet.index.blocks_of(newer.state) == STEP_KEYS


async def test_an_instance_with_many_keys_is_forgotten_in_portions(world):
    reporter = world.register("p0")
    count = 5 * COLLECT_SLOTS
    await in_turns(world.intake.apply(reporter, Report(snapshot=snapshot(*range(count)))))
    world.now_s += 4.0
    index = world.conductor.fleet.index
    sweeps, before = 1, len(index)
    while world.conductor.sweep():
        assert before - len(index) <= 2 * COLLECT_SLOTS
        before = len(index)
        sweeps += 1
    assert sweeps >= 3
    assert len(world.conductor.fleet) == len(index) == 0


async def test_of_many_measurements_the_newest_are_learned(world):
    reporter = world.register("p0")
    measured = [
        conductor_pb2.PrefillMeasurement(computed_tokens=100, compute_us=1000 * number, fetched_bytes=1, fetch_us=1)
        for number in range(10 * MEASUREMENTS_MAX)
    ]
    await in_turns(world.intake.apply(reporter, Report(prefills=measured)))
    assert reporter.state.prefill_model.samples == reporter.state.transfer_model.samples == MEASUREMENTS_MAX
    assert reporter.state.prefill_model.predict_s(100, 0) > MEASUREMENTS_MAX * 8e-3


async def test_fetches_are_learned_by_their_sources(world):
    reporter = world.register("p0")
    near, far = world.register("s0").state, world.register("s1").state
    fetch = conductor_pb2.FetchMeasurement
    spans = [fetch(source_id="s0", fetched_bytes=10**8, fetch_us=10_000)] * 40
    spans += [fetch(source_id="s1", fetched_bytes=10**8, fetch_us=200_000), fetch(source_id="gone", fetched_bytes=1)]
    broken = [
        fetch(source_id="s1", fetched_bytes=2**64 - 1),
        fetch(source_id="s1", fetched_bytes=1, fetch_us=2**64 - 1),
    ]
    for _ in range(20):
        world.plan(reporter, near, 10**8, 40)
        world.plan(reporter, far, 10**8)
        prefills = [conductor_pb2.PrefillMeasurement(fetches=spans + broken, fetched_bytes=5, fetch_us=9)]
        await in_turns(world.intake.apply(reporter, Report(prefills=prefills)))
    assert fetch_s(reporter.state, [(near, 10**8)]) == pytest.approx(0.01, rel=0.2)
    assert fetch_s(reporter.state, [(far, 10**8)]) == pytest.approx(0.2, rel=0.2)


@pytest.mark.parametrize(
    ("reader", "source_id", "size_bytes", "after_s", "believed"),
    [
        ("p0", "s0", 10**8, 1.0, True),
        ("p0", "s0", 10**7, 1.0, True),  # it held the rest itself by then
        ("p0", "s1", 10**8, 1.0, False),
        ("p1", "s0", 10**8, 1.0, False),
        ("p0", "p0", 10**8, 1.0, False),
        ("p0", "gone", 10**8, 1.0, False),
        ("p0", "s0", 10**8 + 64 * LAYOUT.block_bytes, 1.0, False),
        ("p0", "s0", 10**8, 601.0, False),
    ],
)
async def test_a_fetch_that_no_placement_named_teaches_nothing(world, reader, source_id, size_bytes, after_s, believed):
    named = {name: world.register(name) for name in ("p0", "p1", "s0", "s1")}
    world.plan(named["p0"], named["s0"].state, 10**8)
    world.now_s += after_s
    fetches = [conductor_pb2.FetchMeasurement(source_id=source_id, fetched_bytes=size_bytes, fetch_us=20_000)] * 2
    report = Report(prefills=[conductor_pb2.PrefillMeasurement(fetches=fetches)])
    await in_turns(world.intake.apply(named[reader], report))
    assert named[reader].state.transfer_model.samples == believed, "and one plan is one fetch"
    learned = [each for each in named.values() if each.state.send_rate.per_byte_s]
    assert learned == ([named["s0"]] if believed else [])


async def test_a_fetch_is_planned_by_its_placement(world):
    reader = world.register("p0")
    store, _ = (
        world.intake.register(Report(registration=info_to_proto(info(name, role))))
        for name, role in (("s0", Role.STORE), ("d0", Role.DECODE))
    )
    for _ in range(2):  # of blocks of this length it is asked for more than the first time
        await in_turns(world.intake.apply(store, Report(snapshot=snapshot(*range(100)))))
    ask = conductor_pb2.ScheduleRequest(request_id="r", model="m", prompt_tokens=1601, block_keys=keys(*range(100)))
    answer = await world.conductor.servicer.Schedule(ask, None)
    (fetch,) = answer.placement.fetches
    size = fetch.block_count * LAYOUT.block_bytes
    told = [conductor_pb2.FetchMeasurement(source_id="s0", fetched_bytes=size, fetch_us=1000)]
    for _ in range(2):
        await in_turns(world.intake.apply(reader, Report(prefills=[conductor_pb2.PrefillMeasurement(fetches=told)])))
    assert reader.state.transfer_model.samples == 1


async def test_of_a_report_of_many_fetches_the_newest_are_learned(world):
    reporter = world.register("p0")
    world.plan(reporter, world.register("s0").state, 100, 1000)
    spans = [conductor_pb2.FetchMeasurement(source_id="s0", fetched_bytes=100, fetch_us=1)] * 1000
    measured = [conductor_pb2.PrefillMeasurement(fetches=spans)] * MEASUREMENTS_MAX
    await in_turns(world.intake.apply(reporter, Report(prefills=measured)))
    assert reporter.state.transfer_model.samples == MEASUREMENTS_MAX


async def test_many_parts_that_say_little_are_taken_in_turns(world):
    reporter = world.register("p0")
    await in_turns(world.intake.apply(reporter, Report(snapshot=snapshot())))
    names = [f"r{number}" for number in range(3 * STEP_PARTS)]
    for part in ("begun_prefill", "ended_prefill", "begun_decode", "ended_decode"):
        assert await world.turns_during(reporter, Report(**{f"{part}_request_ids": names})) >= 3
    deltas = [conductor_pb2.CacheDelta(seq=1 + number) for number in range(3 * STEP_PARTS)]
    assert await world.turns_during(reporter, Report(deltas=deltas)) >= 3
    assert world.conductor.fleet.index.seq_of(reporter.state) == 3 * STEP_PARTS


async def test_after_a_gap_nothing_more_of_a_report_is_taken(world):
    reporter = world.register("p0")
    await in_turns(world.intake.apply(reporter, Report(snapshot=snapshot())))
    deltas = [conductor_pb2.CacheDelta(seq=7)] * (9 * STEP_PARTS)
    taking = asyncio.ensure_future(in_turns(world.intake.apply(reporter, Report(deltas=deltas))))
    for _ in range(3):
        await asyncio.sleep(0)
    assert taking.done()
    assert (await taking).resync


async def test_a_prompt_begun_and_ended_in_one_report_was_computed(world):
    """The prompt has one chunk: its instance is not held up (DualMap A.8), and nothing is left of the prompt's time."""
    reporter = world.register("p0")
    state, inflight = reporter.state, world.conductor.fleet.inflight
    for name in ("long", "short"):
        inflight.add(name, PlacementDecision(state, state, prefill_s=2.0), 0, world.now_s)
    await in_turns(world.intake.apply(reporter, Report(begun_prefill_request_ids=["long"])))
    world.now_s += 0.5
    await in_turns(
        world.intake.apply(reporter, Report(begun_prefill_request_ids=["short"], ended_prefill_request_ids=["short"]))
    )
    assert state.prefill_ended_s == world.now_s
    assert state.prefill_queue_s(world.now_s) == pytest.approx(1.5)
