"""The composition root of a worker: its parts, and the order in which they start and stop."""

from __future__ import annotations

import asyncio
import functools
import secrets
import signal
import time
from pathlib import Path

from prometheus_client import CollectorRegistry

from pinyon.api.kvstore.v1 import kvstore_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.batching import BATCHING_POLICIES
from pinyon.core.clock import Clock
from pinyon.core.request import Role
from pinyon.core.served import Served
from pinyon.decisions import JOURNAL_TYPES, InstanceConfig, InstanceDecisions, journal_header
from pinyon.eviction import EVICTION_POLICIES
from pinyon.messages.segment import segment_to_proto
from pinyon.model import ModelCard, load_card
from pinyon.placement.instances import InstanceLoad
from pinyon.runtime.admin import add_admin, changeable_flag, changeable_policy
from pinyon.runtime.callers import BLOCK_READ_CALLERS
from pinyon.runtime.eviction import RefitThread
from pinyon.runtime.eviction_choice import whole_choice
from pinyon.runtime.grpc_server import GrpcServer
from pinyon.runtime.identity import CONDUCTOR, peer_name
from pinyon.runtime.journal_file import JournalFile
from pinyon.runtime.ledger import Ledger
from pinyon.runtime.logging import get_logger
from pinyon.runtime.metrics import show_policies
from pinyon.runtime.report_session import ReportSession
from pinyon.runtime.security import NO_SECURITY, Security
from pinyon.runtime.service import ServiceContext
from pinyon.runtime.telemetry import Telemetry
from pinyon.runtime.transfer_engine import register_transfer_metrics, start_transfer_engine
from pinyon.store.client import StoreClient
from pinyon.store.connect import store_client
from pinyon.store.kv_memory import KvMemory
from pinyon.store.lease_keys import LeaseKeys
from pinyon.store.node_channels import NodeChannels
from pinyon.store.reader import BlockReader
from pinyon.transfer import Access
from services.worker.decode.decodes import Decodes
from services.worker.decode.lb_sessions import LbSessions
from services.worker.engines import create_engine
from services.worker.engines.protocol import Engine
from services.worker.instance.engine_loop import EngineLoop
from services.worker.instance.learned import restore_learned, save_learned
from services.worker.instance.parts import Parts
from services.worker.instance.step_members import StepMembers
from services.worker.kv.cache import KvCache
from services.worker.kv.fetch import Fetcher
from services.worker.kv.lending import CachedBlockServicer
from services.worker.kv.storage import Storage
from services.worker.kv.swaps import Swaps
from services.worker.metrics import StepObserver, WorkerMetrics, register_gauges
from services.worker.prefill.peers import PrefillPeers
from services.worker.prefill.prefills import Prefills
from services.worker.report import WorkerReport, instance_info
from services.worker.servicer import WORKER_CALLERS, WorkerServicer
from services.worker.settings import WorkerSettings

_log = get_logger("worker")


class Worker:
    """One engine instance in this process, without signals and process life: ``start``, ``stop``.

    Tests replace the parts ``card``, ``engine``, ``source`` (of fetched blocks) and ``store``."""

    def __init__(
        self,
        settings: WorkerSettings,
        instance_id: str,
        registry: CollectorRegistry,
        *,
        telemetry: Telemetry | None = None,
        card: ModelCard | None = None,
        engine: Engine | None = None,
        clock: Clock = time.monotonic,
        security: Security = NO_SECURITY,
    ) -> None:
        self.settings = settings
        self._security = security
        card = card or load_card(settings.model or None, settings.served_model_name or None)
        if engine is None:
            engine = create_engine(
                *(settings.engine, card, settings.pool_blocks, settings.block_tokens),
                profile=settings.engine_profile,
                kernel=settings.attention_kernel,
            )
        self.engine = engine
        self.served = Served(
            *(instance_id, Role(settings.role), card.name, card.fingerprint),
            vocab_size=card.config.vocab_size,
            model_context=card.config.max_context,
            layout=engine.layout,
            pool_blocks=engine.num_blocks,
            secret=security.secret,
            unsupported=engine.unsupported,
            kernel=engine.kernel,
        )
        self._card = card
        self.address = ""
        self.report: ReportSession | None = None
        self._registry = registry
        self._telemetry = telemetry or Telemetry("worker", instance_id)
        self._clock = clock
        self._metrics = WorkerMetrics(registry)
        self._store: StoreClient | None = None
        self._journal: JournalFile | None = None
        self._batching = settings.batching
        """The name of the batching policy in force."""
        self._announcing: asyncio.Task[None] | None = None

    # -- life

    async def start(self, *, source: BlockReader | None = None, store: StoreClient | None = None) -> str:
        """Binds, serves, and reports to the conductor. Returns the gRPC address."""
        settings, served, clock = self.settings, self.served, self._clock
        security = self._security
        self.transfer = start_transfer_engine(settings, security)
        # A peer reaches only the memory that a lease or a prefill's targets open.
        region = self.transfer.register_local_memory(self.engine.pool.data, access=Access.NONE)
        self._refits = RefitThread(policies=1 if settings.dram_blocks == 0 else 2)
        decisions = self._decisions()
        if settings.batching_table:
            restore_learned(Path(settings.batching_table), decisions.steps, self._batching, served.kernel)
        memory = KvMemory.whole(region, served.layout.block_bytes)
        readers = LeaseKeys(self.transfer, region)
        swaps = None
        if settings.dram_blocks:
            swaps = Swaps(self.engine.pool, settings.dram_blocks, decisions.reservations.swapped)
            swaps.on_broken = functools.partial(signal.raise_signal, signal.SIGTERM)
            swaps.start()
        books = (decisions.pool, decisions.admission, decisions.reservations)
        cache = KvCache(served.layout, *books, readers, clock, swaps)
        cache.on_admitted = self._metrics.room_wait
        members = StepMembers(decisions.steps, decisions.admission, cache)
        ledger = Ledger(self._metrics.prefill)
        observer = StepObserver(self._metrics, cache, members, ledger, clock)
        engine_loop = EngineLoop(self.engine, members, clock, observer.observe, settings.step_timeout_s)
        engine_loop.on_hang = self._engine_changed
        self._channels = NodeChannels(security.channels)
        self._reader = BlockReader(self.transfer, self._channels)
        # Waiting for a layer holds up the whole step, which is fine only where no request is decoded.
        layered = self.transfer if served.role is Role.PREFILL and source is None else None
        if store is None and settings.redis_url:
            store = store_client(settings.redis_url, settings, self.transfer, self._channels, security.tls)
            self._store = store
        self.parts = Parts(
            limits=settings,
            served=served,
            card=self._card,
            cache=cache,
            members=members,
            engine_loop=engine_loop,
            transfer=self.transfer,
            region=region,
            fetcher=Fetcher(source or self._reader, memory, served.layout, clock, settings, layered, store=store),
            storage=Storage(cache, memory, store, settings, clock),
            ledger=ledger,
            telemetry=self._telemetry,
            clock=clock,
            channels=security.channels,
        )
        self.prefills = Prefills(self.parts, decisions.prompts)
        self.peers = PrefillPeers(self.parts)
        self.decodes = Decodes(self.parts, self.prefills, self.peers, self._metrics)
        self.reports = reports = WorkerReport(self.parts, self.prefills, self.decodes, decisions.room)
        self.sessions = LbSessions(self.decodes, reports.told)
        register_gauges(self._registry, self.parts, self.prefills, self.peers, self.decodes, self.sessions, reports)
        show_policy = show_policies(
            self._registry,
            "worker",
            engine=settings.engine,
            eviction=settings.eviction,
            batching=settings.batching,
            service_order=settings.service_order,
        )
        register_transfer_metrics(self._registry, self.transfer)
        engine_loop.start()
        self.parts.storage.start()
        self.server = GrpcServer(settings.listen, security.tls, sessions=True)
        self.server.add(
            WorkerServicer(self.parts, self.prefills, self.sessions, reports.reported),
            worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],
            WORKER_CALLERS,
        )
        self.server.add(
            CachedBlockServicer(cache, segment_to_proto(self.transfer.descriptor([])), settings, self._telemetry),
            kvstore_pb2.DESCRIPTOR.services_by_name["BlockReadService"],
            BLOCK_READ_CALLERS,
        )

        def make(choice: str) -> str:
            return EVICTION_POLICIES.checked(whole_choice(choice, clock))

        def use(whole: str, choice: str) -> None:
            decisions.eviction.switch(whole, clock())  # makes its own policy: a journal holds no policies
            show_policy("eviction", choice)

        def use_batching(choice: str, _: str) -> None:
            self.switch_batching(choice)
            show_policy("batching", choice)

        add_admin(
            self.server,
            [
                changeable_flag("draining", lambda: self.parts.draining, self._set_draining),
                changeable_policy(EVICTION_POLICIES, settings.eviction, use, make),
                changeable_policy(BATCHING_POLICIES, settings.batching, use_batching, BATCHING_POLICIES.checked),
            ],
            fixed={"service_order": "prompts that wait are in it", "role": "the conductor knows an instance by it"},
        )
        self.address = settings.reachable(await self.server.start())
        if settings.conductor:
            info = instance_info(served, self.transfer.boot_id.hex(), self.address, settings)
            connect = security.channels.sessions_to(peer_name(CONDUCTOR))
            self.report = ReportSession(settings.conductor, info, reports, connect=connect)
            ledger.on_end = self.report.wake
            self.report.start()
        return self.address

    def switch_batching(self, choice: str) -> None:
        """Switches to another batching policy, for all requests here. Raises ``ValueError`` for an unknown one."""
        self.parts.cache.switch(choice)
        self.parts.members.switch(choice)
        self._batching = choice
        self.parts.engine_loop.wake()

    def _set_draining(self, draining: bool) -> None:
        """Stops or resumes taking requests; those here go on. The conductor is told at once."""
        self.parts.draining = draining
        if self.report is not None:
            self.report.wake()

    async def stop(self, drain_s: float) -> None:
        """Takes nothing new, finishes requests within ``drain_s``, then ends the rest and releases everything."""
        self.parts.draining = True
        await self.server.begin_drain()
        if self.report is not None:
            self.report.wake()
        if self.parts.engine_loop.hangs:
            drain_s = 0.0  # no request ends by itself
        deadline = self._clock() + drain_s
        await self.decodes.drained(drain_s)
        await self.prefills.drained(max(0.0, deadline - self._clock()))
        await self.parts.engine_loop.close()  # first: the other parts wait for the end of its step
        if self.settings.batching_table:
            learned = self.parts.members.scheduler.learned()
            save_learned(Path(self.settings.batching_table), learned, self._batching, self.served.kernel)
        await self.decodes.close()
        await self.prefills.close()
        if self.report is not None:
            await self.report.close()
        await self.peers.close()
        await self.server.drain(0.5)
        await self.parts.storage.close()
        if self._store is not None:
            await self._store.close()
        await self._reader.close()
        await self._channels.close()
        await self.parts.cache.close()
        await self._refits.close()
        if self._announcing is not None:
            await asyncio.wait((self._announcing,))
        if self._journal is not None:
            self._journal.close()
        await asyncio.to_thread(self.transfer.close)

    def _decisions(self) -> InstanceDecisions:
        settings, served = self.settings, self.served
        config = InstanceConfig(
            pool_blocks=served.pool_blocks,
            block_tokens=served.layout.block_tokens,
            max_batch=settings.max_batch,
            step_tokens=settings.step_tokens,
            chunk_tokens=settings.prefill_chunk_tokens,
            active_prefills=settings.active_prefills,
            max_prefills=settings.max_prefills,
            eviction=whole_choice(settings.eviction, self._clock),
            batching=settings.batching,
            service_order=settings.service_order,
            kernel=served.kernel,
            spare_queued=settings.spare_queued,
            refits_apart=True,
            first_lease_id=1 + secrets.randbits(48),
            dram_blocks=settings.dram_blocks,
            step_tbt_s=settings.step_tbt_s,
        )
        header = journal_header(config, service="worker", instance_id=served.instance_id, role=served.role.value)
        self._journal = settings.open_journal(JOURNAL_TYPES, header, self._clock)
        return InstanceDecisions(config, self._journal, self._refits)

    def load(self) -> InstanceLoad:
        return self.reports.reported()

    def _engine_changed(self) -> None:
        """Announces at once that the engine hangs, or no longer does."""
        if self.parts.engine_loop.hangs:
            self.decodes.give_up("has an engine that hangs")
            self.prefills.give_up("has an engine that hangs")
        serving = self.server.set_serving(not self.parts.refusing)
        self._announcing = asyncio.create_task(serving, name="announce health")
        if self.report is not None:
            self.report.wake()


async def main(settings: WorkerSettings, context: ServiceContext) -> None:
    """Runs the service between the signals."""
    # Loading weights takes seconds for a real model; signals are still heard meanwhile.
    make = functools.partial(
        Worker,
        *(settings, context.instance_id, context.registry),
        telemetry=context.telemetry,
        security=context.security,
    )
    worker = await asyncio.to_thread(make)
    address = await worker.start()
    context.ready({"grpc": address})
    await context.stopping.wait()
    await worker.stop(settings.drain_s)
