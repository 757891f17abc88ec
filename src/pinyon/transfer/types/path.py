"""The paths that bytes take between two hosts. Pure values."""

from __future__ import annotations

from typing import NamedTuple


class Path(NamedTuple):
    """A transport with a NIC at each end; NIC names are empty for ``local``, ``shm`` and unknown NICs."""

    transport: str
    """``"local"``, ``"shm"``, ``"rdma"`` or ``"tcp"``."""
    local_nic: str
    remote_nic: str


Tiers = tuple[tuple[Path, ...], ...]
"""Tiers of paths, best first: none empty, each of one transport, a transport's tiers in a row, no path twice."""
