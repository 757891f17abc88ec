"""The clients that a gRPC server with TLS admits, and the methods that each may call."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pinyon.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from pinyon.api.worker.v1 import worker_pb2, worker_pb2_grpc
from pinyon.runtime.callers import ANYBODY, BLOCK_READ_CALLERS, Callers, caller_check
from pinyon.runtime.channel import Channels, open_channel, tls_options
from pinyon.runtime.grpc_server import GrpcServer
from pinyon.runtime.identity import ROLES, caller, peer_name
from pinyon.runtime.tls import Tls, client_credentials
from services.conductor.servicer import CONDUCTOR_CALLERS
from services.controller.servicer import CONTROLLER_CALLERS
from services.kvstore.servicer import KVSTORE_CALLERS
from services.lb.servicer import LB_CALLERS
from services.worker.servicer import WORKER_CALLERS
from tests.tls_files import TestAuthority

KV_SERVICE = kvstore_pb2.DESCRIPTOR.services_by_name["KvStoreService"]
WORKER_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
STORE = peer_name("kvstore", "kv-0")
REFUSED = {grpc.StatusCode.UNAVAILABLE}
"""The status that a client sees when its handshake fails."""


class Node(kvstore_pb2_grpc.KvStoreServiceServicer):
    def __init__(self) -> None:
        self.seen: list[str] = []

    async def Exists(self, request: Any, context: Any) -> Any:
        self.seen.append(str(caller(context)))
        return kvstore_pb2.ExistsResponse()

    async def GetNodeStatus(self, request: Any, context: Any) -> Any:
        self.seen.append(str(caller(context)))
        return kvstore_pb2.GetNodeStatusResponse()


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    """A servicer with all kinds of streams."""

    async def Generate(self, request: Any, context: Any) -> Any:
        yield worker_pb2.GenerateResponse()

    async def Session(self, _: Any, context: Any) -> None:
        await context.write(worker_pb2.SessionResponse())


@pytest.fixture
def authority(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "certs")


class Server:
    def __init__(
        self, tls: Tls | None, callers: Callers = KVSTORE_CALLERS, admin_listen: str = "", sessions: bool = False
    ) -> None:
        self.node = Node()
        self.server = GrpcServer("127.0.0.1:0", tls, admin_listen=admin_listen, sessions=sessions)
        self.server.add(self.node, KV_SERVICE, callers)
        self.server.add(Worker(), WORKER_SERVICE, WORKER_CALLERS)
        self.address = ""

    async def __aenter__(self) -> Server:
        self.address = await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.drain(0)


@pytest.fixture(params=[False, True], ids=["by grpcio", "within the loop"])
async def server(authority: TestAuthority, request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    async with Server(authority.tls("kvstore", "kv-0"), sessions=request.param) as running:
        yield running


async def exists(channel: grpc.aio.Channel) -> grpc.StatusCode:
    """Returns the status of a call that workers may make."""
    async with channel:
        try:
            await kvstore_pb2_grpc.KvStoreServiceStub(channel).Exists(kvstore_pb2.ExistsRequest(), timeout=30)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


def channel(address: str, tls: Tls | None, name: str = STORE) -> grpc.aio.Channel:
    return Channels(tls).open(address, name)


async def test_a_worker_gets_in_and_the_server_knows_which(server: Server, authority: TestAuthority) -> None:
    assert await exists(channel(server.address, authority.tls("worker", "prefill-0"))) is grpc.StatusCode.OK
    assert server.node.seen == ["worker prefill-0"]


async def test_strangers_do_not_get_in(server: Server, authority: TestAuthority, tmp_path: Path) -> None:
    ca = authority.folder("worker", "a") / "ca.crt"
    (tmp_path / "anonymous").mkdir()
    (tmp_path / "anonymous" / "ca.crt").write_bytes(ca.read_bytes())
    other = TestAuthority(tmp_path / "other").folder("worker", "a")
    (other / "ca.crt").write_bytes(ca.read_bytes())  # it trusts the server, but the server does not trust it
    ended = authority.folder("worker", "b", ended=True)
    for folder in (tmp_path / "anonymous", other, ended):
        stranger = grpc.aio.secure_channel(server.address, client_credentials(folder), options=tls_options(STORE))
        assert await exists(stranger) in REFUSED, folder
    assert await exists(open_channel(server.address)) in REFUSED
    assert server.node.seen == []


async def test_a_client_does_not_talk_to_another_than_it_means(server: Server, authority: TestAuthority) -> None:
    worker = authority.tls("worker", "a")
    for name in (peer_name("kvstore"), "blocks.pinyon"):
        assert await exists(channel(server.address, worker, name)) is grpc.StatusCode.OK
    for name in (peer_name("kvstore", "kv-1"), peer_name("conductor"), "example.org"):
        assert await exists(channel(server.address, worker, name)) in REFUSED, name
    seen = len(server.node.seen)
    async with Server(None) as plain:
        assert await exists(channel(plain.address, worker)) in REFUSED
        assert plain.node.seen == []
    assert len(server.node.seen) == seen


async def test_another_role_is_refused_by_name(
    server: Server, authority: TestAuthority, caplog: pytest.LogCaptureFixture
) -> None:
    stub = kvstore_pb2_grpc.KvStoreServiceStub
    async with channel(server.address, authority.tls("lb", "lb-0")) as lb:
        await stub(lb).GetNodeStatus(kvstore_pb2.GetNodeStatusRequest())
        with caplog.at_level(logging.WARNING):
            for _ in range(50):
                with pytest.raises(grpc.aio.AioRpcError, match="role lb may not call") as caught:
                    await stub(lb).Exists(kvstore_pb2.ExistsRequest())
                assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    refusals = [record for record in caplog.records if "refused" in record.getMessage()]
    assert len(refusals) == 1, "the log has a rate limit"
    assert "lb lb-0" in refusals[0].getMessage()


async def test_all_kinds_of_methods_are_guarded(server: Server, authority: TestAuthority) -> None:
    """Calls of another role, unary or streaming, never reach the servicer; the right role's calls do."""
    for role, code in (("worker", grpc.StatusCode.PERMISSION_DENIED), ("lb", grpc.StatusCode.OK)):
        async with channel(server.address, authority.tls(role, "a")) as opened:
            stub = worker_pb2_grpc.WorkerServiceStub(opened)
            for call in (stub.Generate(worker_pb2.GenerateRequest()), stub.Session(iter(()))):
                messages = 0
                try:
                    async for _ in call:
                        messages += 1
                except grpc.aio.AioRpcError:
                    pass
                assert (await call.code(), messages) == (code, int(code is grpc.StatusCode.OK))


@pytest.mark.parametrize("role", ROLES)
async def test_health_and_reflection_are_for_every_member(role: str, server: Server, authority: TestAuthority) -> None:
    async with channel(server.address, authority.tls(role, "a")) as opened:
        reply = await health_pb2_grpc.HealthStub(opened).Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in reflection_pb2_grpc.ServerReflectionStub(opened).ServerReflectionInfo(iter([ask])):
            assert KV_SERVICE.full_name in {each.name for each in answer.list_services_response.service}


async def test_a_certificate_that_names_nobody_has_no_identity(
    server: Server, authority: TestAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate is like one made by hand for the same authority."""
    monkeypatch.setattr("pinyon.runtime.identity.Identity.names", ("a.worker.pinyon", "b.worker.pinyon"))
    folder = authority.folder("worker", "a")
    monkeypatch.undo()
    made = grpc.aio.secure_channel(server.address, client_credentials(folder), options=tls_options(STORE))
    assert await exists(made) is grpc.StatusCode.UNAUTHENTICATED


async def test_renewed_files_take_effect_without_a_restart(authority: TestAuthority, tmp_path: Path) -> None:
    """The authority changes: both authorities are trusted for a while, then only the new one."""
    tls, worker = authority.tls("kvstore", "kv-0"), authority.tls("worker", "a")
    newer = TestAuthority(tmp_path / "newer")
    newer_worker = newer.tls("worker", "a")
    async with Server(tls) as server:
        standing = channel(server.address, worker)
        stub = kvstore_pb2_grpc.KvStoreServiceStub(standing)
        await stub.Exists(kvstore_pb2.ExistsRequest())
        assert await exists(channel(server.address, newer_worker)) in REFUSED

        for name, data in {path.name: path.read_bytes() for path in newer.folder("kvstore", "kv-0").iterdir()}.items():
            (tls.certificate.parent / name).write_bytes(data)
        tls.renew()
        assert await exists(channel(server.address, newer_worker)) is grpc.StatusCode.OK
        assert await exists(channel(server.address, worker)) in REFUSED
        await stub.Exists(kvstore_pb2.ExistsRequest())  # an open connection is not cut
        await standing.close()

        channels = Channels(worker)
        calls = channels.calls_to(server.address, STORE)
        for name, data in {path.name: path.read_bytes() for path in newer.folder("worker", "a").iterdir()}.items():
            (worker.certificate.parent / name).write_bytes(data)
        worker.renew()
        assert await exists(channels.open(server.address, STORE)) is grpc.StatusCode.OK
        asked, told = kvstore_pb2.ExistsRequest, kvstore_pb2.ExistsResponse
        path = f"/{KV_SERVICE.full_name}/Exists"
        await calls.call(path, asked.SerializeToString, told.FromString, asked(), 5.0)  # with the new files
        calls.close()


async def test_an_open_port_lets_people_in_an_admin_port_only_members(authority: TestAuthority) -> None:
    callers: Callers = {**KVSTORE_CALLERS, "GetNodeStatus": ANYBODY}
    tls = authority.tls("kvstore", "kv-0")
    async with Server(tls, callers, admin_listen="127.0.0.1:0") as server:
        stub = kvstore_pb2_grpc.KvStoreServiceStub
        ca = authority.folder("worker", "a") / "ca.crt"
        people = grpc.ssl_channel_credentials(ca.read_bytes())
        async with grpc.aio.secure_channel(server.address, people, options=tls_options(STORE)) as opened:
            await stub(opened).GetNodeStatus(kvstore_pb2.GetNodeStatusRequest())
            await health_pb2_grpc.HealthStub(opened).Check(health_pb2.HealthCheckRequest())
        assert await exists(channel(server.address, authority.tls("worker", "a"))) is grpc.StatusCode.UNAUTHENTICATED
        admin_port = server.server.admin_address
        assert await exists(channel(admin_port, authority.tls("worker", "a"))) is grpc.StatusCode.OK
        assert await exists(grpc.aio.secure_channel(admin_port, people, options=tls_options(STORE))) in REFUSED


async def test_a_server_with_tls_says_for_every_method_who_may_call_it(authority: TestAuthority) -> None:
    server = GrpcServer("127.0.0.1:0", authority.tls("kvstore", "kv-0"))
    incomplete = {name: roles for name, roles in KVSTORE_CALLERS.items() if name != "Remove"}
    for callers in (None, {}, incomplete, {**KVSTORE_CALLERS, "Typo": ANYBODY}):
        with pytest.raises(ValueError, match="KvStoreService"):
            server.add(Node(), KV_SERVICE, callers)


def test_tables_name_known_roles_and_only_lbs_speak_for_tenants() -> None:
    stores = (KVSTORE_CALLERS, BLOCK_READ_CALLERS)
    for table in (CONDUCTOR_CALLERS, CONTROLLER_CALLERS, WORKER_CALLERS, *stores):
        assert all(roles and roles <= set(ROLES) for roles in table.values())
    for table, methods in (
        (WORKER_CALLERS, ("Session", "Generate")),
        (CONTROLLER_CALLERS, ("Session",)),
        (CONDUCTOR_CALLERS, ("Schedule", "ScheduleSession", "Release")),
    ):
        assert {table[method] for method in methods} == {frozenset(("lb",))}
    assert set(LB_CALLERS.values()) == {ANYBODY}


async def test_a_method_that_is_in_no_table_is_for_nobody() -> None:
    class Context:
        def peer_identities(self) -> list[bytes]:
            return [b"a.admin.pinyon"]

        def peer(self) -> str:
            return "somewhere"

    async def there(requests: Any, context: Any) -> None: ...

    with pytest.raises(Exception, match="role admin may not call"):
        await caller_check({})(there, "/a.B/C")(b"", Context())
