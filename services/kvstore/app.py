"""The composition root of a store node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from pinyon.api.kvstore.v1 import admin_pb2, kvstore_pb2
from pinyon.core.errors import InvalidArgument, Unavailable
from pinyon.eviction import EVICTION_POLICIES, EvictionPolicy
from pinyon.runtime.admin import add_admin, changeable_policy
from pinyon.runtime.callers import BLOCK_READ_CALLERS
from pinyon.runtime.grpc_server import GrpcServer
from pinyon.runtime.identity import CONDUCTOR, peer_name
from pinyon.runtime.logging import get_logger
from pinyon.runtime.metrics import show_policies
from pinyon.runtime.report_session import ReportSession
from pinyon.runtime.service import ServiceContext
from pinyon.runtime.tasks import ended
from pinyon.runtime.transfer_engine import register_transfer_metrics, start_transfer_engine
from pinyon.store.metadata import StoreMetadata
from pinyon.store.node_channels import NodeChannels
from pinyon.store.records import NodeRecord
from services.kvstore.admin import STORE_ADMIN_CALLERS, StoreAdminServicer
from services.kvstore.copier import Copier
from services.kvstore.disk_file import DiskFile
from services.kvstore.drain import Drain
from services.kvstore.metrics import register_metrics
from services.kvstore.node import StoreNode, StoreReport
from services.kvstore.publisher import MetadataPublisher
from services.kvstore.second_copies import SecondCopies
from services.kvstore.servicer import KVSTORE_CALLERS, KvStoreServicer, StoredBlockServicer
from services.kvstore.settings import KvStoreSettings

_log = get_logger("kvstore")


async def run(settings: KvStoreSettings, context: ServiceContext) -> None:
    """Serves until told to stop, or until another process takes this node's id."""
    async with serving(settings, context):
        await context.stopping.wait()


@asynccontextmanager
async def serving(settings: KvStoreSettings, context: ServiceContext) -> AsyncIterator[StoreNode]:
    """Yields a node that serves, can be found, and has announced its endpoints; then stops these in reverse order."""
    if not settings.redis_url:
        raise InvalidArgument("a store node needs --redis-url", field="redis_url")
    async with AsyncExitStack() as stack:
        security = context.security
        engine = start_transfer_engine(settings, security)
        stack.push_async_callback(asyncio.to_thread, engine.close)
        disk = None
        if settings.disk_dir:
            try:
                disk = await asyncio.to_thread(DiskFile, Path(settings.disk_dir), settings.disk_mib << 20)
            except Unavailable as error:
                _log.error("there is no disk tier: %s", error.message)
        node = StoreNode(context.instance_id, settings, engine, disk)
        stack.push_async_callback(node.close)
        await node.start()
        server = GrpcServer(settings.listen, security.tls, sessions=True)
        services = kvstore_pb2.DESCRIPTOR.services_by_name
        metadata = StoreMetadata(settings.redis_url, timeout_s=settings.redis_timeout_s, tls=security.tls)
        stack.push_async_callback(metadata.close)
        channels = NodeChannels(security.channels)
        stack.push_async_callback(channels.close)
        copier = Copier(node, engine, metadata, channels)
        stack.push_async_callback(copier.close)
        drain = Drain(node, copier, metadata)
        server.add(KvStoreServicer(node, copier, drain), services["KvStoreService"], KVSTORE_CALLERS)
        server.add(StoredBlockServicer(node, context.telemetry), services["BlockReadService"], BLOCK_READ_CALLERS)
        admins = admin_pb2.DESCRIPTOR.services_by_name["StoreAdminService"]
        server.add(StoreAdminServicer(node), admins, STORE_ADMIN_CALLERS)
        show_policy = show_policies(context.registry, "kvstore", eviction=settings.eviction)

        def use(policy: EvictionPolicy[bytes], choice: str) -> None:
            node.switch(policy)
            show_policy("eviction", choice)

        add_admin(server, [changeable_policy(EVICTION_POLICIES, settings.eviction, use, node.policy)])
        bound = await server.start()
        stack.push_async_callback(_drain, server, node, settings.drain_s)
        address = settings.reachable(bound)
        record = NodeRecord(node.node_id, node.boot_id, address, node.table.capacity_bytes, settings.zone)
        publisher = MetadataPublisher(node, record, metadata, settings.node_lease_s, lost_name=context.stopping)
        await publisher.register()
        publisher.start()
        drain.announce = publisher.renew
        stack.push_async_callback(publisher.close)
        second_copies = SecondCopies(node, metadata)
        stack.push_async_callback(ended, asyncio.create_task(second_copies.watch(), name="second-copies"))
        session: ReportSession | None = None
        if settings.conductor:
            report = StoreReport(node)
            connect = security.channels.sessions_to(peer_name(CONDUCTOR))
            session = ReportSession(
                *(settings.conductor, report.info(address), report), connect=connect, on_copies=copier.ordered
            )
            node.on_change(session.wake)
            session.start()
            stack.push_async_callback(session.close)
        register_metrics(
            *(context.registry, node, publisher, copier, second_copies),
            lambda: float(session is not None and session.registered.is_set()),
        )
        register_transfer_metrics(context.registry, engine)
        context.ready({"grpc": bound, "transfer": f"{engine.descriptor().host}:{engine.descriptor().port}"})
        try:
            yield node
        finally:
            node.draining = True
            await server.begin_drain()


async def _drain(server: GrpcServer, node: StoreNode, seconds: float) -> None:
    """Lets readers and writers finish for up to ``seconds``; nobody finds the node any more."""
    if not await node.wait_idle(seconds):
        _log.info("stopping with %d leases and %d puts open", node.table.leases, node.table.open_puts)
    await server.drain(min(seconds, 1.0))
