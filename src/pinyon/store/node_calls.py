"""The small questions to a store node: exists, remove, status."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pinyon.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from pinyon.core.block_keys import BlockKey, pack_keys
from pinyon.core.errors import Unavailable
from pinyon.store.node_channels import NodeChannels

__all__ = ["MAX_QUERY_KEYS", "NodeCalls"]

MAX_QUERY_KEYS = 65536
"""Keys in one Exists or Remove."""


class NodeCalls:
    """Each raises the :class:`pinyon.core.errors.PinyonError` that the node answered with."""

    def __init__(self, channels: NodeChannels) -> None:
        self._channels = channels

    async def exists(self, address: str, keys: Sequence[BlockKey], timeout_s: float) -> list[bool]:
        answers: list[bool] = []
        for start in range(0, len(keys), MAX_QUERY_KEYS):
            part = keys[start : start + MAX_QUERY_KEYS]
            reply = await self._call(address, "Exists", kvstore_pb2.ExistsRequest(keys=pack_keys(part)), timeout_s)
            if len(reply.exists) != len(part):
                raise Unavailable(f"{address} answered for {len(reply.exists)} of {len(part)} keys")
            answers += reply.exists
        return answers

    async def remove(self, address: str, keys: Sequence[BlockKey], timeout_s: float) -> int:
        removed = 0
        for start in range(0, len(keys), MAX_QUERY_KEYS):
            part = kvstore_pb2.RemoveRequest(keys=pack_keys(keys[start : start + MAX_QUERY_KEYS]))
            removed += (await self._call(address, "Remove", part, timeout_s)).removed
        return removed

    async def status(self, address: str, timeout_s: float) -> kvstore_pb2.GetNodeStatusResponse:
        reply: kvstore_pb2.GetNodeStatusResponse = await self._call(
            address, "GetNodeStatus", kvstore_pb2.GetNodeStatusRequest(), timeout_s
        )
        return reply

    async def _call(self, address: str, method: str, request: Any, timeout_s: float) -> Any:
        return await self._channels.call(address, kvstore_pb2_grpc.KvStoreServiceStub, method, request, timeout_s)
