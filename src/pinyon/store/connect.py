"""The KV store for programs of one's own: a client with all that it needs, opened and closed as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from pinyon.core.errors import InvalidArgument
from pinyon.runtime.loop_thread import LoopThread
from pinyon.runtime.security import load_watched_security
from pinyon.runtime.transfer_engine import TransferSettings, start_transfer_engine
from pinyon.runtime.watch import FileWatch
from pinyon.store.client import StoreClient
from pinyon.store.metadata import StoreMetadata
from pinyon.store.node_channels import NodeChannels
from pinyon.store.sync_store import SyncStore
from pinyon.transfer import TransferEngine

if TYPE_CHECKING:
    from pinyon.runtime.tls import Tls

CLOSE_S = 2.0


def store_client(
    redis_url: str,
    settings: TransferSettings,
    engine: TransferEngine,
    channels: NodeChannels,
    tls: Tls | None,
    redis_timeout_s: float = 1.0,
) -> StoreClient:
    """Returns a client at the place of this process: its host is the engine's, its zone that of the settings."""
    metadata = StoreMetadata(redis_url, timeout_s=redis_timeout_s, tls=tls)
    return StoreClient(engine, metadata, channels, host=engine.descriptor([]).host, zone=settings.zone)


@asynccontextmanager
async def open_store(redis_url: str, redis_timeout_s: float = 1.0, **settings: Any) -> AsyncIterator[StoreClient]:
    """Yields a client of the store nodes at this Redis. On exit nothing touches registered memory any more.

    ``settings`` are those of the transfer engine: ``tls_dir`` (the folder of a worker's certificate),
    ``transfer_listen`` and so on; see docs/use/configuration.md. Raises :class:`InvalidArgument` for one that cannot be
    used, and :class:`Unavailable` if an address cannot be."""
    try:
        chosen = TransferSettings(**settings)
    except ValueError as error:
        raise InvalidArgument(str(error), field="settings") from None
    async with AsyncExitStack() as stack:
        files = FileWatch()
        stack.push_async_callback(files.close)
        security = await load_watched_security(chosen, "", files)
        engine = start_transfer_engine(chosen, security)
        stack.push_async_callback(asyncio.to_thread, engine.close)
        channels = NodeChannels(security.channels)
        stack.push_async_callback(channels.close)
        client = store_client(redis_url, chosen, engine, channels, security.tls, redis_timeout_s)
        stack.push_async_callback(client.close)
        yield client


@contextmanager
def open_sync_store(redis_url: str, redis_timeout_s: float = 1.0, **settings: Any) -> Iterator[SyncStore]:
    """Does what :func:`open_store` does, for a program without an event loop: the client has one in a thread."""
    thread = LoopThread("pinyon-store")
    try:
        opened = open_store(redis_url, redis_timeout_s, **settings)
        client = thread.submit(opened.__aenter__()).result()
        try:
            yield SyncStore(thread, client, client.reader)
        finally:
            thread.submit(opened.__aexit__(None, None, None)).result()
    finally:
        thread.close(CLOSE_S)
