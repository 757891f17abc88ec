"""The peers that a load balancer takes for load balancers of another region."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from pinyon.api.lb.v1 import peer_pb2, peer_pb2_grpc
from pinyon.frontdoor.regions.inbound import PEER_CALLERS
from pinyon.frontdoor.regions.links import RegionLinks
from pinyon.frontdoor.regions.peer import PeerBalancer
from pinyon.runtime.channel import Channels
from pinyon.runtime.grpc_server import GrpcServer
from pinyon.runtime.identity import region_name
from tests.tls_files import TestAuthority

WAIT_S = 30.0


class Ways:
    def expect(self, name: str, region: str) -> None: ...

    def away(self, name: str) -> None: ...

    def gone(self, name: str) -> None: ...


class Door(peer_pb2_grpc.PeerServiceServicer):
    def __init__(self) -> None:
        self.called = asyncio.Event()

    async def Session(self, _: Any, context: Any) -> None:
        self.called.set()


@pytest.mark.parametrize(("region", "spoken_with"), [("eu", True), ("us", False), ("", False)])
async def test_who_is_of_another_region_is_not_spoken_with(tmp_path: Path, region: str, spoken_with: bool) -> None:
    """The server's certificate names ``region``; requests are for eu."""
    authority, door = TestAuthority(tmp_path), Door()
    server = GrpcServer("127.0.0.1:0", authority.tls("lb", "other", region=region), sessions=True)
    service = peer_pb2.DESCRIPTOR.services_by_name["PeerService"]
    server.add(door, service, PEER_CALLERS)
    address = await server.start()
    own = PeerBalancer("us-0", "us", "")
    channels = Channels(authority.tls("lb", "us-0", region="us"))
    links = RegionLinks(own, Ways(), 1, time.monotonic, lambda name: channels.sessions_to(region_name(name)))  # type: ignore[arg-type]
    try:
        links.know([PeerBalancer("eu-0", "eu", address)])
        async with asyncio.timeout(WAIT_S if spoken_with else 1.0):
            await door.called.wait()
        assert spoken_with
    except TimeoutError:
        assert not spoken_with
    finally:
        await links.close()
        await server.drain(0)
