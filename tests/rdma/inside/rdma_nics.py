"""The guest's RDMA devices as a host publishes them."""

from __future__ import annotations

from pinyon.transfer import Nic
from tests.rdma.inside.nics import NICS


def rdma_nic(name: str) -> Nic:
    """Returns the device ``a0``, ``a1``, ``b0`` or ``b1``."""
    return Nic(f"rxe_{name}", "rdma", f"::ffff:{NICS[name]}", 1, f"10.10.{name[1]}.0/24")
