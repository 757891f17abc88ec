"""Channels to store nodes and workers: one per address, kept open, at most a bounded number."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from functools import cache
from typing import Any

from pinyon.api.kvstore.v1 import kvstore_pb2_grpc
from pinyon.core.errors import FailedPrecondition
from pinyon.runtime.channel import PLAIN_CHANNELS, Channels
from pinyon.runtime.http2.calls import Http2Calls
from pinyon.runtime.identity import BLOCKS_NAME, KVSTORE, peer_name

_STORE_NAME = peer_name(KVSTORE)


class _Methods:
    """Stands for a channel where a generated stub asks for its methods; the stub then has what a call needs."""

    def unary_unary(self, path: str, *, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        return path, request_serializer, response_deserializer

    unary_stream = unary_unary


@cache
def _methods(stub: Any) -> Any:
    return stub(_Methods())


class NodeChannels:
    """The channels. Above ``max_idle`` of them the one that is unused for longest is closed."""

    def __init__(self, channels: Channels = PLAIN_CHANNELS, *, max_idle: int = 64) -> None:
        self._source = channels
        self._max_idle = max_idle
        self._channels: OrderedDict[tuple[str, str], Http2Calls] = OrderedDict()  # least recently used first
        self._closed = False
        self.reads: Counter[str] = Counter()
        """The number of blocks that are being read from each address."""

    async def call(self, address: str, stub: Any, method: str, request: Any, timeout_s: float) -> Any:
        """Makes a unary call by the generated ``stub`` class. Raises the peer's error as a :class:`PinyonError`.

        With TLS, the peer's certificate must be that of a store node, or for other services of one who has blocks."""
        if self._closed:
            raise FailedPrecondition("the channels are closed")
        key = address, _STORE_NAME if stub is kvstore_pb2_grpc.KvStoreServiceStub else BLOCKS_NAME
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = self._source.calls_to(*key)
        self._channels.move_to_end(key)
        path, encode, decode = getattr(_methods(stub), method)
        try:
            return await channel.call(path, encode, decode, request, timeout_s)
        finally:
            self._trim()

    def _trim(self) -> None:
        while len(self._channels) > self._max_idle:
            idle = next((key for key, channel in self._channels.items() if not channel.under_way), None)
            if idle is None:
                return
            self._channels.pop(idle).close()

    async def close(self) -> None:
        """Closes all channels; calls that still run end as unavailable."""
        self._closed = True
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        await asyncio.sleep(0)  # in the next turn of the loop, the sockets are closed
