"""SGLang's router to the letter: among equally good matches it does not choose by load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from xxhash import xxh3_64_intdigest

from pinyon.routing.cache_aware import CacheAware, CacheAwareSettings
from pinyon.routing.routing_keys import KEY_BYTES
from pinyon.routing.target import Target


@dataclass(frozen=True, slots=True)
class LabCacheAwareSettings(CacheAwareSettings):
    """The settings of ``cache_aware`` with the option to follow SGLang to the letter.

    With ``first``, an arbitrary one of several equally good matches gets the request, whatever its load; else the least
    full. In SGLang it is the first of a node's tenants in a hash map."""

    first: bool = False


class LabCacheAware(CacheAware):
    """A cache-aware router that can choose as SGLang does, see :class:`LabCacheAwareSettings`."""

    settings_type: ClassVar[type[LabCacheAwareSettings]] = LabCacheAwareSettings

    def __init__(self, settings: LabCacheAwareSettings) -> None:
        super().__init__(settings)
        self._first = settings.first

    def _of_equal(self, prefix: bytes, matching: Sequence[Target]) -> Target:
        if not self._first:
            return super()._of_equal(prefix, matching)
        key = prefix[-KEY_BYTES:]  # pseudo-random, but the same target each time for prompts that match up to this key
        return min(matching, key=lambda target: (xxh3_64_intdigest(key + target.name.encode()), target.name))
