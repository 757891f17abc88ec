"""A balancer as it stands before the suite's load balancers in production: it sends requests to those that are well.

It polls ``/health/ready`` of each and tries another when a connection is refused. It sends a request again when the
load balancer falls silent before the answer began. It repeats nothing else: if the answer had begun, or the load
balancer died, the client loses the request."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence

from tests.chaos.http_exchange import Cut, Exchange, HttpConnection
from tests.http_client import Reply

LATE_S = 1.5
"""Connecting takes no time here, so by then this process had no time, and the peer may have given up waiting."""
LOOK_EVERY_S = 0.25
LOOK_S = 1.0
"""A load balancer that is silent for this long is not well."""


class NotServed(Exception):
    """The request failed; the text says how."""


class WithIt(NotServed):
    """The request was with a load balancer that died."""


class Trace:
    """The way a request took, for the records."""

    def __init__(self) -> None:
        self.door = ""
        self.tries = 0
        self.began_s: float | None = None


class _Door:
    """One load balancer."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.well = True
        self.killed = False
        self.silent = asyncio.Event()
        self.kept: list[HttpConnection] = []

    async def look(self) -> None:
        """Asks the load balancer once whether it is ready."""
        connection = None
        try:
            async with asyncio.timeout(LOOK_S):
                connection = await HttpConnection.open(self.address)
                reply = await connection.exchange(Exchange(), "/health/ready")
        except TimeoutError:
            self.well = False
            self.silent.set()
        except (OSError, Cut):
            self.well = False
        else:
            self.well = reply.status == 200
            self.silent.clear()
        finally:
            if connection is not None:
                connection.drop()

    async def connection(self) -> HttpConnection:
        while self.kept:
            connection = self.kept.pop()
            if not connection.closed:
                return connection
            connection.drop()
        return await HttpConnection.open(self.address)


class Balancer:
    """The balancer, an async context manager; ``doors`` are name and HTTP address."""

    def __init__(self, doors: Sequence[tuple[str, str]]) -> None:
        self._doors = [_Door(*door) for door in doors]
        self._turn = itertools.count()
        self._lookers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Balancer:
        self._lookers = [asyncio.create_task(self._look_after(door)) for door in self._doors]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._lookers:
            task.cancel()
        await asyncio.gather(*self._lookers, return_exceptions=True)
        for door in self._doors:
            for connection in door.kept:
                connection.drop()
            door.kept.clear()

    async def _look_after(self, door: _Door) -> None:
        while True:
            await door.look()
            await asyncio.sleep(LOOK_EVERY_S)

    def killed(self, name: str) -> None:
        """Marks a load balancer that is about to be killed: requests that are with it now die with it."""
        for door in self._doors:
            if door.name == name:
                door.killed, door.well = True, False

    def returned(self, name: str) -> None:
        for door in self._doors:
            if door.name == name:
                door.killed = False

    async def send(self, body: bytes, trace: Trace) -> Reply:
        """Sends a request to a load balancer that is well. Raises :class:`NotServed`."""
        refused: set[str] = set()
        while True:
            door = self._choose(refused)
            trace.door, trace.began_s = door.name, None
            trace.tries += 1
            asked_s = time.monotonic()
            try:
                connection = await door.connection()
            except OSError:
                refused.add(door.name)
                if len(refused) == len(self._doors):
                    raise NotServed("every load balancer refuses connections") from None
                continue
            late = time.monotonic() - asked_s > LATE_S
            fresh = not connection.used and not late
            seen = Exchange()
            try:
                reply = await self._exchange(door, connection, body, seen)
            except Cut as error:
                trace.began_s = seen.began_s
                if door.killed:
                    raise WithIt(f"{door.name} died with it") from None
                if fresh or seen.began_s is not None:
                    raise NotServed(f"{door.name} cut the connection: {error}") from None
                continue  # the server closed a kept connection just as we used it, or before a late use of ours
            trace.began_s = seen.began_s
            if reply is not None:
                return reply

    def _choose(self, refused: set[str]) -> _Door:
        left = [door for door in self._doors if door.name not in refused]
        doors = [door for door in left if door.well] or left
        return doors[next(self._turn) % len(doors)]

    async def _exchange(self, door: _Door, connection: HttpConnection, body: bytes, seen: Exchange) -> Reply | None:
        """Returns the reply, or None if the load balancer fell silent before it answered."""
        exchange = asyncio.ensure_future(connection.exchange(seen, "/v1/completions", body))
        silence = asyncio.ensure_future(door.silent.wait())
        keep = False
        try:
            await asyncio.wait({exchange, silence}, return_when=asyncio.FIRST_COMPLETED)
            if not exchange.done() and seen.began_s is None:
                return None
            reply = await exchange
            keep = reply.headers.get("connection") != "close"
            return reply
        finally:
            silence.cancel()
            exchange.cancel()
            with contextlib.suppress(asyncio.CancelledError, Cut):
                await exchange
            if keep and not connection.closed:
                door.kept.append(connection)
            else:
                connection.drop()
