"""Bytes from a connection to another one and back, as they come: grpcio serves who is relayed to it."""

from __future__ import annotations

import asyncio
import socket
from typing import cast

__all__ = ["real_peer", "relay"]

CONNECT_S = 5.0
LINGER_S = 5.0
"""So long one side may take to read what the other one said before it left."""

_peers: dict[str, str] = {}
"""Whom grpcio sees, and who that is: one for each connection that is relayed in this process."""


def real_peer(peer: str) -> str:
    """Who calls a server that is relayed to, by what grpcio says (``ipv4:host:port``); empty if it is gone already:
    it may have come from anywhere."""
    return _peers.get(peer, "")


async def relay(client: socket.socket, behind: tuple[str, int]) -> None:
    """Until either side has gone, and what it said before is passed on. Closes nothing but its own connection."""
    loop = asyncio.get_running_loop()
    front, back = _Side(loop, half_closes=True), _Side(loop, half_closes=False)
    front.other, back.other = back, front
    name = ""
    try:
        async with asyncio.timeout(CONNECT_S):
            transport, _ = await loop.create_connection(lambda: back, *behind)
            name = _grpc_name(transport.get_extra_info("sockname"))
            _peers[name] = _grpc_name(client.getpeername())
            await loop.connect_accepted_socket(lambda: front, client)
        await asyncio.wait((front.lost, back.lost), return_when=asyncio.FIRST_COMPLETED)
        for each in (front, back):
            if each.transport is not None:
                each.transport.close()
        await asyncio.wait((front.lost, back.lost), timeout=LINGER_S)
    except (TimeoutError, OSError):
        return
    finally:
        _peers.pop(name, None)
        for each in (front, back):
            if each.transport is not None:
                each.transport.abort()


def _grpc_name(address: tuple[str, int]) -> str:
    """As grpcio has it."""
    return f"ipv6:%5B{address[0]}%5D:{address[1]}" if ":" in address[0] else f"ipv4:{address[0]}:{address[1]}"


class _Side(asyncio.Protocol):
    other: _Side

    def __init__(self, loop: asyncio.AbstractEventLoop, *, half_closes: bool) -> None:
        """``half_closes``: one that sends nothing more may wait for what the other one says; else it is gone."""
        self._half_closes = half_closes
        self.lost: asyncio.Future[None] = loop.create_future()
        self.transport: asyncio.Transport | None = None
        self._early = b""
        """What came before there was another side: not more than one read."""
        self._ended = False
        """It sends nothing more."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        other = self.other
        if other.transport is not None:
            if other._early:
                self.transport.write(other._early)
                other._early = b""
            if not other.transport.is_closing():
                other.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        other = self.other.transport
        if other is not None:
            if not other.is_closing():
                other.write(data)
            return
        self._early += data
        cast("asyncio.Transport", self.transport).pause_reading()

    def eof_received(self) -> bool:
        self._ended = True
        other = self.other.transport
        if self._half_closes and other is not None and not other.is_closing():
            other.write_eof()
        return self._half_closes

    def pause_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)
