"""The settings of a store node."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from pinyon.eviction import EVICTION_POLICIES
from pinyon.runtime.eviction_choice import checked_eviction
from pinyon.runtime.settings import Address, plain_redis, service_config
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

    redis_url: str = Field("", description="Redis with the block metadata; required")
    conductor: Address = Field("", description="host:port of the conductor; empty: report to nobody")
    pool_mib: int = Field(256, ge=1, le=1 << 24, description="size of the DRAM pool in MiB")
    eviction: Annotated[str, AfterValidator(checked_eviction)] = Field(
        "lru", description=f"which objects go when room is needed: {EVICTION_POLICIES.choices}"
    )
    put_timeout_s: float = Field(10.0, gt=0, le=3600, description="seconds a put may take if it does not say so")
    put_timeout_max_s: float = Field(60.0, gt=0, le=3600, description="seconds a put may take at most")
    open_puts_max: int = Field(1024, ge=1, le=2048, description="puts begun and not ended")
    lease_s: float = Field(5.0, gt=0, le=3600, description="seconds a reader may read if it does not say so")
    lease_max_s: float = Field(60.0, gt=0, le=3600, description="seconds a reader may read at most")
    leases_max: int = Field(16384, ge=1, le=1 << 20, description="leases of readers at once")
    node_lease_s: float = Field(
        3.0, ge=0.3, le=3600, description="seconds after which a node that does not answer counts as gone"
    )
    redis_timeout_s: float = Field(1.0, gt=0, le=60, description="seconds that Redis gets for an answer")

    def exposed(self) -> list[str]:
        return super().exposed() + plain_redis(self, self.redis_url)
