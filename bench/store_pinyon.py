"""pinyon's store: a Redis with the metadata, a store node, and clients with registered memory.

``option`` is the transport that node and clients are held to, ``tcp`` or ``shm``. All that knows the client's calls is
:class:`PinyonStore`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.store_memory import Item, ObjectMemory, digest
from bench.store_process import run
from bench.store_side import POOL_BYTES, Connector, Servers, Store
from launch.process import START_S, ServiceProcess, await_ready, end_all
from launch.redis_server import find_redis
from pinyon.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from pinyon.core.block_keys import pack_keys
from pinyon.runtime.logging import get_logger
from pinyon.runtime.process import tune_process
from pinyon.runtime.transfer_engine import TransferSettings, start_transfer_engine
from pinyon.store.client import StoreClient
from pinyon.store.kv_memory import Piece
from pinyon.store.metadata import StoreMetadata
from pinyon.store.node_channels import NodeChannels
from pinyon.store.reader import BlockReader
from pinyon.store.writer import PutOutcome
from pinyon.transfer import Region, TransferEngine

_CALL_S = 30.0
_REDIS_S = 10.0
_SETTLE_S = 20.0
_LOCAL = "127.0.0.1:0"


class LastLine(logging.Handler):
    """The last line of the log, in which the client says why an object was not stored."""

    last = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()


LOG = LastLine()


class PinyonProcesses:
    def __init__(self, option: str, logs: Path) -> None:
        self._redis = find_redis()
        arguments = [
            *("--redis-url", self._redis.url, "--pool-mib", str(POOL_BYTES >> 20), "--instance-id", "kvstore-0"),
            *("--listen", _LOCAL, "--metrics-listen", _LOCAL, "--transfer-listen", _LOCAL),
            *("--transfer-transports", option, "--log-level", "warning"),
            *("--open-puts-max", "2048"),  # the most that a node takes; the default is 1,024
        ]
        self._node = ServiceProcess("kvstore-0", "services.kvstore", arguments, logs / f"kvstore-{option}.log")
        try:
            self._node.spawn()
            await_ready([self._node], time.monotonic() + START_S)
        except BaseException:
            self.close()
            raise
        assert self._redis.process is not None
        self.address = {"redis": self._redis.url}
        self.pids = {"redis": self._redis.process.pid, "kvstore": self._node.pid}

    def close(self) -> None:
        end_all([self._node], 10.0)
        self._redis.close()


class PinyonStore:
    """The calls of a client of the store, as the benchmark makes them."""

    def __init__(self, redis_url: str, engine: TransferEngine, source: Region, landing: Region, *, many: bool) -> None:
        self._engine = engine
        self._source, self._landing = source.key, landing.key
        self._channels = NodeChannels()
        self._reader = BlockReader(engine, self._channels)
        metadata = StoreMetadata(redis_url, timeout_s=_REDIS_S)
        self._client = StoreClient(engine, metadata, self._channels)

    def name(self, number: int) -> bytes:
        return digest(number)

    async def put(self, items: Sequence[Item], size: int) -> None:
        region = self._source
        objects = [(key, (Piece(region, offset, size),)) for key, _, offset in items]
        outcomes = await self._client.put(objects, size, _CALL_S)
        if any(outcome is not PutOutcome.STORED for outcome in outcomes):
            failed = {outcome.value for outcome in outcomes} - {PutOutcome.STORED.value}
            raise RuntimeError(f"puts ended as {', '.join(failed)}; the client's log: {LOG.last}")

    async def get(self, items: Sequence[Item], size: int) -> None:
        region = self._landing
        keys = [item.key for item in items]
        places = [(Piece(region, item.offset, size),) for item in items]
        at = 0
        for node, count in await self._client.leading(keys, size, _CALL_S):
            part = slice(at, at + count)
            got = await self._reader.read(node.address, keys[part], places[part], size, _CALL_S)
            if got.leading != count:
                raise RuntimeError(f"{got} of {count} objects")
            at += count
        if at != len(keys):
            raise RuntimeError(f"{at} of {len(keys)} objects are found; the client's log: {LOG.last}")

    async def exists(self, keys: Sequence[bytes]) -> Sequence[bool]:
        request = kvstore_pb2.ExistsRequest(keys=pack_keys(keys))
        (node,) = await self._client.nodes()
        reply = await self._channels.call(node.address, kvstore_pb2_grpc.KvStoreServiceStub, "Exists", request, _CALL_S)
        answers: Sequence[bool] = reply.exists
        return answers

    async def remove(self, keys: Sequence[bytes]) -> None:
        request = kvstore_pb2.RemoveRequest(keys=pack_keys(keys))
        for node in await self._client.nodes():
            await self._channels.call(node.address, kvstore_pb2_grpc.KvStoreServiceStub, "Remove", request, _CALL_S)

    async def settle(self, items: Sequence[Item], size: int) -> None:
        """Waits until Redis lists the objects: the node lists them behind the put."""
        keys = [item.key for item in items]
        deadline = time.monotonic() + _SETTLE_S
        while sum(count for _, count in await self._client.leading(keys, size, _CALL_S)) < len(keys):
            if time.monotonic() > deadline:
                raise RuntimeError("the objects are not listed")
            await asyncio.sleep(0.02)

    def land(self, items: Sequence[Item], size: int) -> None:
        pass

    def facts(self) -> dict[str, Any]:
        return {"bytes_by_transport": {" ".join(one.path): one.nbytes for one in self._engine.stats().paths}}

    async def close(self) -> None:
        await self._client.close()
        await self._reader.close()
        await self._channels.close()


class PinyonConnector:
    """The transfer engine of a process, whose clients share it, and its links with it."""

    def __init__(self, address: dict[str, Any], memory: ObjectMemory, option: str) -> None:
        logger = get_logger("store")
        logger.setLevel(logging.INFO)
        logger.addHandler(LOG)
        self._redis_url: str = address["redis"]
        self._engine = start_transfer_engine(TransferSettings(transfer_transports=option))
        self._source = self._engine.register_local_memory(memory.source.map)
        self._landing = self._engine.register_local_memory(memory.landing.map)

    async def connect(self, *, many: bool = False) -> Store:
        if not many:
            tune_process()
        return PinyonStore(self._redis_url, self._engine, self._source, self._landing, many=many)

    async def close(self) -> None:
        await asyncio.to_thread(self._engine.close)


def start_servers(option: str, logs: Path) -> Servers:
    return PinyonProcesses(option, logs)


def make_connector(address: dict[str, Any], memory: ObjectMemory, option: str) -> Connector:
    return PinyonConnector(address, memory, option)


if __name__ == "__main__":
    run(start_servers, make_connector)
