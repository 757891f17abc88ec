"""The settings of a store node."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import AfterValidator

from pinyon.eviction import EVICTION_POLICIES
from pinyon.runtime.eviction_choice import checked_eviction
from pinyon.runtime.settings import Address, checked, plain_redis, service_config, setting
from pinyon.runtime.transfer_engine import TransferSettings
from pinyon.store.quotas import parse_quotas


class KvStoreSettings(TransferSettings):
    """A node of the KV store: a pool of memory, and its entries in Redis."""

    model_config = service_config("kvstore")
    everyday: ClassVar[dict[str, str]] = {
        "the suite": "redis_url conductor",
        "pool": "pool_mib eviction tenant_quotas pinned_share",
        "disk": "disk_dir disk_mib",
        "puts and reads": "open_puts_max leases_max",
    }
    further: ClassVar[dict[str, str]] = {
        "the suite": "node_lease_s redis_timeout_s",
        "puts and reads": "put_timeout_s put_timeout_max_s lease_s lease_max_s",
    }

    redis_url: str = setting("", "Redis with the block metadata: one, Sentinels or a cluster; required")
    conductor: Address = setting("", "host:port of the conductor to report to; empty: none")
    pool_mib: int = setting(256, "size of the DRAM pool in MiB", ge=1, le=1 << 24)
    eviction: Annotated[str, AfterValidator(checked_eviction)] = setting(
        "lru", f"which objects go when room is needed: {EVICTION_POLICIES.choices}"
    )
    tenant_quotas: Annotated[str, checked(parse_quotas)] = setting(
        "", "memory that tenants may hold in all nodes together: NAME=MIB or NAME=PERCENT%, ...; * is each other tenant"
    )
    pinned_share: float = setting(0.5, "largest share of the pool that `pinyon kv pin` may pin", ge=0, le=1)
    disk_dir: str = setting("", "folder for objects that leave memory, also found after a restart; empty: no disk")
    disk_mib: int = setting(4096, "size of the file in that folder in MiB", ge=16, le=1 << 30)
    put_timeout_s: float = setting(10.0, "time limit of a put that names none", gt=0, le=3600)
    put_timeout_max_s: float = setting(60.0, "longest time limit that a put may name", gt=0, le=3600)
    open_puts_max: int = setting(1024, "most puts begun and not ended", ge=1, le=2048)
    lease_s: float = setting(5.0, "length of a reader's lease when it asks for no time", gt=0, le=3600)
    lease_max_s: float = setting(60.0, "longest lease that a reader gets", gt=0, le=3600)
    leases_max: int = setting(16384, "most leases of readers at once", ge=1, le=1 << 20)
    node_lease_s: float = setting(3.0, "time after which a node that does not answer counts as gone", ge=0.3, le=3600)
    redis_timeout_s: float = setting(1.0, "time limit for an answer of Redis", gt=0, le=60)

    def exposed(self) -> list[str]:
        return super().exposed() + plain_redis(self, self.redis_url)
