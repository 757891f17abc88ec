"""The way to the simulated Redis: what :func:`pinyon.runtime.redis_client.connect_redis` returns, over the network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from pinyon.store.metadata_scripts import WRITE
from tests.vopr.loop import PROCESS, Process
from tests.vopr.mini_redis import MiniRedis, replies
from tests.vopr.network import Network

NAME = "redis"


class RedisHost:
    """The process of Redis: it may be away, and come back empty, or with what it knew some time ago."""

    def __init__(self, network: Network, random: Random) -> None:
        self.network, self.random = network, random
        self.data = MiniRedis(network.loop.time)
        self.up = True
        self.resets = 0.0
        """The share of answers that are lost with their connection."""
        self._old = self.data.snapshot()
        self.watch: Callable[[Process, bytes | None, Any], None] = lambda *_: None
        """Sees each change of entries: who made it, the life that they were of, and the reply."""

    def answer(self, me: Process, commands: list[tuple[Any, ...]]) -> list[Any]:
        if len(commands) != 1 or commands[0][1] != WRITE:
            return replies(self.data, commands)
        life = commands[0][3]
        boot = self.data.execute("HGET", life, "boot") if self.data.execute("TYPE", life) == b"hash" else None
        found = replies(self.data, commands)
        self.watch(me, boot, found[0])
        return found

    def remember(self) -> None:
        """Keeps a snapshot to come back with."""
        self._old = self.data.snapshot()

    def stop(self) -> None:
        self.up = False

    def start(self, *, old: bool) -> None:
        self.up = True
        self.data = MiniRedis(self.network.loop.time)
        if old:
            self.data.restore(self._old)
            self.remember()


class SimRedis:
    """A client. Like redis-py, it sends once more what was lost with a connection."""

    def __init__(self, host: RedisHost) -> None:
        self._host = host

    async def execute_command(self, *command: Any) -> Any:
        (reply,) = await self._ask([command])
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def hscan(self, key: str, cursor: int, count: int) -> Any:
        return await self.execute_command("HSCAN", key, cursor, "COUNT", count)

    def pipeline(self, *, transaction: bool) -> _Pipeline:
        return _Pipeline(self)

    async def aclose(self) -> None:
        """Does nothing: there are no sockets."""

    async def _ask(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        try:
            return await self._ask_once(commands)
        except RedisConnectionError:
            await asyncio.sleep(0.02)
            return await self._ask_once(commands)

    async def _ask_once(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        host, network, me = self._host, self._host.network, PROCESS.get()
        answer: asyncio.Future[list[Any]] = network.loop.create_future()
        delay_s = network.fate(me.name, NAME)
        if delay_s is not None:  # else the caller's own limit ends this
            network.later(delay_s, self._arrive, host, me, commands, answer)
        return await answer

    @staticmethod
    def _arrive(host: RedisHost, me: Process, commands: list[tuple[Any, ...]], answer: asyncio.Future[Any]) -> None:
        network = host.network
        found = host.answer(me, commands) if host.up else []
        delay_s = network.fate(NAME, me.name)
        if delay_s is not None:
            lost = not host.up or (host.resets and host.random.random() < host.resets)
            if lost and host.up:
                network.struck["redis answer lost"] += 1
            network.later(delay_s, _answered, answer, RedisConnectionError("gone") if lost else found)


def _answered(answer: asyncio.Future[Any], found: Any) -> None:
    if answer.done():
        return
    if isinstance(found, Exception):
        answer.set_exception(found)
    else:
        answer.set_result(found)


class _Pipeline:
    """Commands that are sent together."""

    def __init__(self, client: SimRedis) -> None:
        self._client = client
        self._commands: list[tuple[Any, ...]] = []

    async def __aenter__(self) -> _Pipeline:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Does nothing."""

    def execute_command(self, *command: Any) -> None:
        self._commands.append(command)

    async def execute(self, *, raise_on_error: bool) -> list[Any]:
        return await self._client._ask(self._commands)
