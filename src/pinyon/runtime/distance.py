"""Simulated distance between processes, for tests on one machine: messages arrive after a delay, in order."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from pinyon.core.errors import InvalidArgument
from pinyon.runtime.channel import Decode, Encode, OpenSession
from pinyon.runtime.http2.client import Http2Call
from pinyon.runtime.http2.messages import EOF

MESSAGES_MAX = 1024
"""The number of messages that may be on their way in each direction; further writes wait."""
DELAY_MS_MAX = 5000.0


def parse_delays(text: str) -> dict[str, float]:
    """Returns delays in seconds by region, from ``REGION=MILLISECONDS,...``. Raises :class:`InvalidArgument`."""
    delays = {}
    for part in text.split(",") if text else []:
        region, _, number = part.strip().partition("=")
        try:
            delay_ms = float(number)
        except ValueError:
            delay_ms = -1.0
        if not region or not 0 <= delay_ms <= DELAY_MS_MAX:
            raise InvalidArgument(
                f"{part!r} is no REGION=MILLISECONDS, of at most {DELAY_MS_MAX:g}", field="test_region_delays_ms"
            )
        delays[region] = delay_ms / 1e3
    return delays


def delayed(connect: OpenSession, seconds: float) -> OpenSession:
    """Returns a way to dial a peer that is ``seconds`` away, one way. The state of the connection is known at once."""
    if not seconds:
        return connect

    def dial(address: str, path: str, encode: Encode, decode: Decode) -> Http2Call:
        return cast("Http2Call", _FarCall(connect(address, path, encode, decode), seconds))

    return dial


class _FarCall:
    """The methods of a call that :mod:`pinyon.runtime.duplex` needs, except those that send or receive at once."""

    def __init__(self, call: Http2Call, seconds: float) -> None:
        self._call = call
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._going: asyncio.Queue[tuple[float, Any]] = asyncio.Queue(MESSAGES_MAX)
        self._coming: asyncio.Queue[tuple[float, Any]] = asyncio.Queue(MESSAGES_MAX)
        self._tasks = [self._loop.create_task(self._give()), self._loop.create_task(self._take())]
        self.wait_for_connection, self.close = call.wait_for_connection, call.close

    async def read(self) -> Any:
        message = await self._next(self._coming)
        if isinstance(message, Exception):
            raise message
        return message

    async def write(self, message: Any) -> None:
        await self._put(self._going, message)

    async def done_writing(self) -> None:
        await self._going.join()
        await self._call.done_writing()

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._call.cancel()

    async def _put(self, queue: asyncio.Queue[tuple[float, Any]], message: Any) -> None:
        await queue.put((self._loop.time() + self._seconds, message))

    async def _next(self, queue: asyncio.Queue[tuple[float, Any]]) -> Any:
        due_s, message = await queue.get()
        await asyncio.sleep(due_s - self._loop.time())
        return message

    async def _give(self) -> None:
        while True:
            message = await self._next(self._going)
            try:
                await self._call.write(message)
            except Exception:  # the next read says why
                self._call.cancel()
            self._going.task_done()

    async def _take(self) -> None:
        message: Any = None
        while message is not EOF and not isinstance(message, Exception):
            try:
                message = await self._call.read()
            except Exception as error:
                message = error
            await self._put(self._coming, message)
