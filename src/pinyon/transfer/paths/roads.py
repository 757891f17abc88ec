"""Which READs go by NIXL. Pure: the one place with the thresholds, and what they come from.

NIXL only READs here (docs/transfer.md says why). Beside ``shm`` it makes the same system call, by way of a library that
makes a request object per transfer and cannot check a seal in that call, so it is behind at every size; beside ``rdma``
nobody has measured it, and that one takes keys back at the NIC; beside ``tcp`` it is ahead as long as what it
saves, the peer's part in a READ, is more than its copy out of the buffer that the bytes arrive in (docs/benchmarks.md,
``./dev bench transfer --only pinyon_nixl pinyon_shm pinyon_tcp``).
"""

from __future__ import annotations

from types import MappingProxyType

from pinyon.transfer.types.path import Path, Tiers

__all__ = ["ANY_BYTES", "MOST_READ_BYTES", "NIXL", "most_read_bytes", "roads"]

MOST_READ_BYTES = MappingProxyType({"local": 0, "shm": 0, "rdma": 0, "tcp": 1 << 20})
"""By the transport that would serve else: the largest chain that is read by NIXL instead."""
ANY_BYTES = 1 << 62
NIXL = Path("nixl", "", "")
"""The one path by it to a peer: its UCX chooses among NICs itself."""


def most_read_bytes(tiers: Tiers, mode: str) -> int:
    """Bytes of the largest READ that goes by NIXL, of all these paths; 0: none does."""
    if mode == "off" or all(tier[0] != NIXL for tier in tiers):
        return 0
    if mode == "prefer":
        return ANY_BYTES
    others = [tier[0].transport for tier in tiers if tier[0] != NIXL]
    return MOST_READ_BYTES.get(others[0], 0) if others else ANY_BYTES


def roads(tiers: Tiers, *, by_nixl: bool) -> Tiers:
    """All paths, NIXL's first; or all others."""
    others = tuple(tier for tier in tiers if tier[0] != NIXL)
    return (*(tier for tier in tiers if tier[0] == NIXL), *others) if by_nixl else others
