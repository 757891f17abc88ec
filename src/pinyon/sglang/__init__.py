"""The KV store behind SGLang's HiCache: ``--hicache-storage-backend dynamic`` names this module.

SGLang calls the backend from three of its threads, and each waits for its answer. So no queue grows here, and each
call has a time limit. Whatever fails is a miss: nothing raises into SGLang once it runs."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import sglang
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from xxhash import xxh3_128_digest

from pinyon.core.address import shifted
from pinyon.core.block_keys import BlockKey, namespace, variant
from pinyon.core.errors import InvalidArgument
from pinyon.runtime.identity import WORKER
from pinyon.runtime.logging import get_logger, show_logs
from pinyon.runtime.loop_thread import shared_thread
from pinyon.runtime.metrics import Figures, MetricsServer, new_registry
from pinyon.runtime.security import load_watched_security
from pinyon.runtime.transfer_engine import start_transfer_engine
from pinyon.runtime.watch import FileWatch
from pinyon.sglang.pages import layout_id, model_fingerprint, register_pool
from pinyon.sglang.settings import load_sglang_settings
from pinyon.store.connect import store_client
from pinyon.store.kv_memory import Pieces
from pinyon.store.node_channels import NodeChannels
from pinyon.store.reader import BlockReader, ReadTerms
from pinyon.store.sync_store import SyncStore
from pinyon.store.writer import PutOutcome

TRIED = "0.5.23"
OUTCOMES = ("asked", "found", "loaded", "missed", "stored", "refused", "failed")
"""The outcomes that are counted: the store was asked for pages, had them; they arrived or not; it took them or not."""
BYTES_S = 1 << 30
START_S = 30.0
CLOSE_S = 4.0
SLACK_S = 1.0  # by which an answer may be late

_log = get_logger("sglang")

T = TypeVar("T")


class PinyonHiCache(HiCacheStorage):  # type: ignore[misc]  # SGLang is not there where types are checked
    """The backend of one rank. Its settings are in SGLang's extra config, or ``PINYON_SGLANG_...`` variables."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """Raises :class:`InvalidArgument` for settings that cannot be used: at its start SGLang shows why."""
        self._config = config = storage_config
        settings, self.counts = load_sglang_settings(config.extra_config or {}), dict.fromkeys(OUTCOMES, 0)
        show_logs(settings.log_level)
        if sglang.__version__ != TRIED:
            _log.warning("this backend was tried with SGLang %s, and this is %s", TRIED, sglang.__version__)
        self._thread, files = shared_thread(), FileWatch()
        self._parts: list[Any] = [files]
        """The parts that are closed on the event loop."""
        self._security = self._thread.submit(load_watched_security(settings, WORKER, files)).result(START_S)
        rank = (config.dp_rank * config.pp_size + config.pp_rank) * config.attn_cp_size + config.attn_cp_rank
        rank = rank * config.tp_size + config.tp_rank
        ports = {name: shifted(getattr(settings, name), rank) for name in ("transfer_listen", "metrics_listen")}
        self._settings = settings.model_copy(update=ports)
        self._transfer = start_transfer_engine(self._settings, self._security)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        settings, self._page_tokens = self._settings, mem_pool_host.page_size
        self._memory = register_pool(self._transfer, mem_pool_host)
        layout = layout_id(self._config, mem_pool_host, self._memory, sglang.__version__)
        self._root = namespace(settings.fingerprint or model_fingerprint(), layout, "", self._security.secret)
        self._store = self._thread.submit(self._open()).result(START_S)
        _log.info("%d pages of %d bytes, %s", mem_pool_host.page_num, self._memory.object_bytes, layout)

    async def _open(self) -> SyncStore:
        settings, security, channels = self._settings, self._security, NodeChannels(self._security.channels)
        client = store_client(settings.redis_url, settings, self._transfer, channels, security.tls)
        reader = BlockReader(self._transfer, channels)
        self._parts += [client, reader, channels]
        if settings.metrics_listen:
            registry = new_registry()
            figure = ("pages", "Pages by what came of them", "outcome", self.counts.copy)
            corrupt = ("corrupt_pages", "Pages that arrived with other bytes than were put", lambda: reader.corrupt)
            registry.register(Figures("pinyon_sglang", counters=[corrupt], labelled=[figure]))
            self._parts.append(MetricsServer(settings.metrics_listen, registry, security))
            _log.info("metrics at http://%s/metrics", self._parts[-1].address)
        return SyncStore(self._thread, client, reader)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if host_pool_name != "kv":
            raise InvalidArgument(f"models that keep {host_pool_name} beside their KV are not supported")

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        return self._safely(self._leading, keys) or 0

    def exists(self, key: str) -> bool:
        return bool(self.batch_exists([key]))

    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._safely(self._load, keys, host_indices) or [False] * len(keys)

    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        return self._safely(self._put, keys, host_indices) or [False] * len(keys)

    def _safely(self, work: Callable[..., T], keys: Sequence[str], *slots: Any) -> T | None:
        """Returns the answer of the work; None after an exception, which is logged."""
        try:
            return work(keys, *slots)
        except Exception:
            self.counts["failed"] += len(keys)
            _log.exception(f"{work.__name__} failed, which is a miss")
            return None

    def _leading(self, hashes: Sequence[str]) -> int:
        limit_s = self._settings.look_s
        spans = self._store.look(self._keys(hashes), self._memory.object_bytes, limit_s).result(limit_s + SLACK_S)
        found = spans[-1].end if spans else 0
        self.counts["asked"] += len(hashes)
        self.counts["found"] += found
        return found

    def _load(self, hashes: Sequence[str], slots: Any) -> list[bool]:
        began_s, size = time.monotonic(), self._memory.object_bytes
        keys, places = self._keys(hashes), self._places(hashes, slots)
        limit_s = self._settings.load_s + len(keys) * size / BYTES_S
        spans = self._store.look(keys, size, limit_s).result(limit_s + SLACK_S)
        left_s = limit_s - (time.monotonic() - began_s)
        # This wait has no limit but the read's own: until the read ends, it may write to SGLang's memory.
        arrived = sum(self._store.read(spans, keys, places, size, left_s, ReadTerms()).result())
        self.counts["loaded"] += arrived
        self.counts["missed"] += len(keys) - arrived
        return [place < arrived for place in range(len(keys))]

    def _put(self, hashes: Sequence[str], slots: Any) -> list[bool]:
        size, places = self._memory.object_bytes, self._places(hashes, slots)
        limit_s = self._settings.store_s + len(places) * size / BYTES_S
        outcomes = self._store.put(list(zip(self._keys(hashes), places, strict=True)), size, limit_s).result()
        taken = [each not in (PutOutcome.FAILED, PutOutcome.NO_SPACE) for each in outcomes]
        self.counts["stored"] += outcomes.count(PutOutcome.STORED)
        self.counts["refused"] += taken.count(False)
        return taken

    def _keys(self, hashes: Sequence[str]) -> list[BlockKey]:
        """Returns the pages' keys. SGLang's hashes cover all tokens before, the adapter and the salt."""
        return [xxh3_128_digest(self._root + each.encode()) for each in hashes]

    def _places(self, hashes: Sequence[str], slots: Any) -> list[Pieces]:
        starts = slots[:: self._page_tokens].tolist()
        if len(slots) != len(hashes) * self._page_tokens or any(start % self._page_tokens for start in starts):
            raise ValueError(f"{len(slots)} slots are not {len(hashes)} pages")
        return [self._memory.pieces(start // self._page_tokens) for start in starts]

    def clear(self) -> None:
        self._root = variant(self._root, "era", secrets.token_hex(8))  # what the store has of the old keys ages out

    def close(self) -> None:
        try:
            self._thread.submit(self._close()).result(CLOSE_S)
        except Exception:
            _log.exception("close failed")
        finally:
            self._transfer.close()  # on return, nothing touches SGLang's memory

    async def _close(self) -> None:
        for part in self._parts:
            if (closing := part.close()) is not None:
                await closing

    # SGLang copies pages by these only without interface_v1, which is refused at the start.

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return None

    def batch_get(self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return False

    def batch_set(self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        return False
