"""The values a store node's object table is made of. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from pinyon.eviction.policy import NO_TRAITS, Traits


class SlotState(Enum):
    """What became of one key in ``put_start``."""

    RESERVED = "reserved"
    EXISTS = "exists"
    """Readable here: nothing to write."""
    BEING_PUT = "being_put"
    """Another put has reserved it: nothing to write, and not stored unless that put ends well."""
    NO_SPACE = "no_space"
    """Everything is being read or written."""


class PutSlot(NamedTuple):
    state: SlotState
    offset: int = 0
    """Bytes from the start of the pool, if reserved."""


@dataclass(slots=True, eq=False)
class KvObject:
    """One object's room. ``readers`` counts leases; ``listed``: its key leads to it."""

    key: bytes
    offset: int
    size: int
    readers: int = 0
    listed: bool = True
    traits: Traits = NO_TRAITS
    """Of the request that it was put for or that used it last, for the eviction policy."""
    place: int = 0
    """In the prompt it was put for, in blocks."""
    after: bytes | None = None
    """The key before it there, if the same put named it."""


@dataclass(slots=True, eq=False)
class Put:
    """A put that was begun. ``closing``: its writer is being shut out."""

    put_id: int
    objects: list[KvObject]
    deadline_s: float
    closing: bool = False


class Lease(NamedTuple):
    """``lease_id`` 0: nothing was held. ``blocks`` are ``(index in keys, object)``."""

    lease_id: int
    blocks: list[tuple[int, KvObject]]


@dataclass(slots=True)
class TableCounters:
    """Totals since the start."""

    hits: int = 0
    """Keys that were asked for by ``acquire`` and leased."""
    misses: int = 0
    """Keys that were asked for and not held (after the first gap, unless gaps were allowed)."""
    stored: int = 0
    stored_bytes: int = 0
    leased_bytes: int = 0
    expired_leases: int = 0
    expired_puts: int = 0
    refused_slots: int = 0
    """Keys for which no room could be made."""
