"""The parts of the connector in one of vLLM's workers."""

from __future__ import annotations

import asyncio
from typing import Any

from pinyon.api.kvstore.v1 import kvstore_pb2
from pinyon.core.address import shifted
from pinyon.runtime.admin import add_admin, changeable_flag
from pinyon.runtime.callers import BLOCK_READ_CALLERS
from pinyon.runtime.grpc_server import GrpcServer
from pinyon.runtime.logging import get_logger
from pinyon.runtime.transfer_engine import start_transfer_engine
from pinyon.store.client import StoreClient
from pinyon.store.connect import store_client
from pinyon.store.node_channels import NodeChannels
from pinyon.store.reader import BlockReader
from pinyon.store.sync_store import SyncStore
from pinyon.vllm.jobs import RankFacts
from pinyon.vllm.lending import Lending
from pinyon.vllm.memory import EngineMemory
from pinyon.vllm.parts import START_S, ConnectorParts, vllm_version
from pinyon.vllm.worker import WorkerSide

CLOSE_S = 2.0
WORKER_SERVICE = "pinyon.api.worker.v1.WorkerService"
"""The service by whose health ``pinyon`` knows a worker. Its methods are not here."""

_log = get_logger("vllm")


class WorkerParts(ConnectorParts):
    """The transfer engine, the store's client, and the server for other instances' reads."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, kv_cache_config)
        self._num_blocks: int = kv_cache_config.num_blocks
        self.facts: RankFacts | None = None
        self.side: WorkerSide | None = None
        self._draining = False
        parallel = vllm_config.parallel_config
        offset = parallel.rank + self.data_rank * self.ranks
        ports = {name: shifted(getattr(self.settings, name), offset) for name in ("listen", "transfer_listen")}
        self.settings = self.settings.model_copy(update=ports)
        self.transfer = start_transfer_engine(self.settings, self.security)

    def register(self, tensors: dict[str, Any]) -> None:
        """Registers vLLM's KV memory, and starts. Raises :class:`InvalidArgument` for memory that is not understood."""
        from vllm.distributed import get_tensor_model_parallel_rank
        from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_world_size

        settings = self.settings
        spec = self.group.kv_cache_spec
        self.memory = EngineMemory(self.transfer, tensors, spec, self._num_blocks, vllm_version())
        rank = get_pp_group().rank_in_group * get_tensor_model_parallel_world_size() + get_tensor_model_parallel_rank()
        lends = settings.peers and self.ranks == 1
        self.lending = (
            Lending(self.transfer, self.memory, settings.lease_s, settings.max_lease_s, self.clock) if lends else None
        )
        store, address = self.thread.submit(self._start()).result(START_S)
        self.side = WorkerSide(
            self.thread, store, self.memory, self.lending, rank=rank, ranks=self.ranks, load_s=settings.load_s,
            store_s=settings.store_s, store_queue_s=settings.store_queue_s, clock=self.clock,
        )  # fmt: skip
        self.facts = RankFacts(self.memory.layout, address, self.transfer.boot_id.hex())
        _log.info(
            "%d blocks of %d bytes in %d storages, %s",
            self.memory.blocks, self.memory.kv.object_bytes, len(self.memory.regions), self.memory.layout.layout_id,
        )  # fmt: skip

    async def _start(self) -> tuple[SyncStore, str]:
        settings, security = self.settings, self.security
        self._channels = NodeChannels(security.channels)
        self._reader = BlockReader(self.transfer, self._channels)
        self._client: StoreClient | None = None
        if settings.redis_url:
            self._client = store_client(settings.redis_url, settings, self.transfer, self._channels, security.tls)
        self._server = GrpcServer(settings.listen, security.tls)
        if self.lending is not None:
            service = kvstore_pb2.DESCRIPTOR.services_by_name["BlockReadService"]
            self._server.add(self.lending, service, BLOCK_READ_CALLERS)
        add_admin(self._server, [changeable_flag("draining", lambda: self._draining, self._drain)])
        self._server.stands_for.append(WORKER_SERVICE)
        address = settings.reachable(await self._server.start())
        return SyncStore(self.thread, self._client, self._reader, clock=self.clock), address

    def _drain(self, draining: bool) -> None:
        """Says by the server's health that no new requests are wanted; the scheduler's side asks for it."""
        self._draining = draining
        self._announcing = asyncio.get_running_loop().create_task(self._server.set_serving(not draining))

    def close(self) -> None:
        """Ends all that runs, within some seconds."""
        try:
            self.thread.submit(self._stop()).result(2 * CLOSE_S)
        finally:
            self.transfer.close()

    async def _stop(self) -> None:
        await self._server.drain(CLOSE_S / 4)
        if self._client is not None:
            await self._client.close()
        await self._reader.close()
        await self._channels.close()
