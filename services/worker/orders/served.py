"""What this worker serves: the model, the shape of its KV, and its limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from pinyon.core.block_keys import BlockKey, namespace
from pinyon.core.layout import KvLayout
from pinyon.core.request import Role
from pinyon.model import ModelCard


@dataclass(frozen=True)
class Served:
    """Facts that never change while the process lives."""

    instance_id: str
    role: Role
    card: ModelCard
    layout: KvLayout
    pool_blocks: int
    secret: bytes = field(default=b"", repr=False)
    """The cluster's, which block keys start from; empty: none."""
    unsupported: frozenset[str] = frozenset()
    """Sampling parameters that the engine does not heed."""
    kernel: str = ""
    """See :attr:`services.worker.engines.protocol.Engine.kernel`."""

    @property
    def name(self) -> str:
        return self.card.name

    @property
    def max_context(self) -> int:
        """Longest prompt plus generation in tokens: the model's, or what the pool can hold."""
        return min(self.card.config.max_context, self.pool_blocks * self.layout.block_tokens)

    def namespace(self, tenant: str, cache_salt: str = "") -> BlockKey:
        """Where the key chain of the tenant's requests with this salt begins."""
        return _namespace(self.card.fingerprint, self.layout.layout_id, tenant, self.secret, cache_salt)


_namespace = lru_cache(maxsize=1024)(namespace)
