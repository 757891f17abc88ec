"""What an instance serves: the model, the shape of its KV, and its limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from pinyon.core.block_keys import BlockKey, namespace
from pinyon.core.layout import KvLayout
from pinyon.core.request import Role


@dataclass(frozen=True)
class Served:
    """Facts that never change while the process lives."""

    instance_id: str
    role: Role
    name: str
    """The model's."""
    fingerprint: str
    """Of its weights."""
    vocab_size: int
    model_context: int
    """Tokens that the model was made for."""
    layout: KvLayout
    pool_blocks: int
    secret: bytes = field(default=b"", repr=False)
    """The cluster's, which block keys start from; empty: none."""
    unsupported: frozenset[str] = frozenset()
    """Sampling parameters that the engine does not heed."""
    kernel: str = ""
    """Who reads KV together in decode; empty if that is not known."""

    @property
    def max_context(self) -> int:
        """Longest prompt plus generation in tokens: the model's, or what the pool can hold."""
        return min(self.model_context, self.pool_blocks * self.layout.block_tokens)

    def namespace(self, tenant: str, cache_salt: str = "") -> BlockKey:
        """Where the key chain of the tenant's requests with this salt begins."""
        return _namespace(self.fingerprint, self.layout.layout_id, tenant, self.secret, cache_salt)


_namespace = lru_cache(maxsize=1024)(namespace)
