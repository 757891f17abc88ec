"""A conductor with real gRPC in this process; the test plays its instances and load balancers."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from prometheus_client import CollectorRegistry

from launch.ports import HeldPorts
from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2, conductor_pb2_grpc
from pinyon.runtime.channel import open_channel
from pinyon.runtime.interceptors import error_from_rpc
from pinyon.runtime.security import NO_SECURITY, Security
from pinyon.runtime.telemetry import Telemetry
from services.conductor.app import Conductor, build
from services.conductor.settings import ConductorSettings

WAIT_S = 40.0
PREFILL, DECODE, STORE = common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE, common_pb2.ROLE_STORE


def keys(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "little") for number in numbers)


def registration(name: str, role, boot: str = "1", **changes) -> conductor_pb2.InstanceInfo:
    info = conductor_pb2.InstanceInfo(
        instance_id=name, boot_id=boot, role=role, address="127.0.0.1:1", capacity_blocks=1000, **changes
    )
    if role != STORE:
        info.model = info.model or "m"
        info.model_fingerprint = "f"
        info.max_batch, info.max_context_tokens = 16, 8192
        info.layout.CopyFrom(common_pb2.KvLayout(layers=2, kv_heads=2, head_dim=16, block_tokens=16, dtype="float32"))
    return info


class Reporter:
    """An instance's side of a report session. Its reports carry a change, so that each is acknowledged."""

    def __init__(self, stub, name: str, role, boot: str = "1", held: tuple[int, ...] = ()) -> None:
        self.info = registration(name, role, boot)
        self.stub = stub
        self.seq = 0
        self.held = held

    async def connect(self, **report) -> conductor_pb2.ReportSessionResponse:
        self.call = self.stub.ReportSession(timeout=60)
        snapshot = conductor_pb2.CacheSnapshot(seq=self.seq, keys=keys(*self.held), first=True, last=True)
        report.setdefault("load", conductor_pb2.InstanceLoad())
        await self.call.write(conductor_pb2.ReportSessionRequest(registration=self.info, snapshot=snapshot, **report))
        return await self.read()

    async def report(self, stored: tuple[int, ...] = (), removed: tuple[int, ...] = (), **report):
        self.seq += 1
        self.held = tuple((set(self.held) | set(stored)) - set(removed))
        delta = conductor_pb2.CacheDelta(seq=self.seq, stored_keys=keys(*stored), removed_keys=keys(*removed))
        await self.call.write(conductor_pb2.ReportSessionRequest(deltas=[delta], **report))
        return await self.read()

    async def read(self) -> conductor_pb2.ReportSessionResponse:
        return await asyncio.wait_for(self.call.read(), WAIT_S)


class LoadBalancer:
    """A load balancer's side of a schedule session."""

    def __init__(self, stub) -> None:
        self.call = stub.ScheduleSession(timeout=60)

    async def open(self) -> conductor_pb2.InstanceList:
        await self.call.write(conductor_pb2.ScheduleSessionRequest(lb_id="lb"))
        return (await self.read()).instances

    async def read(self) -> conductor_pb2.ScheduleSessionResponse:
        return await asyncio.wait_for(self.call.read(), WAIT_S)

    async def place(self, *requests, released=()) -> dict[str, conductor_pb2.ScheduleResponse]:
        await self.call.write(
            conductor_pb2.ScheduleSessionRequest(requests=requests, released_request_ids=list(released))
        )
        answers: dict[str, conductor_pb2.ScheduleResponse] = {}
        while len(answers) < len(requests):
            answers.update({answer.request_id: answer for answer in (await self.read()).responses})
        return answers

    async def list_where(self, condition) -> conductor_pb2.InstanceList:
        while True:
            message = await self.read()
            if message.HasField("instances") and condition(
                {i.info.instance_id: i for i in message.instances.instances}
            ):
                return message.instances


class World:
    """One conductor with its own clock, and a channel to it."""

    def __init__(self, security: Security = NO_SECURITY, **settings) -> None:
        self.now_s = 1000.0
        self.security = security
        self.settings = settings
        self.ports = HeldPorts()
        self.listen = ""

    async def start(self) -> None:
        """Starts the conductor, again at the same address."""
        self.listen = self.listen or f"127.0.0.1:{self.ports.take('127.0.0.1')}"
        settings = ConductorSettings(**{"listen": self.listen, "lease_ms": 3000, "settle_ms": 0, **self.settings})
        self.registry = CollectorRegistry()
        self.conductor: Conductor = build(
            settings, self.registry, Telemetry("conductor", "c"), lambda: self.now_s, security=self.security
        )
        self.address = await self.conductor.server.start()

    async def __aenter__(self) -> World:
        await self.start()
        self.channel = open_channel(self.address)
        self.stub = conductor_pb2_grpc.ConductorServiceStub(self.channel)
        return self

    async def restart(self) -> None:
        """Restarts the conductor; returns when the channel has seen the old one end, so calls reach the new one."""
        await self.conductor.server.drain(0)
        async with asyncio.timeout(WAIT_S):
            while (state := self.channel.get_state()) is grpc.ChannelConnectivity.READY:
                await self.channel.wait_for_state_change(state)
        await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.conductor.server.drain(0)
        self.ports.close()

    def metric(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"pinyon_conductor_{name}", labels)
        assert value is not None, name
        return value

    async def balancer(self) -> LoadBalancer:
        """Returns a load balancer whose session is open."""
        lb = LoadBalancer(self.stub)
        await lb.open()
        return lb

    async def cluster(self) -> dict[str, Reporter]:
        members = {}
        for name, role in (("p0", PREFILL), ("p1", PREFILL), ("d0", DECODE), ("s0", STORE)):
            members[name] = Reporter(self.stub, name, role)
            assert (await members[name].connect()).lease_ms == 3000
        return members

    async def names(self, role=0) -> dict[str, conductor_pb2.Instance]:
        reply = await self.stub.ListInstances(conductor_pb2.ListInstancesRequest(role=role))
        return {instance.info.instance_id: instance for instance in reply.instances}

    async def holders(self, *numbers: int) -> dict[str, int]:
        reply = await self.stub.LookupBlocks(conductor_pb2.LookupBlocksRequest(block_keys=keys(*numbers)))
        return {holder.instance_id: holder.prefix_blocks for holder in reply.holders}


def ask(name: str = "r", blocks: int = 4, **changes) -> conductor_pb2.ScheduleRequest:
    values = {"model": "m", "prompt_tokens": 16 * blocks + 1, "block_keys": keys(*range(blocks)), "max_tokens": 8}
    return conductor_pb2.ScheduleRequest(request_id=name, **{**values, **changes})


async def failure(call) -> Exception:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call, WAIT_S)
    return error_from_rpc(caught.value)
