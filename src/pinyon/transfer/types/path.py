"""One way for bytes between two hosts. Pure values."""

from __future__ import annotations

from typing import NamedTuple


class Path(NamedTuple):
    """One way for bytes between two hosts. NIC names are empty for ``local``, ``shm`` and ``nixl``, and where no NIC is
    known."""

    transport: str
    """``"local"``, ``"shm"``, ``"nixl"``, ``"rdma"`` or ``"tcp"``."""
    local_nic: str
    remote_nic: str


Tiers = tuple[tuple[Path, ...], ...]
"""Best first, none empty, each of one transport, those of a transport in a row, no path twice."""
