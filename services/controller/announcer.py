"""The announcer tells load balancers the federation: each when it has come, all of them after each change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

from pinyon.api.controller.v1 import controller_pb2
from pinyon.federation.registry import LbRegistry
from pinyon.messages.federation import federation_to_proto

GAP_S = 0.02
"""Seconds between two messages for one load balancer: changes close together travel together."""
PER_LEASE = 4
"""Least messages in the time of a lease, so that none runs out for a lost moment."""


class Announcer:
    """The source of messages, each of which is built once, however many load balancers get it."""

    def __init__(self, registry: LbRegistry) -> None:
        self._registry = registry
        self._news = asyncio.Event()
        self._built: controller_pb2.SessionResponse | None = None

    def changed(self) -> None:
        """Announces that there may be another version."""
        self._news.set()
        self._news = asyncio.Event()

    async def messages(self) -> AsyncGenerator[controller_pb2.SessionResponse, None]:
        """Yields one load balancer's messages: everything, again after changes, in between that nothing has changed."""
        told = -1
        while True:
            news = self._news
            if told != self._registry.federation.version:
                message = self._whole()
                told = message.version
                yield message
                await asyncio.sleep(GAP_S)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(self._registry.timing.lease_s / PER_LEASE):
                    await news.wait()
                    continue
            yield self._message()

    def _message(self) -> controller_pb2.SessionResponse:
        federation = self._registry.federation
        lease_ms = round(self._registry.timing.lease_s * 1e3)
        return controller_pb2.SessionResponse(epoch=federation.epoch, version=federation.version, lease_ms=lease_ms)

    def _whole(self) -> controller_pb2.SessionResponse:
        built, federation = self._built, self._registry.federation
        if built is None or (built.epoch, built.version) != (federation.epoch, federation.version):
            built = self._built = self._message()
            built.federation.CopyFrom(federation_to_proto(federation))
        return built
