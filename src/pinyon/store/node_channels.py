"""Channels to store nodes and workers: one per address, kept open, at most a bounded number."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from pinyon.api.kvstore.v1 import kvstore_pb2_grpc
from pinyon.core.errors import FailedPrecondition, Unavailable
from pinyon.runtime.channel import PLAIN_CHANNELS, Channels
from pinyon.runtime.identity import BLOCKS_NAME, KVSTORE, peer_name
from pinyon.runtime.interceptors import error_from_rpc

_STORE_NAME = peer_name(KVSTORE)


@dataclass(slots=True, eq=False)
class _Shared:
    channel: grpc.aio.Channel
    generation: int
    users: int = 0


class NodeChannels:
    """The channels, for ``async with channels.use(address) as channel``.

    Above ``max_idle`` channels the one that is unused for longest is closed."""

    def __init__(self, channels: Channels = PLAIN_CHANNELS, *, max_idle: int = 64) -> None:
        self._source = channels
        self._max_idle = max_idle
        self._channels: OrderedDict[tuple[str, str], _Shared] = OrderedDict()  # least recently used first
        self._replaced: set[_Shared] = set()
        """Channels that were opened before the TLS files were renewed, and are still in use."""
        self._closed = False

    @asynccontextmanager
    async def use(self, address: str, name: str = _STORE_NAME) -> AsyncIterator[grpc.aio.Channel]:
        """Yields a channel that stays open in the meantime. With TLS, the peer's certificate must have ``name``."""
        if self._closed:
            raise FailedPrecondition("the channels are closed")
        generation = self._source.generation
        shared = self._channels.get((address, name))
        if shared is not None and shared.generation != generation:
            # A reconnect of this channel would use TLS files that may have expired.
            self._replaced.add(self._channels.pop((address, name)))
            shared = None
        if shared is None:
            shared = self._channels[address, name] = _Shared(self._source.open(address, name), generation)
        self._channels.move_to_end((address, name))
        shared.users += 1
        try:
            yield shared.channel
        finally:
            shared.users -= 1
            await self._trim()

    async def call(self, address: str, stub: Any, method: str, request: Any, timeout_s: float) -> Any:
        """Makes a unary call by the generated ``stub`` class. Raises the node's error as a :class:`PinyonError`."""
        name = BLOCKS_NAME if stub is kvstore_pb2_grpc.BlockReadServiceStub else _STORE_NAME
        async with self.use(address, name) as channel:
            try:
                return await getattr(stub(channel), method)(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                raise error_from_rpc(error) from None
            except grpc.aio.UsageError as error:  # the channel was closed during the call
                raise Unavailable(str(error)) from None

    async def _trim(self) -> None:
        for shared in [each for each in self._replaced if not each.users]:
            self._replaced.discard(shared)
            await shared.channel.close(None)
        while len(self._channels) > self._max_idle:
            idle = next((key for key, shared in self._channels.items() if not shared.users), None)
            if idle is None:
                return
            await self._channels.pop(idle).channel.close(None)

    async def close(self) -> None:
        """Closes all channels; calls that still run end as cancelled."""
        self._closed = True
        channels = [*self._channels.values(), *self._replaced]
        self._channels.clear()
        self._replaced.clear()
        for shared in channels:
            await shared.channel.close(None)
