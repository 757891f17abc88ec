"""Block keys with different secrets never match: such processes are refused instead of missing silently."""

from __future__ import annotations

import logging

import grpc
import pytest
from prometheus_client import CollectorRegistry

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2, conductor_pb2_grpc
from pinyon.core.block_keys import namespace, secret_id
from pinyon.frontdoor.instances.instances import ConductorCluster
from pinyon.messages.instance import layout_from_proto
from pinyon.routing.layer import Layer
from pinyon.routing.plain import LeastLoadedTarget
from pinyon.routing.pushing import Blind
from pinyon.runtime.channel import open_channel
from pinyon.runtime.security import Security
from pinyon.runtime.telemetry import Telemetry
from services.conductor.app import build
from services.conductor.settings import ConductorSettings

LAYOUT = common_pb2.KvLayout(layers=1, kv_heads=1, head_dim=8, block_tokens=16, dtype="float32")
WAIT_S = 60.0


def info(name: str, secret: bytes, role: int = common_pb2.ROLE_MIXED) -> conductor_pb2.InstanceInfo:
    return conductor_pb2.InstanceInfo(
        instance_id=name, boot_id="1", role=role, address="127.0.0.1:1", model="m", model_fingerprint="f",
        layout=LAYOUT, capacity_blocks=100, max_batch=8, max_context_tokens=1000, key_secret_id=secret_id(secret),
    )  # fmt: skip


async def registers(stub: conductor_pb2_grpc.ConductorServiceStub, info: conductor_pb2.InstanceInfo) -> bool:
    call = stub.ReportSession(timeout=WAIT_S)
    await call.write(conductor_pb2.ReportSessionRequest(registration=info))
    answer = await call.read()
    call.cancel()
    return bool(answer.lease_ms)


async def test_a_worker_with_another_secret_does_not_register() -> None:
    conductor = build(
        ConductorSettings(), CollectorRegistry(), Telemetry("conductor", "c"), security=Security(secret=b"ours")
    )
    address = await conductor.server.start()
    try:
        async with open_channel(address) as channel:
            stub = conductor_pb2_grpc.ConductorServiceStub(channel)
            assert await registers(stub, info("a", b"ours"))
            assert await registers(stub, info("s", b"", common_pb2.ROLE_STORE)), "a store makes no keys"
            for other in (b"theirs", b""):
                with pytest.raises(grpc.aio.AioRpcError, match="--cluster-secret-file") as caught:
                    await registers(stub, info("b", other))
                assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    finally:
        await conductor.server.drain(0)


def test_a_load_balancer_leaves_them_out_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    layer = Layer(Blind(), LeastLoadedTarget())
    view = ConductorCluster(lambda model: layer, secret=b"ours")
    instances = [
        conductor_pb2.Instance(info=info(name, secret), schedulable=True)
        for name, secret in (("a", b"theirs"), ("b", b"ours"), ("c", b""))
    ]
    with caplog.at_level(logging.WARNING):
        view.update(conductor_pb2.InstanceList(instances=instances), 0.0)
        view.update(conductor_pb2.InstanceList(instances=instances), 0.0)
    assert [record.getMessage() for record in caplog.records] == [
        "not used, their block keys start from another secret: a, c"
    ]
    assert view.addresses == {"127.0.0.1:1"}
    assert view.choose("m", 10, (), 0.0).decode_instance_id == "b"
    with pytest.raises(Exception, match="No instance"):
        view.choose("m", 10, ("b",), 0.0)
    assert view.namespace("m", "acme") == namespace("f", layout_from_proto(LAYOUT).layout_id, "acme", b"ours")
