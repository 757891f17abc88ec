"""Channels to store nodes and workers: one per address, kept open, a bounded number of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from pinyon.core.errors import FailedPrecondition, Unavailable
from pinyon.runtime.channel import open_channel
from pinyon.runtime.interceptors import error_from_rpc

__all__ = ["NodeChannels"]


@dataclass(slots=True, eq=False)
class _Shared:
    channel: grpc.aio.Channel
    users: int = 0


class NodeChannels:
    """``async with channels.use(address) as channel``. Above ``max_idle`` the longest unused channel is closed."""

    def __init__(self, *, max_idle: int = 64) -> None:
        self._max_idle = max_idle
        self._channels: OrderedDict[str, _Shared] = OrderedDict()  # least recently used first
        self._closed = False

    @asynccontextmanager
    async def use(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """The channel stays open meanwhile."""
        if self._closed:
            raise FailedPrecondition("the channels are closed")
        shared = self._channels.get(address)
        if shared is None:
            shared = self._channels[address] = _Shared(open_channel(address))
        self._channels.move_to_end(address)
        shared.users += 1
        try:
            yield shared.channel
        finally:
            shared.users -= 1
            await self._trim()

    async def call(self, address: str, stub: Any, method: str, request: Any, timeout_s: float) -> Any:
        """One unary call by the generated ``stub`` class; raises the :class:`PinyonError` the node answered with."""
        async with self.use(address) as channel:
            try:
                return await getattr(stub(channel), method)(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                raise error_from_rpc(error) from None
            except grpc.aio.UsageError as error:  # the channel was closed under it
                raise Unavailable(str(error)) from None

    async def _trim(self) -> None:
        while len(self._channels) > self._max_idle:
            idle = next((address for address, shared in self._channels.items() if not shared.users), None)
            if idle is None:
                return
            await self._channels.pop(idle).channel.close(None)

    async def close(self) -> None:
        """Close all; calls that still run end as cancelled."""
        self._closed = True
        channels = list(self._channels.values())
        self._channels.clear()
        for shared in channels:
            await shared.channel.close(None)
