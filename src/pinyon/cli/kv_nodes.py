"""The store nodes that Redis knows, for ``pinyon kv``: found once, and asked side by side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc

from pinyon.api.kvstore.v1 import admin_pb2_grpc, kvstore_pb2, kvstore_pb2_grpc
from pinyon.cli.channel import open_async_channel
from pinyon.cli.failures import plainly
from pinyon.core.errors import FailedPrecondition, InvalidArgument, NotFound, PinyonError, Unavailable
from pinyon.runtime.channel import Channels
from pinyon.runtime.identity import KVSTORE
from pinyon.runtime.redis_url import parse_redis_url
from pinyon.runtime.settings import TLS_FILES
from pinyon.store.client import StoreClient
from pinyon.store.metadata import StoreMetadata
from pinyon.store.node_channels import NodeChannels
from pinyon.store.records import NodeRecord, Replica

DRAIN_S = 3600.0
"""The seconds after which a drain is given up."""
AT_ONCE = 16
"""The largest number of nodes that are asked at a time."""

T = TypeVar("T")


class StoreNodes:
    """The chosen nodes. What fails at one of them is kept in ``failures``, and the others go on."""

    def __init__(
        self, metadata: StoreMetadata, client: StoreClient, chosen: Sequence[NodeRecord], tls_dir: str, timeout_s: float
    ) -> None:
        self._metadata, self.client, self.chosen = metadata, client, chosen
        self._tls_dir, self.timeout_s = tls_dir, timeout_s
        self.failures: dict[str, str] = {}
        """The errors, by the node's id."""

    async def each(self, work: Callable[[NodeRecord], Awaitable[T]]) -> list[tuple[NodeRecord, T]]:
        """Does the work with every chosen node. Returns the results of those where nothing went wrong."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(node: NodeRecord) -> tuple[NodeRecord, T] | None:
            async with gate:
                try:
                    return node, await work(node)
                except PinyonError as error:
                    self.failures[node.node_id] = error.message
                    return None

        return [each for each in await asyncio.gather(*map(one, self.chosen)) if each is not None]

    async def ask_each(self, method: str, request: Any) -> list[tuple[NodeRecord, Any]]:
        return await self.each(lambda node: self.ask(node, method, request))

    async def ask(self, node: NodeRecord, method: str, request: Any) -> Any:
        """Asks one node. Raises :class:`PinyonError`."""
        async with open_async_channel(node.address, KVSTORE, self._tls_dir) as channel:
            call = getattr(admin_pb2_grpc.StoreAdminServiceStub(channel), method)
            try:
                return await call(request, timeout=self.timeout_s)
            except grpc.RpcError as error:
                raise plainly(error, KVSTORE, node.address, self._tls_dir) from None

    async def drain(self, node: NodeRecord) -> AsyncIterator[kvstore_pb2.DrainResponse]:
        """Drains one node, and yields how far it is. Raises :class:`PinyonError`."""
        async with open_async_channel(node.address, KVSTORE, self._tls_dir) as channel:
            try:
                async for each in kvstore_pb2_grpc.KvStoreServiceStub(channel).Drain(
                    kvstore_pb2.DrainRequest(), timeout=DRAIN_S
                ):
                    yield each
            except grpc.RpcError as error:
                raise plainly(error, KVSTORE, node.address, self._tls_dir) from None

    async def listed(self, keys: Sequence[bytes]) -> list[list[Replica]]:
        """Returns the copies of each key on the chosen nodes by what Redis says."""
        return await self._metadata.locate(keys, self.chosen)


@asynccontextmanager
async def store_nodes(redis_url: str, node_id: str, tls_dir: str, timeout_s: float) -> AsyncIterator[StoreNodes]:
    """Finds the live nodes, or the one of this id. Raises :class:`PinyonError` if Redis or the node is not there."""
    if not redis_url:
        raise InvalidArgument("--redis-url (or PINYON_REDIS_URL) names the Redis of the store nodes", field="redis_url")
    tls = None
    if tls_dir:
        from pinyon.runtime.tls import Tls  # with TLS only, because it imports cryptography

        certificate, key, ca = (Path(tls_dir) / TLS_FILES[name] for name in ("tls_cert", "tls_key", "tls_ca"))
        tls = Tls(certificate, key, ca)
    where = ", ".join(f"{host}:{port}" for host, port in parse_redis_url(redis_url).hosts) or "its socket"
    metadata = StoreMetadata(redis_url, timeout_s=timeout_s, tls=tls)
    try:
        try:
            nodes = await metadata.nodes()
        except Unavailable as error:
            raise Unavailable(f"no Redis answers at {where} ({error.message}): is --redis-url right?") from None
        if not nodes:
            raise FailedPrecondition(f"no store node is up, says Redis at {where}")
        chosen = [each for each in nodes if node_id in ("", each.node_id)]
        if not chosen:
            raise NotFound(f"no store node {node_id} is up; there are {', '.join(each.node_id for each in nodes[:20])}")
        channels = NodeChannels(Channels(tls))
        client = StoreClient(None, metadata, channels)
        try:
            yield StoreNodes(metadata, client, chosen, tls_dir, timeout_s)
        finally:
            await channels.close()
    finally:
        await metadata.close()
