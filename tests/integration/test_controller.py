"""The controller and its sessions: load balancers that fail, freeze, leave and return, and its own failures."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import pytest
from prometheus_client import CollectorRegistry

from pinyon.api.controller.v1 import controller_pb2, controller_pb2_grpc
from pinyon.core.errors import InvalidArgument
from pinyon.federation.distances import Position
from pinyon.federation.registry import VERSION_MAX
from pinyon.federation.view import LbInfo, LbState, OwnedCluster
from pinyon.messages.federation import lb_info_to_proto
from pinyon.runtime.channel import Channels
from pinyon.runtime.identity import peer_name
from pinyon.runtime.security import load_security
from services.controller.app import build
from services.controller.settings import ControllerSettings
from services.controller.state_file import read_state
from tests.integration.conductor_parts import failure
from tests.integration.controller_parts import (
    WAIT_S,
    ControllerProcess,
    StubLb,
    cluster_of,
    connected,
    running_controller,
    spin,
    state_of,
    stub_of,
)
from tests.tls_files import TestAuthority


def distances(tmp_path: Path) -> str:
    path = tmp_path / "distances.json"
    path.write_text(json.dumps({"a": {"b": 80, "c": 20}, "b": {"c": 50}}))
    return str(path)


@contextlib.asynccontextmanager
async def lbs(address: str, *lb_ids: str, **info):
    async with contextlib.AsyncExitStack() as stack:
        started = [await stack.enter_async_context(StubLb(lb_id, address, **info)) for lb_id in lb_ids]
        for each in started:
            await each.until(lambda told: connected(told) >= set(lb_ids))
        yield started


# ---------------------------------------------------------------- failures of load balancers


async def test_one_that_dies_is_stood_in_for_and_gets_its_own_back(tmp_path):
    async with running_controller(distances=distances(tmp_path)) as (_, address, metrics):
        async with lbs(address, "a-0", "b-0", "c-0") as (a, b, c):
            await a.kill()
            await c.until_adopts("a")
            assert cluster_of(c.told[-1], "a").conductor == "a.example.org:7000"
            await c.kill()
            await b.until_adopts("a", "c")  # several at once
            async with lbs(address, "a-0", boot="2") as (again,):
                await b.until_adopts("c")
                await again.until(lambda told: not cluster_of(told, "a").adopter)
        assert metrics.get_sample_value("pinyon_controller_failures_total") >= 2
        assert metrics.get_sample_value("pinyon_controller_handbacks_total") == 1
        assert metrics.get_sample_value("pinyon_controller_probes_total", {"outcome": "silent"}) >= 4


async def test_a_hanging_load_balancer_is_replaced_while_connected():
    times = {"silence_s": 1.5, "probe_timeout_s": 0.5}
    async with running_controller(**times) as (_, address, _), lbs(address, "a-0", "b-0") as (a, b):
        a.freeze()
        told = await b.until(lambda told: cluster_of(told, "a").adopter == "b-0")
        assert state_of(told, "a-0") is LbState.FAILED
        assert "a-0" in connected(told)
        a.thaw()
        await b.until_adopts()


async def test_one_that_only_loses_its_session_goes_on():
    async with running_controller() as (controller, address, metrics), lbs(address, "a-0", "b-0") as (a, b):

        def answered() -> float:
            return metrics.get_sample_value("pinyon_controller_probes_total", {"outcome": "answered"}) or 0.0

        await a.hang_up()
        await b.until(lambda told: "a-0" not in connected(told))
        before = answered()
        await spin(lambda: answered() >= before + 3)
        assert state_of(controller.registry.federation, "a-0") is LbState.LIVE
        assert not cluster_of(b.told[-1], "a").adopter


async def test_who_leaves_or_drains_is_stood_in_for_at_once():
    async with running_controller() as (controller, address, _), lbs(address, "a-0", "b-0") as (a, b):
        a.session.ready.draining = True
        a.session.wake()
        await b.until_adopts("a")
        a.session.ready.draining = False
        a.session.wake()
        await b.until_adopts()
        await a.leave()
        await b.until_adopts("a")
        assert controller.registry.failures == 0


async def test_another_process_on_the_port_is_not_taken_for_it():
    async with running_controller() as (_, address, _), lbs(address, "a-0", "b-0") as (a, b):
        await a.kill()
        a.release_port()
        other = grpc.aio.server()
        other.add_insecure_port(a.address)
        await other.start()
        await b.until_adopts("a")
        await other.stop(None)


async def test_the_newest_boot_has_the_name():
    async with contextlib.AsyncExitStack() as stack:
        _, address, _ = await stack.enter_async_context(running_controller())
        (old,) = await stack.enter_async_context(lbs(address, "a-0"))
        async with StubLb("a-0", address, boot="2") as new:
            await new.until(lambda told: "2" in [each.info.boot_id for each in told.members])
            await spin(lambda: not old.session.connected)
            async with stub_of(address) as stub:
                call = await said(stub, _registration("a-0", "1"))
                assert await _code(call.read()) is grpc.StatusCode.FAILED_PRECONDITION
            assert new.session.connected


async def said(stub: controller_pb2_grpc.ControllerServiceStub, message: controller_pb2.SessionRequest):
    """Begins a session with that message, and returns it."""
    call = stub.Session()
    await call.write(message)
    return call


async def _read_all(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def _registration(lb_id: str, boot: str) -> controller_pb2.SessionRequest:
    info = controller_pb2.LoadBalancerInfo(lb_id=lb_id, boot_id=boot, region="a", grpc_address="127.0.0.1:1")
    return controller_pb2.SessionRequest(registration=info)


async def test_sessions_that_say_nonsense_end_with_the_reason():
    async with running_controller() as (controller, address, _), stub_of(address) as stub:
        wrong = _registration("x", "1")
        wrong.registration.region = "no region"
        wrong.known.load_balancers.add()
        for message, field in ((controller_pb2.SessionRequest(), "registration"), (wrong, "registration.region")):
            call = await said(stub, message)
            error = await failure(call.read())
            assert isinstance(error, InvalidArgument)
            assert error.field == field
        good = _registration("x", "1")
        good.known.load_balancers.add()  # what another version told it does not matter
        call = await said(stub, good)
        assert (await call.read()).federation.load_balancers[0].info.lb_id == "x"
        await call.write(controller_pb2.SessionRequest(latencies_ms={"y": -1.0}))
        with pytest.raises(grpc.aio.AioRpcError, match="latencies_ms"):
            await _read_all(call)
        assert controller.registry.federation.members[0].info.lb_id == "x"


@pytest.mark.parametrize("remembers", [True, False], ids=["file", "no file"])
@pytest.mark.parametrize("version", [2**64 - 1, 2**64 - 2**20 - 2**19], ids=["largest", "jump below"])
async def test_a_version_beyond_all_measure_harms_nobody(tmp_path, version, remembers):
    state = tmp_path / "state.json"
    settings = {"state_file": str(state)} if remembers else {}
    async with running_controller(**settings) as (controller, address, _), lbs(address, "a-0", "b-0") as (a, b):
        epoch = controller.registry.federation.epoch
        async with stub_of(address) as stub:
            first = _registration("x", "1")
            first.known.epoch, first.known.version = epoch, version
            call = await said(stub, first)
            assert (await call.read()).federation.version < VERSION_MAX
            told = await b.until(lambda told: told.epoch != epoch)
            assert told.version < VERSION_MAX
            call.cancel()
        await a.kill()
        await b.until_adopts("a")
    if remembers:
        kept = read_state(state)
        assert kept is not None
        assert kept.version < VERSION_MAX


async def test_a_state_file_with_such_a_version_is_read(tmp_path):
    path = tmp_path / "state.json"
    async with (
        running_controller(state_file=str(path)) as (_, address, _),
        lbs(address, "a-0"),
        stub_of(address) as stub,
    ):
        await stub.RemoveInstance(controller_pb2.RemoveInstanceRequest(region="a", instance="w"))
    document = json.loads(path.read_text())
    epoch, document["federation"]["version"] = document["federation"]["epoch"], str(2**64 - 2**20 - 2**19)
    path.write_text(json.dumps(document))
    async with running_controller(state_file=str(path)) as (controller, address, _), lbs(address, "a-0") as (a,):
        told = await a.until(lambda told: told.epoch != epoch)
        assert told.version < VERSION_MAX
        assert cluster_of(told, "a").removed == ("w",), "what it says beside that counts"
        assert controller.registry.federation.epoch == told.epoch


# ---------------------------------------------------------------- what members are told


async def test_reports_and_the_list_of_regions():
    async with running_controller() as (_, address, _), lbs(address, "a-0", "b-0") as (a, b):
        a.session.load_now = controller_pb2.LoadBalancerLoad(
            queue=3, instances=2, forwarded_by_region={"b": 7}, per_instance=[{"name": "i", "outstanding": 3}]
        )
        a.session.latencies_now = {"b-0": 12.5}
        a.session.wake()
        async with stub_of(address) as stub, asyncio.timeout(WAIT_S):
            while True:
                reply = await stub.ListRegions(controller_pb2.ListRegionsRequest())
                report = reply.reports["a-0"]
                if report.load.queue == 3:
                    break
                await asyncio.sleep(0.01)
        assert report.latencies_ms == {"b-0": 12.5}
        assert report.load.per_instance[0].outstanding == 3
        assert report.load.forwarded_by_region == {"b": 7}
        assert reply.settling
        assert [each.name for each in reply.federation.regions] == ["a", "b"]
        assert b.session.federation == b.told[-1]


async def test_a_load_balancer_says_that_it_owns_something_else():
    async with running_controller() as (_, address, _), lbs(address, "a-0") as (a,), stub_of(address) as stub:
        call = stub.Session()
        for url in ("http://10.0.0.1:8000", "http://10.0.0.2:8000"):
            info = LbInfo("b-0", "1", "b", "h:1", "", (OwnedCluster("b", upstreams=(url,)),))
            await call.write(controller_pb2.SessionRequest(registration=lb_info_to_proto(info)))
            await a.until(lambda told, url=url: cluster_of(told, "b").upstreams == (url,))


async def test_instances_by_hand_are_told_and_kept(tmp_path):
    state = tmp_path / "state.json"
    upstreams = (OwnedCluster("u", upstreams=("http://u1", "http://u2")),)
    async with running_controller(state_file=str(state)) as (controller, address, _):  # noqa: SIM117
        async with lbs(address, "u-0", clusters=upstreams) as (lb,), stub_of(address) as stub:
            reply = await stub.AddInstance(controller_pb2.AddInstanceRequest(region="u", instance="http://u3"))
            assert reply.changed
            kept = read_state(state)
            assert kept is not None
            assert kept.version >= reply.version, "it is on the disk when it is answered"
            reply = await stub.RemoveInstance(controller_pb2.RemoveInstanceRequest(region="u", instance="http://u1"))
            told = await lb.until(lambda told: told.version >= reply.version)
            assert cluster_of(told, "u").upstreams == ("http://u2", "http://u3")
            for request in (
                controller_pb2.AddInstanceRequest(region="x", instance="http://u1"),
                controller_pb2.AddInstanceRequest(region="u", instance="worker-1"),
                controller_pb2.AddInstanceRequest(region="u", instance="http://no spaces"),
            ):
                with pytest.raises(grpc.aio.AioRpcError):
                    await stub.AddInstance(request)
            with pytest.raises(grpc.aio.AioRpcError, match="u-0 is live"):
                await stub.ForgetLoadBalancer(controller_pb2.ForgetLoadBalancerRequest(lb_id="u-0"))
            await lb.leave()
            await spin(lambda: state_of(controller.registry.federation, "u-0") is not LbState.LIVE)
            await stub.ForgetLoadBalancer(controller_pb2.ForgetLoadBalancerRequest(lb_id="u-0"))
            reply = await stub.ListRegions(controller_pb2.ListRegionsRequest())
            assert not reply.federation.clusters


async def test_clients_find_the_nearest_that_lives():
    async with (
        running_controller() as (controller, address, _),
        StubLb("eu-0", address, position=Position(50.1, 8.7)) as eu,
        StubLb("us-0", address, position=Position(39.0, -77.5)) as us,
    ):
        await us.until(lambda told: len(told.members) == 2)
        base = f"http://{controller.pages.address}"

        async def get(path: str):
            return json.loads(await asyncio.to_thread(lambda: urllib.request.urlopen(base + path, timeout=30).read()))

        found = await get("/v1/regions?lat=48.9&lon=2.4&live=1")
        assert [each["region"] for each in found["regions"]] == ["eu", "us"]
        assert found["regions"][0]["load_balancers"][0]["http"] == "http://eu-0.example.org"
        await eu.kill()
        await us.until_adopts("eu")
        found = await get("/v1/regions?lat=48.9&lon=2.4&live=1")
        assert [each["region"] for each in found["regions"]] == ["us"]
        found = await get("/v1/regions?region=eu")
        assert [(each["region"], each["live"]) for each in found["regions"]] == [("us", True), ("eu", False)]
        assert (await get("/health"))["status"] == "ok"
        for path, status in (
            *(("/v1/regions?lat=1", 400), ("/v1/regions?lat=x&lon=1", 400), ("/v1/regions?lat=99&lon=1", 400)),
            *(("/v1/regions?region=mars", 404), ("/v1/regions?q=1", 400), ("/", 404), ("/v1/regions?live=2", 400)),
            *(("/v1/regions?live=1&live=1", 400), ("/v1/regions?lat=nan&lon=1", 400)),
        ):
            with pytest.raises(urllib.error.HTTPError) as caught:
                await get(path)
            with caught.value:
                assert caught.value.code == status, path


# ---------------------------------------------------------------- failures of the controller


@pytest.mark.parametrize("file", ["kept", "lost", "broken"])
async def test_a_controller_that_is_killed_goes_on_where_it_was(tmp_path, file):
    async with contextlib.AsyncExitStack() as stack:
        process = await stack.enter_async_context(ControllerProcess(tmp_path, distances=distances(tmp_path)))
        address = await process.start()
        a, b, c = await stack.enter_async_context(lbs(address, "a-0", "b-0", "c-0"))
        await a.kill()
        await c.until_adopts("a")
        async with stub_of(address) as stub:
            reply = await stub.RemoveInstance(controller_pb2.RemoveInstanceRequest(region="b", instance="worker-1"))
            assert reply.changed
        await b.until(lambda told: told.version >= reply.version)
        before = b.told[-1]
        await process.kill()
        await spin(lambda: not b.session.connected and not c.session.connected)
        assert [each.region for each in c.session.adopted()] == ["a"], "it goes on while nobody says anything"
        state = tmp_path / "state.json"
        if file == "lost":
            state.unlink()
        elif file == "broken":
            state.write_text(state.read_text()[:-20])
        await process.start()
        after = await b.until(
            lambda told: (
                told.follows(before) and connected(told) == {"b-0", "c-0"} and state_of(told, "a-0") is not None
            )
        )
        assert (after.epoch == before.epoch) == (file == "kept")
        assert cluster_of(after, "a").adopter == "c-0"
        assert cluster_of(after, "b").removed == ("worker-1",)
        assert (tmp_path / "state.json.broken").exists() == (file == "broken")
        assert [each.region for each in c.session.adopted(("b-0",))] == ["a"]
        # A load balancer that returned while the controller was away owns its cluster again in the end.
        async with lbs(address, "a-0", boot="2"):
            await c.until_adopts()


@pytest.mark.parametrize(("file", "grace_s"), [("whole", 1.0), ("old", 10.0)])
async def test_who_died_while_the_controller_was_away_is_found(tmp_path, file, grace_s):
    state, aside = tmp_path / "state.json", tmp_path / "aside.json"
    async with contextlib.AsyncExitStack() as stack:
        process = await stack.enter_async_context(ControllerProcess(tmp_path, grace_s=grace_s))
        address = await process.start()
        (b,) = await stack.enter_async_context(lbs(address, "b-0"))
        stub = await stack.enter_async_context(stub_of(address))
        # A manual change is on disk when it is answered, with all changes before it.
        await stub.RemoveInstance(controller_pb2.RemoveInstanceRequest(region="b", instance="nobody"))
        shutil.copy(state, aside)
        async with lbs(address, "a-0") as (a,):
            await b.until(lambda told: "a-0" in connected(told))
            await stub.RemoveInstance(controller_pb2.RemoveInstanceRequest(region="b", instance="nobody else"))
            await process.kill()
            await a.kill()
            if file == "old":  # the last change was told, but had not reached the disk
                shutil.copy(aside, state)
            await spin(lambda: not b.session.connected)
            await process.start()
            await b.until_adopts("a")


def test_state_files_that_cannot_be_used(tmp_path):
    with pytest.raises(InvalidArgument, match="no folder"):
        read_state(tmp_path / "nowhere" / "x.json")
    path = tmp_path / "x.json"
    for text in ("", "[]", '{"format": 1}', '{"format": 1, "federation": {"regions": 3}}', "[" * 100_000, "\0"):
        path.write_text(text)
        assert read_state(path) is None, text[:50]
        assert not path.exists()
    path.write_text('{"format": 2}')
    with pytest.raises(InvalidArgument, match="later version"):
        read_state(path)
    assert path.exists()


def test_files_that_cannot_be_used_are_named(tmp_path):
    bad = tmp_path / "bad.json"
    for text in ("{", '{"a": 1}'):
        bad.write_text(text)
        for field in ("geography", "distances"):
            with pytest.raises(InvalidArgument) as caught:
                build(ControllerSettings(**{field: str(bad)}), CollectorRegistry())
            assert caught.value.field == field
            assert str(bad) in caught.value.message
    with pytest.raises(InvalidArgument):
        build(ControllerSettings(distances=str(tmp_path / "none")), CollectorRegistry())


# ---------------------------------------------------------------- permissions


async def test_with_tls_only_its_own_load_balancers_register(tmp_path, caplog):
    authority = TestAuthority(tmp_path / "certs")
    settings = ControllerSettings(tls_dir=str(authority.folder("controller", "controller")))
    security = load_security(settings, "controller")
    controller = build(settings, CollectorRegistry(), security=security)
    address = (await controller.start())["grpc"]
    name = peer_name("controller")
    lb = Channels(authority.tls("lb", "a-0", region="a"))
    elsewhere = Channels(authority.tls("lb", "c-0", region="c"))
    admin = Channels(authority.tls("admin", "anna"))
    worker = Channels(authority.tls("worker", "w"))
    try:
        async with lb.open(address, name) as channel:
            stub = controller_pb2_grpc.ControllerServiceStub(channel)
            call = await said(stub, _registration("a-0", "1"))
            assert (await call.read()).federation.load_balancers[0].info.lb_id == "a-0"
            other = await said(stub, _registration("b-0", "1"))
            assert await _code(other.read()) is grpc.StatusCode.PERMISSION_DENIED
            request = controller_pb2.ForgetLoadBalancerRequest(lb_id="x")
            assert await _code(stub.ForgetLoadBalancer(request)) is grpc.StatusCode.PERMISSION_DENIED
        async with elsewhere.open(address, name) as channel:
            call = await said(controller_pb2_grpc.ControllerServiceStub(channel), _registration("c-0", "1"))
            with pytest.raises(grpc.aio.AioRpcError, match="not one for the region a"):
                await call.read()
        assert any(each.getMessage().startswith("refused b-0 of a: the certificate") for each in caplog.records)
        async with admin.open(address, name) as channel:
            stub = controller_pb2_grpc.ControllerServiceStub(channel)
            assert await _code(stub.ForgetLoadBalancer(request)) is grpc.StatusCode.NOT_FOUND
            assert (await stub.ListRegions(controller_pb2.ListRegionsRequest())).federation.load_balancers
        async with worker.open(address, name) as channel:
            stub = controller_pb2_grpc.ControllerServiceStub(channel)
            listing = stub.ListRegions(controller_pb2.ListRegionsRequest())
            assert await _code(listing) is grpc.StatusCode.PERMISSION_DENIED
    finally:
        await controller.close(0)


async def _code(call) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


# ---------------------------------------------------------------- by the process itself


async def test_a_policy_that_changes_counts_at_once(tmp_path):
    policy = tmp_path / "policy.json"
    policy.write_text('{"regions": {"a": ["eu"], "b": []}, "rules": [{"from": ["eu"], "to": ["eu"]}]}')
    async with contextlib.AsyncExitStack() as stack:
        process = await stack.enter_async_context(ControllerProcess(tmp_path, geography=policy))
        address = await process.start()
        a, b = await stack.enter_async_context(lbs(address, "a-0", "b-0"))
        await b.until(lambda told: ("eu",) in [each.tags for each in told.regions if each.name == "a"])
        await a.kill()
        told = await b.until(lambda told: state_of(told, "a-0") is LbState.FAILED)
        assert not cluster_of(told, "a").adopter, "law is above all"
        policy.write_text("{}")
        await b.until_adopts("a")


async def test_a_failed_one_is_started_again_by_the_hook(tmp_path):
    hook = f'{sys.executable} -c \'import os; open("{tmp_path}/hook", "w").write(os.environ["PINYON_FAILED_LB_ID"])\''
    async with running_controller(restart_hook=hook) as (_, address, metrics), lbs(address, "a-0", "b-0") as (a, _):
        await a.kill()
        await spin(lambda: (metrics.get_sample_value("pinyon_controller_restarts_total", {"outcome": "ok"}) or 0) >= 1)
        assert (tmp_path / "hook").read_text() == "a-0"
