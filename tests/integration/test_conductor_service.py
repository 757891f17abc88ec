"""The conductor's service on the wire."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.errors import InvalidArgument, NotFound, ResourceExhausted, Unavailable
from tests.integration.conductor_parts import (
    PREFILL,
    STORE,
    WAIT_S,
    LoadBalancer,
    Reporter,
    World,
    ask,
    failure,
    keys,
    registration,
)

# -- membership


async def test_instances_register_and_are_listed(world):
    await world.cluster()
    listed = await world.names()
    assert list(listed) == ["d0", "p0", "p1", "s0"]
    assert listed["p0"].info == registration("p0", PREFILL)
    assert listed["s0"].info == registration("s0", STORE)
    assert all(instance.schedulable for instance in listed.values())
    assert list(await world.names(PREFILL)) == ["p0", "p1"]
    assert world.metric("instances", role="prefill") == 2
    assert world.metric("instances", role="store") == 1
    assert world.metric("report_sessions") == 4


async def test_the_lease_ends_without_reports(world):
    members = await world.cluster()
    await members["p0"].report(stored=(1, 2))
    world.now_s += 2.9
    await members["d0"].report()
    world.conductor.sweep()
    assert len(await world.names()) == 4
    assert (await world.names())["p0"].report_age_ms == 2900
    world.now_s += 0.2
    world.conductor.sweep()
    assert list(await world.names()) == ["d0"]
    assert await world.holders(1) == {}
    assert world.metric("index_blocks") == world.metric("index_entries") == 0
    # The frozen instance wakes up, is told to register again, and may.
    await members["p0"].call.write(conductor_pb2.ReportSessionRequest(load=conductor_pb2.InstanceLoad()))
    assert "lease" in str(await failure(members["p0"].call.read()))
    await members["p0"].connect()
    assert sorted(await world.names()) == ["d0", "p0"]
    assert await world.holders(1, 2, 3) == {"p0": 2}


async def test_an_instance_with_a_broken_session_is_known_but_unused(world):
    members = await world.cluster()
    await members["p0"].report(stored=(0, 1, 2, 3))
    lb = await world.balancer()
    members["p0"].call.cancel()
    await lb.list_where(lambda listed: not listed["p0"].schedulable)
    assert await world.holders(0) == {"p0": 1}
    answer = (await lb.place(ask()))["r"]
    assert answer.placement.prefill_instance_id == "p1"
    assert not answer.placement.fetches
    await members["p0"].connect()
    await lb.list_where(lambda listed: listed["p0"].schedulable)
    assert (await lb.place(ask("r2")))["r2"].placement.local_prefix_blocks == 4


async def test_a_new_boot_replaces_the_old_one_and_ends_its_session(world):
    members = await world.cluster()
    await members["p0"].report(stored=(1, 2))
    reborn = Reporter(world.stub, "p0", PREFILL, boot="2")
    await reborn.connect()
    assert await world.holders(1) == {}
    assert (await world.names())["p0"].info.boot_id == "2"
    await members["p0"].call.write(conductor_pb2.ReportSessionRequest(load=conductor_pb2.InstanceLoad()))
    assert "another session" in str(await failure(members["p0"].call.read()))
    await reborn.report(stored=(5,))
    assert await world.holders(5) == {"p0": 1}, "the end of the old session does not touch the new one"
    assert (await world.names())["p0"].schedulable


async def test_an_instance_that_leaves_is_forgotten_at_once(world):
    members = await world.cluster()
    await members["p0"].call.write(conductor_pb2.ReportSessionRequest(leaving=True))
    assert await asyncio.wait_for(members["p0"].call.read(), WAIT_S) == grpc.aio.EOF
    assert list(await world.names(PREFILL)) == ["p1"]


async def test_draining_instances_take_nothing_new(world):
    members = await world.cluster()
    await members["p0"].report(load=conductor_pb2.InstanceLoad(draining=True))
    assert not (await world.names())["p0"].schedulable
    for i in range(3):
        reply = await world.stub.Schedule(ask(f"r{i}"))
        assert reply.placement.prefill_instance_id == "p1"


async def test_a_restarted_conductor_rebuilds_its_index_from_snapshots(world):
    members = await world.cluster()
    await members["p0"].report(stored=(0, 1, 2, 3))
    await members["s0"].report(stored=(0, 1), removed=(1,))
    before = await world.holders(0, 1, 2, 3)
    assert before == {"p0": 4, "s0": 1}
    await world.restart()
    for member in members.values():
        member.call = None
        await member.connect()
    assert await world.holders(0, 1, 2, 3) == before
    reply = await world.stub.Schedule(ask())
    assert (reply.placement.prefill_instance_id, reply.placement.local_prefix_blocks) == ("p0", 4)
    await members["p0"].report(stored=(4,))
    assert await world.holders(0, 1, 2, 3, 4) == {"p0": 5, "s0": 1}


async def test_a_lost_change_leads_to_a_resync(world):
    members = await world.cluster()
    p0 = members["p0"]
    assert (await p0.report(stored=(1,))).acked_seq == 1
    p0.seq += 1
    response = await p0.report(stored=(2,))
    assert response.resync
    assert response.acked_seq == 1
    assert not (await p0.report(stored=(3,))).resync, "asked once"
    snapshot = conductor_pb2.CacheSnapshot(seq=p0.seq, keys=keys(1, 2, 3), first=True, last=True)
    await p0.call.write(conductor_pb2.ReportSessionRequest(snapshot=snapshot))
    assert (await p0.read()).acked_seq == p0.seq
    await p0.report(stored=(4,))
    assert await world.holders(1, 2, 3, 4) == {"p0": 4}
    assert world.metric("resyncs_total") == 1
    assert world.metric("deltas_total") == 2


async def test_a_snapshot_larger_than_one_step_arrives_whole(world):
    store = Reporter(world.stub, "s0", STORE, held=tuple(range(40_000)))
    await store.connect()
    assert (await world.names())["s0"].indexed_blocks == 40_000
    assert await world.holders(*range(300)) == {"s0": 300}


async def test_measurements_correct_the_cost_model(world):
    members = await world.cluster()
    measured = conductor_pb2.PrefillMeasurement(
        computed_tokens=65, prefix_tokens=0, compute_us=2_000_000, fetched_bytes=1_000_000, fetch_us=500_000
    )
    for name in ("p0", "p1"):
        await members[name].report(prefills=[measured] * 10)
    reply = await world.stub.Schedule(ask())
    assert reply.placement.predicted_ttft_ms == pytest.approx(2000, rel=0.1)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"instance_id": ""}, "registration.instance_id"),
        ({"instance_id": "x" * 129}, "registration.instance_id"),
        ({"boot_id": ""}, "registration.boot_id"),
        ({"role": 0}, "registration.role"),
        ({"role": 99}, "role"),
        ({"address": "nowhere"}, "registration.address"),
        ({"model": ""}, "registration.model"),
        ({"model_fingerprint": ""}, "registration.model_fingerprint"),
        ({"layout": common_pb2.KvLayout(layers=1)}, "registration.layout"),
        ({"key_secret_id": "x" * 129}, "registration.key_secret_id"),
    ],
)
async def test_bad_registrations_name_the_field(world, change, field):
    info = registration("p0", PREFILL)
    for name, value in change.items():
        if name == "layout":
            info.layout.CopyFrom(value)
        else:
            setattr(info, name, value)
    call = world.stub.ReportSession(timeout=WAIT_S)
    await call.write(conductor_pb2.ReportSessionRequest(registration=info))
    error = await failure(call.read())
    assert isinstance(error, InvalidArgument)
    assert error.field == field
    assert await world.names() == {}


def shares(count: int, prefix_level_blocks: int = 4, block_key: bytes = b"k" * 16, blocks: int = 8):
    """Returns a load with ``count`` shared prefixes."""
    each = conductor_pb2.SharedPrefix(block_key=block_key, blocks=blocks, requests=2)
    return conductor_pb2.InstanceLoad(prefix_level_blocks=prefix_level_blocks, shared_prefixes=[each] * count)


@pytest.mark.parametrize(
    ("report", "field"),
    [
        ({"load": conductor_pb2.InstanceLoad(mean_tbt_ms=float("nan"))}, "load.mean_tbt_ms"),
        ({"load": conductor_pb2.InstanceLoad(mean_tbt_ms=-1)}, "load.mean_tbt_ms"),
        ({"load": conductor_pb2.InstanceLoad(mean_tbt_ms=1e300)}, "load.mean_tbt_ms"),
        ({"load": conductor_pb2.InstanceLoad(room_wait_ms=1e9)}, "load.room_wait_ms"),
        ({"load": conductor_pb2.InstanceLoad(failed_source_addresses=["a:1"] * 65)}, "load.failed_source_addresses"),
        ({"load": conductor_pb2.InstanceLoad(prefix_level_blocks=4097)}, "load.prefix_level_blocks"),
        ({"load": shares(1, prefix_level_blocks=0)}, "load.shared_prefixes"),
        ({"load": shares(5)}, "load.shared_prefixes"),
        ({"load": shares(1, block_key=b"k" * 15)}, "load.shared_prefixes.block_key"),
        ({"load": shares(1, blocks=0)}, "load.shared_prefixes.blocks"),
        ({"snapshot": conductor_pb2.CacheSnapshot(keys=b"short", first=True)}, "snapshot.keys"),
        ({"deltas": [conductor_pb2.CacheDelta(seq=1, stored_keys=b"x")]}, "deltas.stored_keys"),
        ({"deltas": [conductor_pb2.CacheDelta(seq=1, removed_keys=b"x")]}, "deltas.removed_keys"),
    ],
)
async def test_bad_reports_name_the_field_and_end_the_session(world, report, field):
    members = await world.cluster()
    await members["p0"].call.write(conductor_pb2.ReportSessionRequest(**report))
    error = await failure(members["p0"].read())
    assert isinstance(error, InvalidArgument)
    assert error.field == field
    assert not (await world.names())["p0"].schedulable


async def test_the_first_report_must_register(world):
    call = world.stub.ReportSession(timeout=WAIT_S)
    await call.write(conductor_pb2.ReportSessionRequest(load=conductor_pb2.InstanceLoad()))
    error = await failure(call.read())
    assert (type(error), error.field) == (InvalidArgument, "registration")


# -- placing, request by request


async def test_a_placement_names_addresses_and_sources(world):
    members = await world.cluster()
    await members["s0"].report(stored=tuple(range(200)))
    placement = (await world.stub.Schedule(ask(blocks=200))).placement
    assert placement.prefill_address == placement.decode_address == "127.0.0.1:1"
    assert placement.decode_instance_id == "d0"
    assert placement.policy == "pinyon"
    assert placement.predicted_ttft_ms > 0
    (span,) = placement.fetches
    assert span == common_pb2.FetchSpan(
        source_id="s0", source_address="127.0.0.1:1", source=common_pb2.KV_SOURCE_STORE, first_block=0, block_count=200
    )


async def test_people_may_leave_out_the_request_id(world):
    await world.cluster()
    reply = await world.stub.Schedule(ask(""))
    assert reply.request_id
    assert (await world.stub.Release(conductor_pb2.ReleaseRequest(request_id=reply.request_id))).released
    assert not (await world.stub.Release(conductor_pb2.ReleaseRequest(request_id=reply.request_id))).released


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"prompt_tokens": 9000}, "prompt_tokens"),
        ({"model": ""}, "model"),
        ({"model": "x" * 129}, "model"),
        ({"block_keys": b"x" * 17}, "block_keys"),
        ({"block_keys": bytes(16 * 5)}, "block_keys"),
        ({"request_class": common_pb2.RequestClass(tenant="x" * 129)}, "request_class.tenant"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"exclude_instance_ids": ["a"] * 65}, "exclude_instance_ids"),
        ({"exclude_instance_ids": [""]}, "exclude_instance_ids"),
    ],
)
async def test_bad_requests_name_the_field(world, change, field):
    await world.cluster()
    request = ask(**{key: value for key, value in change.items() if key != "request_id"})
    request.request_id = change.get("request_id", "r")
    error = await failure(world.stub.Schedule(request))
    assert isinstance(error, InvalidArgument)
    assert error.field == field
    assert world.metric("placements_total", outcome="invalid_argument") == 1
    assert world.metric("inflight_placements") == 0


async def test_statuses_of_what_cannot_be_placed(world):
    assert isinstance(await failure(world.stub.Schedule(ask())), Unavailable)
    members = await world.cluster()
    error = await failure(world.stub.Schedule(ask(model="other")))
    assert (type(error), error.field) == (NotFound, "model")
    for name in ("p0", "p1"):
        await members[name].report(load=conductor_pb2.InstanceLoad(pending_prefill_tokens=100_000))
    error = await failure(world.stub.Schedule(ask(ttft_slo_ms=4000)))
    assert isinstance(error, ResourceExhausted)
    assert error.retry_after_s == pytest.approx(6.0, abs=0.1)
    assert world.metric("placements_total", outcome="resource_exhausted") == 1
    assert "10.0" in error.message
    assert "x-pinyon-ttft-slo-ms" in error.message


async def test_the_default_limit_is_against_load_not_against_length(world):
    """A prompt that alone needs more than the 30 s is placed, but waits behind others for at most a quarter of that."""
    members = await world.cluster()
    for name in ("p0", "p1"):
        slow = conductor_pb2.PrefillMeasurement(computed_tokens=1000, compute_us=8_000_000)
        await members[name].report(prefills=[slow] * 20)
    long = ask(prompt_tokens=5000, block_keys=b"")
    placement = (await world.stub.Schedule(long)).placement
    assert placement.predicted_ttft_ms > 35_000


async def test_lookup_refuses_parts_of_keys(world):
    call = world.stub.LookupBlocks(conductor_pb2.LookupBlocksRequest(block_keys=b"x"))
    assert (await failure(call)).field == "block_keys"


async def test_listing_refuses_roles_that_do_not_exist(world):
    call = world.stub.ListInstances(conductor_pb2.ListInstancesRequest(role=77))
    assert (await failure(call)).field == "role"


# -- placing, by session


async def test_a_session_begins_with_all_instances_then_hears_changes(world):
    lb = LoadBalancer(world.stub)
    first = await lb.open()
    assert not first.instances
    members = await world.cluster()
    full = await lb.list_where(lambda listed: len(listed) == 4)
    assert full.version > first.version
    await members["p0"].report(load=conductor_pb2.InstanceLoad(running_requests=1))
    await members["p1"].report(load=conductor_pb2.InstanceLoad(draining=True))
    message = await lb.read()
    listed = {instance.info.instance_id: instance for instance in message.instances.instances}
    assert message.instances.version == full.version + 1, "a load report alone is not announced"
    assert not listed["p1"].schedulable


async def test_a_batch_is_answered_in_one_message_with_its_errors(world):
    await world.cluster()
    lb = await world.balancer()
    requests = [ask("a"), ask("b", prompt_tokens=0), ask("c", block_keys=b""), ask("d", model="other")]
    requests.append(ask("e", ttft_slo_ms=1))
    await lb.call.write(conductor_pb2.ScheduleSessionRequest(requests=requests))
    message = await lb.read()
    answers = {answer.request_id: answer for answer in message.responses}
    assert [answer.request_id for answer in message.responses] == ["a", "b", "c", "d", "e"]
    assert answers["a"].placement.prefill_instance_id == "p0"
    assert answers["c"].placement.prefill_instance_id == "p1", "each sees what those before it added"
    assert (answers["b"].error.code, answers["b"].error.field) == ("INVALID_ARGUMENT", "prompt_tokens")
    assert answers["d"].error.code == "NOT_FOUND"
    assert answers["e"].error.code == "RESOURCE_EXHAUSTED"
    assert world.metric("inflight_placements") == 2
    assert world.metric("placements_total", outcome="placed") == 2
    assert world.metric("schedule_seconds_count") == 2


async def test_placements_end_by_release_by_report_and_by_age(world):
    members = await world.cluster()
    lb = await world.balancer()
    await lb.place(ask("a"), ask("b"), ask("c"), ask("d"))
    assert (world.metric("inflight_prefills"), world.metric("inflight_placements")) == (4, 4)
    await lb.place(released=["a", "unknown"])
    await lb.place(ask("probe", model="other"))
    assert world.metric("inflight_placements") == 3
    for name in ("p0", "p1"):
        await members[name].report(ended_prefill_request_ids=["b", "c"])
    assert world.metric("inflight_prefills") == 1
    await members["d0"].report(ended_decode_request_ids=["b", "c"])
    assert world.metric("inflight_placements") == 1
    world.now_s += 10_000
    for member in members.values():
        await member.report()
    world.conductor.sweep()
    assert (world.metric("inflight_prefills"), world.metric("inflight_placements")) == (0, 0)
    assert world.metric("inflight_expired") == 2


async def test_placements_that_no_instance_reports_are_soon_forgotten(world):
    members = await world.cluster()
    lb = await world.balancer()
    await lb.place(ask("a"), ask("b"))
    await members["d0"].report(begun_decode_request_ids=["a"])
    world.now_s += 10
    for member in members.values():
        await member.report()
    world.conductor.sweep()
    assert (world.metric("inflight_prefills"), world.metric("inflight_placements")) == (1, 1)
    await members["d0"].report(ended_decode_request_ids=["a"])
    assert world.metric("inflight_placements") == 0


async def test_placements_outlive_their_session(world):
    members = await world.cluster()
    lb = await world.balancer()
    await lb.place(ask("a"))
    await lb.call.done_writing()
    assert await asyncio.wait_for(lb.call.read(), WAIT_S) == grpc.aio.EOF
    assert world.metric("lb_sessions") == 0
    assert world.metric("inflight_placements") == 1
    await members["d0"].report(ended_decode_request_ids=["a"])
    assert world.metric("inflight_placements") == world.metric("inflight_prefills") == 0


async def test_answers_that_cannot_be_sent_are_taken_back(world):
    await world.cluster()

    class BrokenStream:
        writes = 0
        left = (conductor_pb2.ScheduleSessionRequest(requests=[ask("a"), ask("b")]), grpc.aio.EOF)

        async def read(self):
            first, *self.left = self.left
            return first

        async def write(self, message):
            self.writes += 1
            raise grpc.aio.UsageError("the stream is gone")

    stream = BrokenStream()
    with pytest.raises(Unavailable):
        await world.conductor.servicer.ScheduleSession(None, stream)
    assert stream.writes > 0
    assert world.metric("placements_total", outcome="placed") == 2
    assert world.metric("inflight_placements") == world.metric("inflight_prefills") == 0
    assert world.metric("lb_sessions") == 0


async def test_sessions_are_limited():
    async with World(lb_sessions_max=1) as world:
        await world.balancer()
        second = LoadBalancer(world.stub)
        assert isinstance(await failure(second.read()), ResourceExhausted)
        assert world.metric("lb_sessions") == 1


async def test_a_drain_does_not_wait_for_sessions_that_never_end(world):
    members = await world.cluster()
    lb = await world.balancer()
    await asyncio.wait_for(world.conductor.server.drain(0.1), WAIT_S)
    assert await failure(lb.read())
    assert await failure(members["p0"].read())
    async with asyncio.timeout(WAIT_S):
        # Its peer sees the end before the handler has finished.
        while world.metric("lb_sessions"):  # noqa: ASYNC110 - a metric has no event
            await asyncio.sleep(0)
