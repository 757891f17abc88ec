"""A controller with real gRPC, in this process or its own, and load balancers that consist only of their session."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from launch.process import ServiceProcess
from pinyon.api.controller.v1 import controller_pb2_grpc
from pinyon.federation.view import Cluster, Federation, LbInfo, LbState, OwnedCluster
from pinyon.runtime.channel import open_channel
from pinyon.runtime.tasks import ended
from services.controller.app import Controller, build
from services.controller.settings import ControllerSettings
from tests.stub_membership import StubMembership

WAIT_S = 60.0
"""The longest wait, which only ends what hangs."""
PATIENT = {"settle_s": 0.5, "grace_s": WAIT_S, "silence_s": WAIT_S, "probe_timeout_s": 10.0, "lease_s": WAIT_S}
"""Times so long that only a closed session and port reveal a dead load balancer; tests of these times set them."""


class Health(health_pb2_grpc.HealthServicer):
    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.go.set()

    async def Check(self, request, context):
        await self.go.wait()
        if request.service != "pinyon.api.lb.v1.PeerService":
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)


class StubLb:
    """A load balancer in its context, until ``kill`` (no farewell) or ``leave``; it keeps what it is ``told``."""

    def __init__(self, lb_id: str, controller: str, boot: str = "1", **info) -> None:
        region = lb_id.partition("-")[0]
        info.setdefault("clusters", None)
        info["clusters"] = info["clusters"] or (OwnedCluster(region, f"{region}.example.org:7000"),)
        self.make = lambda address: LbInfo(lb_id, boot, region, address, f"http://{lb_id}.example.org", **info)
        self.lb_id = lb_id
        self.controller = controller
        self.told: list[Federation] = []
        self.health = Health()
        self._port: socket.socket | None = None
        """The bound port while the load balancer is dead, so that no other process answers probes at it."""
        self.changed = asyncio.Condition()
        self._notices: set[asyncio.Task[None]] = set()
        self.address = ""

    async def __aenter__(self) -> StubLb:
        self.server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        await self.server.start()
        self.dial(self.controller)
        return self

    def dial(self, controller: str) -> None:
        self.session = StubMembership(controller, self.lb_id, self._on, period_s=0.2)
        self.session.start(self.make(self.address))

    def _on(self, federation: Federation) -> None:
        self.told.append(federation)

        async def note() -> None:
            async with self.changed:
                self.changed.notify_all()

        task = asyncio.ensure_future(note())
        self._notices.add(task)
        task.add_done_callback(self._notices.discard)

    async def until(self, condition: Callable[[Federation], bool]) -> Federation:
        """Waits until the controller's latest message meets the condition; returns it."""
        async with asyncio.timeout(WAIT_S), self.changed:
            await self.changed.wait_for(lambda: self.told and condition(self.told[-1]))
        return self.told[-1]

    async def until_adopts(self, *regions: str) -> None:
        await self.until(
            lambda told: tuple(sorted(each.region for each in told.adopted_by(self.lb_id))) == tuple(sorted(regions))
        )

    async def kill(self) -> None:
        """Ends the load balancer as SIGKILL would: sockets close without a farewell."""
        await self.hang_up()
        await self._close_door()

    async def __aexit__(self, *_: object) -> None:
        await self.kill()
        self.release_port()

    async def _close_door(self) -> None:
        await self.server.stop(None)
        if self._port is None:
            self._port = socket.socket()
            self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._port.bind(("127.0.0.1", int(self.address.rpartition(":")[2])))

    def release_port(self) -> None:
        if self._port is not None:
            self._port.close()
            self._port = None

    async def hang_up(self) -> None:
        """Ends its session without a farewell."""
        await ended(self.session._task)
        link = self.session._link
        if link._task is not None:  # a report that is due just then would say that it ends
            link._task.cancel()
            await asyncio.wait({link._task})
        await link.close()

    def freeze(self) -> None:
        """Simulates a hanging event loop: connections stand, and gRPC's threads answer pings."""
        self.health.go.clear()
        self.session.period_s = 3600.0

    def thaw(self) -> None:
        self.health.go.set()
        self.session.period_s = 0.2
        self.session.wake()

    async def leave(self) -> None:
        await self.session.close()
        await self._close_door()


async def spin(condition: Callable[[], bool]) -> None:
    """Polls until the condition is true, where there is no event."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def cluster_of(federation: Federation, region: str) -> Cluster:
    """Returns the region's cluster, or one without an owner if there is none."""
    return next((each for each in federation.clusters if each.region == region), Cluster(region, ""))


def state_of(federation: Federation, lb_id: str) -> LbState | None:
    """Returns the load balancer's state, or None if it is not known."""
    return next((each.state for each in federation.members if each.info.lb_id == lb_id), None)


def connected(federation: Federation) -> set[str]:
    """Returns the ids of the load balancers that have a session."""
    return {each.info.lb_id for each in federation.members if each.connected}


@contextlib.asynccontextmanager
async def running_controller(**settings) -> AsyncIterator[tuple[Controller, str, CollectorRegistry]]:
    """Yields a controller in this process, its address and its metrics."""
    registry = CollectorRegistry()
    controller = build(ControllerSettings(**{**PATIENT, **settings}), registry)
    endpoints = await controller.start()
    try:
        yield controller, endpoints["grpc"], registry
    finally:
        await controller.close(0)


class ControllerProcess:
    """A controller in its own process, which can be killed and restarted on its port. Its context always ends it."""

    def __init__(self, folder: Path, **settings: object) -> None:
        own = {"state_file": folder / "state.json", **PATIENT, **settings}
        arguments = [part for name, value in own.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        self.process = ServiceProcess(
            "controller", "services.controller", ["--listen", "127.0.0.1:0", *arguments], folder / "controller.log"
        )

    async def __aenter__(self) -> ControllerProcess:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def start(self) -> str:
        """Starts the process and returns its gRPC address."""
        loop = asyncio.get_running_loop()
        self.process.spawn()
        await asyncio.to_thread(self.process.wait_ready, loop.time() + WAIT_S)
        address = self.process.endpoints["grpc"]
        self.process.arguments[1] = address
        return address

    async def kill(self) -> None:
        await asyncio.to_thread(self.process.kill)


@contextlib.asynccontextmanager
async def stub_of(address: str) -> AsyncIterator[controller_pb2_grpc.ControllerServiceStub]:
    async with open_channel(address) as channel:
        yield controller_pb2_grpc.ControllerServiceStub(channel)
