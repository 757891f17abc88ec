"""The server for ``bench/sessions.py``: its session answers each message with one as large.

``python -m bench.sessions_echo http2`` (within the event loop) or ``grpcio`` prints its address and serves until its
input ends."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import uvloop

from pinyon.api.worker.v1 import worker_pb2, worker_pb2_grpc
from pinyon.runtime.duplex import Accepted
from pinyon.runtime.grpc_server import GrpcServer
from services.worker.servicer import WORKER_CALLERS

WRITE_S = 10.0
LOOP, GRPCIO = "http2", "grpcio"
"""The kinds of server: within the event loop, or of grpcio."""


class Echo(worker_pb2_grpc.WorkerServiceServicer):
    async def Session(self, _: Any, context: Any) -> None:
        stream = Accepted[worker_pb2.SessionResponse, worker_pb2.SessionRequest](context, WRITE_S)

        def take(message: worker_pb2.SessionRequest) -> Any:
            text = message.submissions[0].prompt_tokens_le32
            return stream.say(worker_pb2.SessionResponse(updates=[worker_pb2.StreamUpdate(text=text.decode())]))

        await stream.run(take)


async def main(serves: str) -> None:
    server = GrpcServer("127.0.0.1:0", None, sessions=serves == LOOP)
    service = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
    server.add(Echo(), service, WORKER_CALLERS)
    print(await server.start(), flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the starting process ends
    await server.drain(0)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
