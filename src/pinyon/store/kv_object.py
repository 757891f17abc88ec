"""The values a store node's object table is made of. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from pinyon.eviction.interface import NO_TRAITS, Traits


class SlotState(Enum):
    """The outcome for one key in ``put_start``."""

    RESERVED = "reserved"
    EXISTS = "exists"
    """The object is readable here: nothing to write."""
    BEING_PUT = "being_put"
    """Another put has reserved the key: nothing to write, and it is stored only if that put ends well."""
    NO_SPACE = "no_space"
    """The node has no room, because everything is being read or written."""


class PutSlot(NamedTuple):
    state: SlotState
    offset: int = 0
    """The reserved room, in bytes from the start of the pool."""


@dataclass(slots=True, eq=False)
class KvObject:
    """An object's room. ``readers`` counts its leases; while it is ``listed``, its key leads to it."""

    key: bytes
    offset: int
    size: int
    readers: int = 0
    listed: bool = True
    traits: Traits = NO_TRAITS
    """The traits, for the eviction policy, of the request that it was put for or that used it last."""
    place: int = 0
    """The position in the prompt that it was put for, in blocks."""
    after: bytes | None = None
    """The key before it in that prompt, if the same put named it."""


class Lease(NamedTuple):
    """A lease; ``lease_id`` 0 means that nothing was held. The blocks are ``(index in keys, object)``."""

    lease_id: int
    blocks: list[tuple[int, KvObject]]


@dataclass(slots=True)
class TableCounters:
    """The totals since the start."""

    hits: int = 0
    """The keys that ``acquire`` asked for and leased."""
    misses: int = 0
    """The keys that were asked for and not held (after the first gap, unless gaps were allowed)."""
    stored: int = 0
    stored_bytes: int = 0
    leased_bytes: int = 0
    expired_leases: int = 0
    expired_puts: int = 0
    refused_slots: int = 0
    """The keys for which no room could be made."""
