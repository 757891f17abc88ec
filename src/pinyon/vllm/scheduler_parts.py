"""The parts of the connector in vLLM's scheduler: questions to the store, and reports to the conductor."""

from __future__ import annotations

import asyncio
import json
import secrets
import ssl
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any
from urllib.request import HTTPSHandler, ProxyHandler, build_opener

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from xxhash import xxh3_128_hexdigest

from pinyon.core.address import shifted
from pinyon.core.block_keys import secret_id
from pinyon.core.orders import FetchSpan
from pinyon.core.request import Role
from pinyon.placement.instances import InstanceInfo
from pinyon.runtime.identity import CONDUCTOR, peer_name
from pinyon.runtime.logging import get_logger
from pinyon.runtime.metrics import Figure, Figures, MetricsServer, new_registry
from pinyon.runtime.report_session import ReportSession
from pinyon.store.client import StoreClient
from pinyon.store.metadata import StoreMetadata
from pinyon.store.node_channels import NodeChannels
from pinyon.store.sync_store import SyncStore
from pinyon.vllm.jobs import RankFacts
from pinyon.vllm.parts import ConnectorParts, vllm_version
from pinyon.vllm.prompt_keys import KeySpace, shard_keys
from pinyon.vllm.report import EngineReport
from pinyon.vllm.scheduler import COUNTED, SchedulerSide
from pinyon.vllm.settings import server_url
from pinyon.vllm.times import Times

CLOSE_S = 2.0
SILENT_S = 60.0
"""The time after which a server that does not answer is worth a warning."""
HEALTH_S = 0.5
"""The time between two questions whether vLLM's server answers."""

_log = get_logger("vllm")


class SchedulerParts(ConnectorParts):
    """The scheduler's side; until the workers have told of their memory nothing is reused."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, kv_cache_config)
        self._config = vllm_config
        self._url = server_url(self.settings) if self.settings.conductor else ""
        self._pool: Any = None
        self.side: SchedulerSide | None = None
        self._session: ReportSession | None = None
        self._metrics: MetricsServer | None = None
        self._era = ""
        """A name that is new whenever all content became void, as after new weights."""
        self._blocks: int = kv_cache_config.num_blocks
        self._version = vllm_version()
        self._waking = False

    def bind(self, pool: Any) -> None:
        self._pool = pool
        if self.side is not None:
            self.side.bind(pool)

    def begin(self, facts: Sequence[RankFacts]) -> None:
        """Starts with what the workers have told."""
        self._facts, settings, tls = facts[0], self.settings, self.security.tls
        self._sizes = [each.layout.block_bytes for each in facts]
        certified = "" if tls is None else tls.material.identity.instance_id
        name = settings.instance_id or certified or f"vllm-{secrets.token_hex(3)}"
        self._instance_id = f"{name}-dp{self.data_rank}" if self.data_rank else name
        self._fingerprint = model_fingerprint(self._config)
        layout, self._lends = self._facts.layout, settings.peers and self.ranks == 1
        side = SchedulerSide(
            self._space(), self.ranks, self._look if settings.redis_url else None,
            Times(self._instance_id, layout.block_tokens), self.clock, look_s=settings.look_s,
            saves=settings.save and bool(settings.redis_url), pinned_share=settings.pinned_share,
            secret=self.security.secret, wake=self._wake,
        )  # fmt: skip
        self._report = EngineReport(side, self._config.scheduler_config.max_num_seqs)
        self.thread.submit(self._start()).result(CLOSE_S)
        self.side = side
        if self._pool is not None:
            side.bind(self._pool)
        self.thread.submit(self._register())
        self._watching = self.thread.submit(self._watch()) if self._url else None
        self._show_metrics(side)

    def _space(self) -> KeySpace:
        layout = self._facts.layout
        fingerprint = f"{self._fingerprint}.{self._era}" if self._era else self._fingerprint
        return KeySpace(fingerprint, layout.layout_id, layout.block_tokens, self.security.secret)

    async def _start(self) -> None:
        settings, security = self.settings, self.security
        self._registering = asyncio.Lock()
        self._channels = NodeChannels(security.channels)
        client = None
        if settings.redis_url:
            metadata = StoreMetadata(settings.redis_url, timeout_s=max(0.2, settings.look_s), tls=security.tls)
            host = self._facts.address.rpartition(":")[0]
            client = StoreClient(None, metadata, self._channels, host=host, zone=settings.zone)
        self._client = client
        self._store = SyncStore(self.thread, client, None, clock=self.clock)

    def _look(self, keys: Sequence[bytes]) -> Future[tuple[FetchSpan, ...]]:
        if self.ranks == 1:
            return self._store.look(keys, self._sizes[0], self.settings.look_s)
        return self.thread.submit(self._look_for_shards(keys, self.settings.look_s))

    async def _look_for_shards(self, keys: Sequence[bytes], look_s: float) -> tuple[FetchSpan, ...]:
        """Returns what is there of every rank's part. Each rank finds out by itself where its own is."""
        looks = [
            self._store.look(shard_keys(keys, rank, self.ranks), size, look_s) for rank, size in enumerate(self._sizes)
        ]
        found = await asyncio.gather(*map(asyncio.wrap_future, looks))
        blocks = min(spans[-1].end if spans else 0 for spans in found)
        return tuple(
            FetchSpan(span.source_id, span.address, span.source, span.first, min(span.end, blocks))
            for span in found[0]
            if span.first < blocks
        )

    # -- the conductor

    def info(self) -> InstanceInfo:
        """Returns the registration."""
        model, layout = self._config.model_config, self._facts.layout
        names = model.served_model_name
        return InstanceInfo(
            instance_id=self._instance_id,
            boot_id=f"{self._facts.boot_id}.{self._era}" if self._era else self._facts.boot_id,
            role=Role(self.settings.role),
            address=self._facts.address,
            model=names[0] if isinstance(names, list) else names or model.model,
            model_fingerprint=self._space().fingerprint,
            layout=layout,
            capacity_blocks=self._blocks,
            max_batch=self._config.scheduler_config.max_num_seqs,
            max_context_tokens=model.max_model_len,
            key_secret_id=secret_id(self.security.secret),
            server_url=self._url,
            keeps_to_itself=not self._lends,
        )

    async def _register(self) -> None:
        """Opens a session with the conductor, in place of the present one."""
        async with self._registering:  # a second reset may come while the first one's session closes
            if self._session is not None:
                await self._session.close()
            if self.settings.conductor:
                connect = self.security.channels.sessions_to(peer_name(CONDUCTOR))
                self._session = ReportSession(self.settings.conductor, self.info(), self._report, connect=connect)
                self._session.start()

    def _wake(self) -> None:
        """Makes the next report go out soon. Called in each step, so it wakes the loop only if nobody has yet."""
        session = self._session
        if session is not None and not self._waking:
            self._waking = True

            def wake() -> None:
                self._waking = False
                session.wake()

            self.thread.call(wake)

    async def _watch(self) -> None:
        """Says that requests may come while vLLM's server answers, which begins after the engine, and nobody drains it.

        The worker's process, which people ask to drain, says so by its health."""
        url, answers, began_s = f"{self._url}/version", False, self.clock()
        while True:
            try:
                if not answers:
                    told = await asyncio.to_thread(_get, url)
                    if json.loads(told).get("version") != self._version:  # the address was guessed, and is another's
                        raise ValueError(f"no vLLM {self._version} is there, but {told[:100]!r}")
                    answers = True
                said = await self._channels.call(self._facts.address, HealthStub, "Check", HealthCheckRequest(), 1.0)
                draining = said.status != HealthCheckResponse.SERVING
            except Exception as error:  # whatever it is, the server does not answer
                draining = not answers
                if draining and self.clock() - began_s > SILENT_S:
                    began_s = self.clock()
                    _log.warning("no requests come here, as %s does not answer: %r (is server_url right?)", url, error)
            if draining != self._report.draining:
                self._report.draining = draining
                _log.info("%s: %s requests", self._instance_id, "takes no more" if draining else "takes")
                if self._session is not None:
                    self._session.wake()
            await asyncio.sleep(HEALTH_S)

    def _show_metrics(self, side: SchedulerSide) -> None:
        registry = new_registry()
        gauges: list[Figure] = [
            ("cached_blocks", "Blocks in vLLM's prefix cache", lambda: len(side.cached)),
            ("pinned_jobs", "Loads and saves under way, which pin blocks", lambda: side.pins),
            ("registered", "Whether the conductor knows the engine", self._is_registered),
        ]
        counters = [(name, text, partial(side.counts.__getitem__, name)) for name, text in COUNTED.items()]
        registry.register(Figures("pinyon_vllm", gauges, counters))
        if self.settings.metrics_listen:
            listen = shifted(self.settings.metrics_listen, self.data_rank)
            self._metrics = MetricsServer(listen, registry, self.security)
            _log.info("metrics at http://%s/metrics", self._metrics.address)

    def _is_registered(self) -> float:
        return float(self._session is not None and self._session.registered.is_set())

    def reset(self) -> bool:
        """Makes all content void, here and for this engine in the store: its keys are others from now on."""
        if self.side is None:
            return True
        if any(block.block_hash is not None for block in self._pool.blocks):
            return False  # vLLM goes on with what its own cache holds
        self._era = secrets.token_hex(4)
        self.side.forget_all(self._space())
        self.thread.submit(self._register())
        return True

    def close(self) -> None:
        """Tells the conductor that the instance leaves, and ends."""
        if self._metrics is not None:
            self._metrics.close()
        if self.side is not None:
            if self._watching is not None:
                self._watching.cancel()
            self.thread.submit(self._stop()).result(2 * CLOSE_S)

    async def _stop(self) -> None:
        async with self._registering:
            if self._session is not None:
                await self._session.close()
        if self._client is not None:
            await self._client.close()
        await self._channels.close()


def _get(url: str) -> bytes:
    # It is asked only whether it is up. A proxy that the environment names is not on the way to this machine.
    unverified = HTTPSHandler(context=ssl._create_unverified_context())
    with build_opener(ProxyHandler({}), unverified).open(url, timeout=2.0) as answer:
        return bytes(answer.read(1024))


def model_fingerprint(config: Any) -> str:
    """Returns a name for the weights and what else changes KV: of a folder by its content, else by its name."""
    model, load, draft = config.model_config, config.load_config, config.speculative_config
    from pinyon.model.card import weights_name

    name = weights_name(model.model, str(model.revision or getattr(model.hf_config, "_commit_hash", None)))
    seed = model.seed if load.load_format == "dummy" else None
    parts = (
        *(name, str(model.dtype), str(model.quantization), str(load.load_format), seed, str(model.hf_overrides)),
        # Positions count differently with another longest context in some models.
        *(model.max_model_len, str(getattr(model, "override_generation_config", None))),
        *(str(config.cache_config.cache_dtype), str(draft and draft.model)),
    )
    return xxh3_128_hexdigest(json.dumps(parts).encode())
