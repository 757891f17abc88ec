"""The values a store node's object table is made of. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from pinyon.core.errors import InvalidArgument
from pinyon.eviction.interface import NO_TRAITS, Traits

CHECKSUM_BYTES = 8
PARTS_MAX = 1024
"""The largest number of parts of an object."""


class SlotState(Enum):
    """The outcome for one key in ``put_start``."""

    RESERVED = "reserved"
    EXISTS = "exists"
    """The object is readable here: nothing to write."""
    BEING_PUT = "being_put"
    """Another put has reserved the key: nothing to write, and it is stored only if that put ends well."""
    NO_SPACE = "no_space"
    """The node has no room: everything is pinned, being read or written, or the tenant's quota is full."""


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
    demoting: bool = False
    """True if the policy has evicted it, and it stays until it is on the disk. Whoever uses it rescues it."""
    tenant: str = ""
    """The tenant that it was put for, whose quota counts it."""
    checksums: bytes = b""
    """The packed checksums of its parts; see :mod:`pinyon.store.checksums`."""
    used_s: float = 0.0
    """The time at which it was stored or last used."""


def give_checksums(objects: Sequence[KvObject], packed: bytes, parts: int) -> None:
    """Gives each object its checksums, one for each part. Raises :class:`InvalidArgument` if they do not fit."""
    size = CHECKSUM_BYTES * parts
    if not 0 < parts <= PARTS_MAX or any(each.size % parts for each in objects):
        raise InvalidArgument(f"no object here has {parts} equal parts (1 to {PARTS_MAX})", field="parts")
    if len(packed) != size * len(objects):
        raise InvalidArgument(f"{len(packed)} bytes of checksums for {len(objects)} objects", field="checksums")
    for place, each in enumerate(objects):
        each.checksums = packed[place * size : (place + 1) * size]


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
    over_quota: int = 0
    """The keys that their tenant's quota did not allow."""
    promoted: int = 0
    """The objects that were read from the disk into memory."""
    unsaved: int = 0
    """The objects that were evicted and are not on the disk, although there is one."""
    corrupt: int = 0
    """The objects dropped because their bytes do not match their checksums any more."""
