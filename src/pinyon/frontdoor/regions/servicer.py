"""The gRPC door for load balancers of other regions."""

from __future__ import annotations

from typing import Any

from pinyon.api.lb.v1 import peer_pb2, peer_pb2_grpc
from pinyon.core.errors import FailedPrecondition, InvalidArgument, PermissionDenied, ResourceExhausted
from pinyon.core.request import check_geography
from pinyon.frontdoor.regions.inbound import Inbound, Serving
from pinyon.frontdoor.regions.links import PEER_VERSION
from pinyon.frontdoor.regions.peer import Peer
from pinyon.runtime.callers import Callers
from pinyon.runtime.duplex import Accepted
from pinyon.runtime.identity import LB, check_claim, check_region_claim

PEER_CALLERS: Callers = {"Session": frozenset({LB})}
WRITE_S = 5.0
FIRST_S = 5.0
SESSIONS_MAX = 256
LB_ID_CHARS_MAX = 128


class PeerServicer(peer_pb2_grpc.PeerServiceServicer):
    """With TLS, who calls has the certificate of a load balancer of the region that it names. Without, anybody may."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._own = serving.arrivals.own
        self._sessions = 0

    async def Session(self, _: object, context: Any) -> None:
        if not self._own.region:
            raise FailedPrecondition("this load balancer is of no region: --region names it")
        if self._sessions >= SESSIONS_MAX:
            raise ResourceExhausted("too many load balancers are connected", retry_after_s=1.0)
        self._sessions += 1
        try:
            await self._converse(context)
        finally:
            self._sessions -= 1

    async def _converse(self, context: Any) -> None:
        own = self._own
        stream = Accepted[peer_pb2.SessionResponse, peer_pb2.SessionRequest](context, WRITE_S)
        first = await stream.first(FIRST_S)
        if first is None:
            return
        peer = self._checked(first.hello, context)
        welcome = peer_pb2.PeerWelcome(region=own.region, lb_id=own.name, version=PEER_VERSION, kind=own.kind)
        await Inbound(self._serving, peer).run(stream, welcome)

    def _checked(self, hello: peer_pb2.PeerHello, context: Any) -> Peer:
        """Raises :class:`PinyonError` for whom we do not speak with."""
        if hello.version != PEER_VERSION:
            raise FailedPrecondition(f"version {hello.version} is not spoken here, but {PEER_VERSION}", field="version")
        if hello.kind != self._own.kind:
            raise FailedPrecondition(
                "one of us is in front of servers of others (--upstream), and one is not", field="kind"
            )
        check_geography(hello.region, "region")
        if not hello.lb_id or len(hello.lb_id) > LB_ID_CHARS_MAX or not hello.lb_id.isprintable():
            raise InvalidArgument(f"lb_id has 1 to {LB_ID_CHARS_MAX} characters", field="lb_id")
        check_claim(context, LB, hello.lb_id)
        check_region_claim(context, hello.region)
        verdict = self._serving.arrivals.geography().sends(hello.region, self._own.region)
        if not verdict.allowed:
            raise PermissionDenied(f"{hello.region} may not send to {self._own.region}: {verdict.reason}")
        return Peer(hello.lb_id, hello.region, "")
