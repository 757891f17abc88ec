"""A caller that acts as the load balancer of another region."""

from __future__ import annotations

import asyncio

import grpc

from pinyon.api.lb.v1 import peer_pb2
from tests.integration.lb_harness import WAIT_S
from tests.integration.regions_harness import PeerCaller
from tests.integration.upstream_parts import MODEL
from tests.integration.upstream_regions_parts import STREAM


class Caller(PeerCaller):
    kind = peer_pb2.PEER_KIND_UPSTREAM

    async def __aenter__(self) -> Caller:
        await self.hello()
        assert (await self.call.read()).HasField("welcome")
        return self

    def request(self, body: bytes = STREAM, *, hops: int = 1, **fields) -> peer_pb2.RawRequest:
        values = {"stream_id": 1, "request_id": "r", "target": b"/v1/chat/completions", "model": MODEL,
                  "body_length": len(body)} | fields  # fmt: skip
        head = peer_pb2.RawHead(**values).SerializeToString()
        return peer_pb2.RawRequest(head=head, hops=hops, body=body)

    async def ask(self, *requests: peer_pb2.RawRequest, **more) -> None:
        await self.call.write(peer_pb2.SessionRequest(raw_requests=requests, **more))

    async def answer(self) -> list[peer_pb2.RawPiece]:
        """Reads an answer to its end."""
        pieces: list[peer_pb2.RawPiece] = []
        async with asyncio.timeout(WAIT_S):
            while not pieces or not (pieces[-1].end or pieces[-1].HasField("error")):
                message = await self.call.read()
                assert message is not grpc.aio.EOF
                pieces += message.raw_pieces
        return pieces
