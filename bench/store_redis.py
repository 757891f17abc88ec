"""Redis as a store of bytes: SET and GET, pipelines of SET, MGET and EXISTS. Its client is redis-py with hiredis."""

from __future__ import annotations

import asyncio
import importlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.store_memory import Item, ObjectMemory, digest
from bench.store_process import run
from bench.store_side import START_S, Connector, Servers, Store, end_server, free_port, start_server, wait_for_port


class RedisProcess:
    """A redis-server without persistence and without a limit of memory."""

    def __init__(self, option: str, logs: Path) -> None:
        port = free_port()
        command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
        if shutil.which(command[0]) is None:
            raise RuntimeError("no redis-server on the PATH")
        command += ["--maxclients", "10000", "--dir", str(logs)]
        self._process = start_server(command, logs / "redis.log")
        self.address = {"port": port}
        self.pids = {"redis-server": self._process.pid}
        wait_for_port(port, self._process)

    def close(self) -> None:
        end_server(self._process)


class RedisStore:
    """A client that blocks, which is the fastest one for one caller."""

    def __init__(self, client: Any, memory: ObjectMemory) -> None:
        self._client = client
        self._source, self._landing = memory.source.view, memory.landing.view
        self._got: Sequence[bytes] = ()

    def name(self, number: int) -> bytes:
        return digest(number)

    async def put(self, items: Sequence[Item], size: int) -> None:
        source = self._source
        if len(items) == 1:
            ((key, _, offset),) = items
            self._client.set(key, source[offset : offset + size])
            return
        answers = self._pipeline([("SET", key, source[offset : offset + size]) for key, _, offset in items])
        if any(answer != b"OK" for answer in answers):
            raise RuntimeError("Redis did not store all")

    async def get(self, items: Sequence[Item], size: int) -> None:
        got = [self._client.get(items[0].key)] if len(items) == 1 else self._client.mget([item.key for item in items])
        if None in got:
            raise RuntimeError("Redis does not have all")
        self._got = got

    def land(self, items: Sequence[Item], size: int) -> None:
        for item, value in zip(items, self._got, strict=True):
            self._landing[item.offset : item.offset + size] = value
        self._got = ()

    async def exists(self, keys: Sequence[bytes]) -> Sequence[bool]:
        if len(keys) == 1:
            return [bool(self._client.exists(keys[0]))]
        return self._pipeline([("EXISTS", key) for key in keys])

    def _pipeline(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Returns the answers to all commands, sent at once: redis-py's own pipelines take 15 to 55 µs per command."""
        connection = self._client.connection
        connection.send_packed_command(connection.pack_commands(commands))
        return [connection.read_response() for _ in commands]

    async def remove(self, keys: Sequence[bytes]) -> None:
        self._client.delete(*keys)

    async def settle(self, items: Sequence[Item], size: int) -> None:
        pass

    def facts(self) -> dict[str, Any]:
        return {"returns_bytes": True}

    async def close(self) -> None:
        self._client.close()


class ManyRedisStore(RedisStore):
    """A client beside many others on one event loop."""

    async def put(self, items: Sequence[Item], size: int) -> None:
        ((key, _, offset),) = items
        await self._client.set(key, self._source[offset : offset + size])

    async def get(self, items: Sequence[Item], size: int) -> None:
        self._got = [await self._client.get(items[0].key)]

    async def close(self) -> None:
        await self._client.aclose()


class RedisConnector:
    def __init__(self, address: dict[str, Any], memory: ObjectMemory, option: str) -> None:
        self._port: int = address["port"]
        self._memory = memory

    async def connect(self, *, many: bool = False) -> Store:
        kind = importlib.import_module("redis.asyncio" if many else "redis")
        client = kind.Redis(host="127.0.0.1", port=self._port, single_connection_client=True)
        if not many:
            client.ping()
            return RedisStore(client, self._memory)
        await asyncio.wait_for(client.ping(), START_S)
        return ManyRedisStore(client, self._memory)

    async def close(self) -> None:
        pass


def start_servers(option: str, logs: Path) -> Servers:
    return RedisProcess(option, logs)


def make_connector(address: dict[str, Any], memory: ObjectMemory, option: str) -> Connector:
    return RedisConnector(address, memory, option)


if __name__ == "__main__":
    run(start_servers, make_connector)
