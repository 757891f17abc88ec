"""A caller that acts as the load balancer of another region."""

from __future__ import annotations

import asyncio
import contextlib

import grpc

from pinyon.api.lb.v1 import peer_pb2, peer_pb2_grpc
from pinyon.frontdoor.regions.links import PEER_VERSION
from tests.integration.lb_harness import WAIT_S
from tests.integration.upstream_parts import MODEL
from tests.integration.upstream_regions_parts import STREAM


class Caller:
    """A caller that speaks the protocol, and may act as no load balancer of ours does."""

    def __init__(self, bench) -> None:
        self._channel = grpc.aio.insecure_channel(bench.endpoints["grpc"])
        self.call = peer_pb2_grpc.PeerServiceStub(self._channel).Session()

    async def __aenter__(self) -> Caller:
        kind = peer_pb2.PEER_KIND_UPSTREAM
        hello = peer_pb2.PeerHello(region="eu", lb_id="x", version=PEER_VERSION, kind=kind)
        await self.call.write(peer_pb2.SessionRequest(hello=hello))
        assert (await self.call.read()).HasField("welcome")
        return self

    async def __aexit__(self, *_) -> None:
        self.call.cancel()
        await self._channel.close()

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

    async def status(self) -> grpc.StatusCode:
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await self.call.read() is not grpc.aio.EOF:
                pass
        return await self.call.code()
