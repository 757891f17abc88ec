"""The two doors to other load balancers that every kind of load balancer has: theirs to us, and ours to the
controller."""

from __future__ import annotations

from collections.abc import Callable

from pinyon.api.lb.v1 import peer_pb2, peer_pb2_grpc
from pinyon.core.clock import Clock
from pinyon.frontdoor.controller_session import ControllerSession
from pinyon.frontdoor.regions.inbound import InboundParts
from pinyon.frontdoor.regions.membership import Membership
from pinyon.frontdoor.regions.servicer import PEER_CALLERS, PeerServicer
from pinyon.runtime.grpc_server import GrpcServer
from pinyon.runtime.identity import CONTROLLER, peer_name
from pinyon.runtime.security import Security

__all__ = ["join_controller", "serve_peers"]


def serve_peers(server: GrpcServer, inbound: InboundParts) -> None:
    """Let load balancers of other regions send."""
    server.add(
        peer_pb2_grpc.add_PeerServiceServicer_to_server,
        PeerServicer(inbound),
        peer_pb2.DESCRIPTOR.services_by_name["PeerService"],
        PEER_CALLERS,
    )


def join_controller(
    membership: Membership, address: str, draining: Callable[[], bool], security: Security, clock: Clock
) -> Callable[[], bool]:
    """Give the membership its session, which does nothing without an ``address``. What this returns says whether it is
    known who the others are."""
    session = membership.session = ControllerSession(
        address, membership.told, membership.load, membership.latencies_ms, draining,
        security.channels.sessions_to(peer_name(CONTROLLER)), clock,
    )  # fmt: skip
    return lambda: not address or session.federation is not None
