"""The settings of a store node."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import AfterValidator

from pinyon.eviction import EVICTION_POLICIES
from pinyon.runtime.eviction_choice import checked_eviction
from pinyon.runtime.settings import Address, plain_redis, service_config, setting
from pinyon.runtime.transfer_engine import TransferSettings


class KvStoreSettings(TransferSettings):
    """A node of the KV store: a pool of memory, and its entries in Redis."""

    model_config = service_config("kvstore")
    everyday: ClassVar[dict[str, str]] = {
        "the suite": "redis_url conductor",
        "pool": "pool_mib eviction",
        "puts and reads": "open_puts_max leases_max",
    }
    further: ClassVar[dict[str, str]] = {
        "the suite": "node_lease_s redis_timeout_s",
        "puts and reads": "put_timeout_s put_timeout_max_s lease_s lease_max_s",
    }

    redis_url: str = setting("", "Redis with the block metadata; required")
    conductor: Address = setting("", "host:port of the conductor; empty: report to nobody")
    pool_mib: int = setting(256, "size of the DRAM pool in MiB", ge=1, le=1 << 24)
    eviction: Annotated[str, AfterValidator(checked_eviction)] = setting(
        "lru", f"which objects go when room is needed: {EVICTION_POLICIES.choices}"
    )
    put_timeout_s: float = setting(10.0, "seconds a put may take if it names no time", gt=0, le=3600)
    put_timeout_max_s: float = setting(60.0, "seconds a put may take at most", gt=0, le=3600)
    open_puts_max: int = setting(1024, "puts that have begun and not ended", ge=1, le=2048)
    lease_s: float = setting(5.0, "seconds a reader may read if it names no time", gt=0, le=3600)
    lease_max_s: float = setting(60.0, "seconds a reader may read at most", gt=0, le=3600)
    leases_max: int = setting(16384, "leases of readers at once", ge=1, le=1 << 20)
    node_lease_s: float = setting(
        3.0, "seconds after which a node that does not answer counts as gone", ge=0.3, le=3600
    )
    redis_timeout_s: float = setting(1.0, "seconds that Redis gets for an answer", gt=0, le=60)

    def exposed(self) -> list[str]:
        return super().exposed() + plain_redis(self, self.redis_url)
