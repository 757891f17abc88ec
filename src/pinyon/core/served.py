"""The description of what an instance serves: the model, the shape of its KV, and its limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePath

from pinyon.core.block_keys import BlockKey, namespace
from pinyon.core.errors import InvalidArgument
from pinyon.core.layout import KvLayout
from pinyon.core.request import Role


@dataclass(frozen=True)
class Served:
    """Facts that never change while the process lives."""

    instance_id: str
    role: Role
    name: str
    """The model's name."""
    fingerprint: str
    """The fingerprint of the model's weights."""
    vocab_size: int
    model_context: int
    """The context length in tokens that the model was made for."""
    layout: KvLayout
    pool_blocks: int
    secret: bytes = field(default=b"", repr=False)
    """The cluster's secret, with which block keys begin; empty if there is none."""
    unsupported: frozenset[str] = frozenset()
    """Sampling parameters that the engine does not support."""
    kernel: str = ""
    """The attention kernel, which determines which requests read KV together in decode; empty if unknown."""

    @property
    def max_context(self) -> int:
        """The maximum of prompt plus generation in tokens: the model's, or what the pool can hold."""
        return min(self.model_context, self.pool_blocks * self.layout.block_tokens)

    def namespace(self, tenant: str, cache_salt: str = "") -> BlockKey:
        """Returns the start of the key chain for the tenant's requests with this salt."""
        return _namespace(self.fingerprint, self.layout.layout_id, tenant, self.secret, cache_salt)


_namespace = lru_cache(maxsize=1024)(namespace)


MORE_MODELS_MAX = 31
NAME_CHARS_MAX = 128


def parse_more_models(text: str) -> dict[str, str]:
    """Parses the setting of the models besides the first, ``[NAME=]FOLDER`` separated by commas: folders by name.

    A folder without a name is named after itself; a path cannot contain a comma. Raises :class:`InvalidArgument`."""
    found: dict[str, str] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, equals, folder = part.partition("=")
        if not equals:
            name, folder = PurePath(part).name, part
        if not name or not folder or len(name) > NAME_CHARS_MAX:
            raise InvalidArgument(f"{part!r} is not [NAME=]FOLDER", field="more_models")
        if name in found:
            raise InvalidArgument(f"two models are called {name!r}", field="more_models")
        found[name] = folder
    if len(found) > MORE_MODELS_MAX:
        raise InvalidArgument(f"{len(found)} further models; {MORE_MODELS_MAX} are allowed", field="more_models")
    return found
