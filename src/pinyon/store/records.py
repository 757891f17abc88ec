"""Nodes, lives and replicas as values, and parsed from Redis: it is shared, so its content is outside data. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import NamedTuple

from pinyon.core.errors import InvalidArgument

MAX_OBJECT_BYTES = 1 << 40

_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_BOOT_ID = re.compile(r"[0-9a-f]{32}")
_ADDRESS = re.compile(r"\S{1,255}:\d{1,5}")


class Life(NamedTuple):
    """One life of a node's process."""

    node_id: str
    boot_id: str

    def __str__(self) -> str:
        return f"{self.node_id}/{self.boot_id}"


@dataclass(frozen=True)
class NodeRecord:
    """A live store node. ``address`` is its gRPC ``host:port``."""

    node_id: str
    boot_id: str
    address: str
    capacity_bytes: int = 0

    def __post_init__(self) -> None:
        if not _NODE_ID.fullmatch(self.node_id):
            raise InvalidArgument(f"not a node id: {self.node_id!r} ({_NODE_ID.pattern})", field="node_id")
        if not _BOOT_ID.fullmatch(self.boot_id):
            raise InvalidArgument("a boot id is 32 hex digits", field="boot_id")
        if not _ADDRESS.fullmatch(self.address):
            raise InvalidArgument(f"{self.address!r} is not host:port", field="address")
        if not 0 <= self.capacity_bytes < 1 << 63:
            raise InvalidArgument("no such capacity", field="capacity_bytes")

    @property
    def life(self) -> Life:
        return Life(self.node_id, self.boot_id)


class Replica(NamedTuple):
    """A copy of a block: its node, and its size in bytes."""

    node: NodeRecord
    size_bytes: int


def parse_life(raw: bytes) -> Life | None:
    """Parses ``<node>/<boot>``. Returns None for anything else."""
    try:
        node_id, _, boot_id = raw.decode("ascii").partition("/")
    except UnicodeDecodeError:
        return None
    return Life(node_id, boot_id) if _NODE_ID.fullmatch(node_id) and _BOOT_ID.fullmatch(boot_id) else None


def parse_node(node_id: str, raw: bytes) -> NodeRecord | None:
    """Parses the record stored for ``node_id``. Returns None if it is not one."""
    try:
        value = json.loads(raw)
        boot_id, address, capacity = value["boot"], value["address"], value["capacity_bytes"]
        if type(boot_id) is str and type(address) is str and type(capacity) is int:
            return NodeRecord(node_id, boot_id, address, capacity)
    except (ValueError, TypeError, KeyError, RecursionError, InvalidArgument):
        pass
    return None


def parse_replica(field: bytes, value: bytes) -> tuple[Life, int] | None:
    """Parses one field of a block's hash as ``(life, size in bytes)``. Returns None if it is not one."""
    life = parse_life(field)
    if life is None or not value.isdigit() or len(value) > 16:
        return None
    size = int(value)
    return (life, size) if 0 < size <= MAX_OBJECT_BYTES else None
