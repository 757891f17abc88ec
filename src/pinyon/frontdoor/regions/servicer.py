"""The gRPC door for load balancers of other regions."""

from __future__ import annotations

import random
from typing import Any

from pinyon.api.lb.v1 import peer_pb2, peer_pb2_grpc
from pinyon.core.errors import FailedPrecondition, InvalidArgument, PermissionDenied, ResourceExhausted
from pinyon.core.request import check_geography
from pinyon.frontdoor.regions.inbound import Inbound, InboundParts
from pinyon.frontdoor.regions.link import PEER_VERSION
from pinyon.frontdoor.regions.peer import Peer
from pinyon.frontdoor.regions.proof import is_nonce, new_nonce, welcome_proof
from pinyon.frontdoor.regions.strangers import Stranger, Strangers, address_of
from pinyon.runtime.callers import Callers
from pinyon.runtime.duplex import Accepted
from pinyon.runtime.identity import LB, caller, check_claim, check_region_claim

__all__ = ["PEER_CALLERS", "PeerServicer"]

PEER_CALLERS: Callers = {"Session": frozenset({LB})}
WRITE_S = 5.0
FIRST_S = 5.0
SESSIONS_MAX = 256
UNKNOWN_MAX = 64
"""Besides, those that have not proved yet what they are: they have 5 s for each of the two messages that takes."""
LB_ID_CHARS_MAX = 128


class PeerServicer(peer_pb2_grpc.PeerServiceServicer):
    """Who calls must have the certificate of a load balancer, or know the federation's secret: without both, the door
    is shut."""

    def __init__(self, parts: InboundParts, chance: random.Random | None = None) -> None:
        self._parts = parts
        self._strangers = Strangers(UNKNOWN_MAX, chance or random.SystemRandom())

    async def Session(self, _: object, context: Any) -> None:
        parts = self._parts
        if not parts.own.region:
            raise FailedPrecondition("this load balancer is of no region: --region names it")
        if not parts.secret and caller(context) is None:
            raise FailedPrecondition("regions need TLS between them, or --federation-secret-file")
        if sum(session.known for session in parts.sessions) >= SESSIONS_MAX:
            raise ResourceExhausted("too many load balancers are connected", retry_after_s=1.0)
        stream = Accepted[peer_pb2.SessionResponse, peer_pb2.SessionRequest](context, WRITE_S)
        crowded = ResourceExhausted("too many that have not proved what they are", retry_after_s=1.0)
        stranger = self._strangers.enter(address_of(context.peer()), lambda: stream.end(crowded))
        try:
            await self._meet(stream, context, stranger)
        finally:
            stranger.leave()

    async def _meet(
        self, stream: Accepted[peer_pb2.SessionResponse, peer_pb2.SessionRequest], context: Any, stranger: Stranger
    ) -> None:
        parts = self._parts
        first = await stream.first(FIRST_S)
        if first is None:
            return
        hello = first.hello
        peer = self._checked(hello, context)
        nonce = new_nonce()
        welcome = peer_pb2.PeerWelcome(
            region=parts.own.region,
            lb_id=parts.own.name,
            nonce=nonce,
            proof=welcome_proof(parts.secret, hello.nonce, nonce, parts.own.region, parts.own.name),
            version=PEER_VERSION,
            kind=parts.serving.kind,
        )
        await Inbound(parts, peer, nonce, stranger.leave).run(stream, welcome)

    def _checked(self, hello: peer_pb2.PeerHello, context: Any) -> Peer:
        """Raises :class:`PinyonError` for whom we do not speak with."""
        if hello.version != PEER_VERSION:
            raise FailedPrecondition(f"version {hello.version} is not spoken here, but {PEER_VERSION}", field="version")
        if hello.kind != self._parts.serving.kind:
            raise FailedPrecondition(
                "one of us is in front of servers of others (--upstream), and one is not", field="kind"
            )
        if not is_nonce(hello.nonce):
            raise InvalidArgument("the nonce has 16 to 64 bytes", field="nonce")
        check_geography(hello.region, "region")
        if not hello.lb_id or len(hello.lb_id) > LB_ID_CHARS_MAX or not hello.lb_id.isprintable():
            raise InvalidArgument(f"lb_id has 1 to {LB_ID_CHARS_MAX} characters", field="lb_id")
        check_claim(context, LB, hello.lb_id)
        check_region_claim(context, hello.region)
        verdict = self._parts.serving.geography.sends(hello.region, self._parts.own.region)
        if not verdict.allowed:
            raise PermissionDenied(f"{hello.region} may not send to {self._parts.own.region}: {verdict.reason}")
        return Peer(hello.lb_id, hello.region, "")
