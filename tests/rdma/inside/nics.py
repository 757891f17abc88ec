"""The guest's NICs, as ``tests/rdma/nics.sh`` makes them."""

from __future__ import annotations

import subprocess
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "nics.sh"
#: Host (a, b) and rail (0, 1) of each NIC, and its address; its device is ``rxe_`` + its name.
NICS = {"a0": "10.10.0.1", "a1": "10.10.1.1", "b0": "10.10.0.2", "b1": "10.10.1.2"}


def nic(action: str, name: str) -> None:
    """``down`` and ``up`` for the link of a NIC, ``unplug`` and ``plug`` for its device and link."""
    subprocess.run(["sh", SCRIPT, action, name], check=True, timeout=60)


def packets(rail: str) -> int:
    """How many packets were sent on the wire of a rail until now."""
    counters = [Path(f"/sys/class/net/v{host}{rail}/statistics/tx_packets") for host in "ab"]
    return sum(int(counter.read_text(encoding="ascii")) for counter in counters)
