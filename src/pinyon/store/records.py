"""Nodes, lives and replicas as values, and parsed from Redis: it is shared, so its content is outside data. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from enum import Enum
from math import isfinite
from typing import NamedTuple

from pinyon.core.errors import InvalidArgument
from pinyon.core.request import check_geography

MAX_OBJECT_BYTES = 1 << 40
ENTRY_BYTES = 12
"""The bytes of an entry without its tenant."""

_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_BOOT_ID = re.compile(r"[0-9a-f]{32}")
_ADDRESS = re.compile(r"\S{1,255}:\d{1,5}")
_ENTRY = re.compile(rb"([md])([0-9a-f]{11})")


class Tier(Enum):
    """The kind of memory in which a node holds an object."""

    MEMORY = "m"
    DISK = "d"


class Life(NamedTuple):
    """One life of a node's process."""

    node_id: str
    boot_id: str

    def __str__(self) -> str:
        return f"{self.node_id}/{self.boot_id}"


class NodeRoom(NamedTuple):
    """The room that a node had left when it last renewed its record."""

    free_bytes: int | None = None
    """The bytes that a put may take without an eviction; None if unknown."""
    worth: float | None = None
    """The worth of what is evicted next, by the node's policy; None if nothing may go, or the worth is unknown."""
    leaving: bool = False
    """True if the node takes no puts any more, because it is to leave."""


@dataclass(frozen=True)
class NodeRecord:
    """A live store node. ``address`` is its gRPC ``host:port``, and ``zone`` names the place where it is."""

    node_id: str
    boot_id: str
    address: str
    capacity_bytes: int = 0
    zone: str = ""
    room: NodeRoom = field(default=NodeRoom(), compare=False)

    def __post_init__(self) -> None:
        if not _NODE_ID.fullmatch(self.node_id):
            raise InvalidArgument(f"not a node id: {self.node_id!r} ({_NODE_ID.pattern})", field="node_id")
        if not _BOOT_ID.fullmatch(self.boot_id):
            raise InvalidArgument("a boot id is 32 hex digits", field="boot_id")
        if not _ADDRESS.fullmatch(self.address):
            raise InvalidArgument(f"{self.address!r} is not host:port", field="address")
        if not 0 <= self.capacity_bytes < 1 << 63:
            raise InvalidArgument("no such capacity", field="capacity_bytes")
        if self.zone:
            check_geography(self.zone, "zone")

    @property
    def life(self) -> Life:
        return Life(self.node_id, self.boot_id)

    def to_json(self) -> str:
        """Returns the record as it is kept in Redis."""
        value = {"boot": self.boot_id, "address": self.address, "capacity_bytes": self.capacity_bytes}
        return json.dumps({**value, "zone": self.zone, **self.room._asdict()})


class Replica(NamedTuple):
    """A copy of a block: its node, its size in bytes, and where the node has it."""

    node: NodeRecord
    size_bytes: int
    tier: Tier = Tier.MEMORY


def is_node_id(raw: bytes) -> bool:
    """Returns whether these bytes may be a node's id."""
    return raw.isascii() and _NODE_ID.fullmatch(raw.decode()) is not None


def parse_node(node_id: str, raw: bytes) -> NodeRecord | None:
    """Parses the record stored for ``node_id``. Returns None if it is not one."""
    try:
        value = json.loads(raw)
        boot_id, address, capacity = value["boot"], value["address"], value["capacity_bytes"]
        zone, free, worth = value.get("zone", ""), value.get("free_bytes"), value.get("worth")
        leaving = value.get("leaving") is True
        if type(boot_id) is str and type(address) is str and type(capacity) is int and type(zone) is str:
            worth = float(worth) if type(worth) in (int, float) and isfinite(worth) else None
            room = NodeRoom(free if type(free) is int else None, worth, leaving)
            return NodeRecord(node_id, boot_id, address, capacity, zone, room)
    except (ValueError, OverflowError, TypeError, KeyError, AttributeError, RecursionError, InvalidArgument):
        pass
    return None


def entry_of(size_bytes: int, tier: Tier = Tier.MEMORY, tenant: str = "") -> bytes:
    """Returns the entry of a copy of this size. Raises ``ValueError`` for an impossible size."""
    if not 0 < size_bytes <= MAX_OBJECT_BYTES:
        raise ValueError(f"no object has {size_bytes} bytes")
    return f"{tier.value}{size_bytes:011x}{tenant}".encode()


def parse_entry(entry: bytes) -> tuple[int, Tier] | None:
    """Parses the first ``ENTRY_BYTES`` of an entry as size in bytes and tier. Returns None if it is not one."""
    found = _ENTRY.fullmatch(entry)
    if found is None:
        return None
    size = int(found[2], 16)
    return (size, Tier(found[1].decode())) if 0 < size <= MAX_OBJECT_BYTES else None
