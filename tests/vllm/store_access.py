"""Objects of a suite's store as a test reads, removes and replaces them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from launch.cluster import LocalCluster
from pinyon.api.conductor.v1 import conductor_pb2, conductor_pb2_grpc
from pinyon.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from pinyon.core.block_keys import chain_block_keys, namespace, tokens_to_bytes
from pinyon.messages.instance import info_from_proto
from pinyon.placement.instances import InstanceInfo
from pinyon.store.client import StoreClient
from pinyon.store.kv_memory import KvMemory
from pinyon.store.metadata import StoreMetadata
from pinyon.store.node_channels import NodeChannels
from pinyon.store.reader import BlockReader
from pinyon.transfer import TransferEngine

WAIT_S = 30.0


def listed(cluster: LocalCluster, name: str) -> Any:
    """Returns what the conductor tells of an instance."""
    with cluster.access.channel(cluster.services["conductor"]) as channel:
        reply = conductor_pb2_grpc.ConductorServiceStub(channel).ListInstances(conductor_pb2.ListInstancesRequest())
    return next(each for each in reply.instances if each.info.instance_id == name)


def instance_of(cluster: LocalCluster, name: str) -> InstanceInfo:
    return info_from_proto(listed(cluster, name).info)


def keys_of(info: InstanceInfo, tokens: list[int]) -> list[bytes]:
    """Returns the keys of a prompt of the public tenant, in a cluster without a secret."""
    assert info.layout is not None
    root = namespace(info.model_fingerprint, info.layout.layout_id, "")
    return chain_block_keys(root, tokens_to_bytes(tokens), info.layout.block_tokens)


class StoreAccess:
    """The store's client, with memory for one object."""

    def __init__(self, engine: TransferEngine, channels: NodeChannels, redis_url: str, object_bytes: int) -> None:
        self._channels = channels
        self._size = object_bytes
        self.memory = bytearray(object_bytes)
        self._place = KvMemory.whole(engine.register_local_memory(self.memory), object_bytes).pieces(0)
        self.store = StoreClient(engine, StoreMetadata(redis_url), channels)
        self._reader = BlockReader(engine, channels)

    async def has(self, keys: list[bytes]) -> int:
        """Returns how many of the first keys are stored."""
        return sum(count for _, count in await self.store.leading(keys, self._size, WAIT_S))

    async def corrupt(self, key: bytes, rng: np.random.Generator) -> None:
        """Replaces an object by noise of the same size and spread."""
        ((node, _),) = await self.store.leading([key], self._size, WAIT_S)
        assert (await self._reader.read(node.address, [key], [self._place], self._size, WAIT_S)).leading == 1
        values = np.frombuffer(self.memory, np.float32)
        values[:] = rng.normal(0.0, float(values.std()) or 1.0, len(values)).astype(np.float32)
        await self.remove([key])
        await self.store.put([(key, self._place)], self._size, WAIT_S)
        async with asyncio.timeout(WAIT_S):
            while not await self.has([key]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def remove(self, keys: list[bytes]) -> None:
        """Removes objects, as the store does when it evicts them."""
        for node, _ in await self.store.leading(keys, self._size, WAIT_S):
            request = kvstore_pb2.RemoveRequest(keys=b"".join(keys))
            await self._channels.call(node.address, kvstore_pb2_grpc.KvStoreServiceStub, "Remove", request, WAIT_S)
        async with asyncio.timeout(WAIT_S):
            while await self.has(keys[:1]):  # noqa: ASYNC110 - metadata has no event for outsiders
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        await self._reader.close()
        await self.store.close()


@asynccontextmanager
async def store_access(cluster: LocalCluster, object_bytes: int) -> AsyncIterator[StoreAccess]:
    engine, channels = TransferEngine(), NodeChannels()
    engine.start()
    assert cluster.redis is not None
    access = StoreAccess(engine, channels, cluster.redis.url, object_bytes)
    try:
        yield access
    finally:
        await access.close()
        await channels.close()
        await asyncio.to_thread(engine.close)
