"""Who may call a worker, where connections have certificates."""

from __future__ import annotations

from pinyon.runtime.callers import Callers
from pinyon.runtime.identity import ADMIN, LB, WORKER

__all__ = ["BLOCK_READ_CALLERS", "WORKER_CALLERS"]

WORKER_CALLERS: Callers = {
    # Only a load balancer speaks in a tenant's name.
    "Session": frozenset((LB,)),
    "Generate": frozenset((LB,)),
    # The session compares the hello's instance id with that of the certificate.
    "PrefillSession": frozenset((WORKER,)),
    "GetStatus": frozenset((LB, WORKER, ADMIN)),
}
BLOCK_READ_CALLERS: Callers = {
    "Acquire": frozenset((WORKER,)),
    "Release": frozenset((WORKER,)),
}
