"""Who may call the conductor, where connections have certificates."""

from __future__ import annotations

from pinyon.runtime.callers import Callers
from pinyon.runtime.identity import ADMIN, KVSTORE, LB, WORKER

__all__ = ["CONDUCTOR_CALLERS"]

CONDUCTOR_CALLERS: Callers = {
    # Placements are made in a tenant's name: only load balancers know tenants.
    "Schedule": frozenset((LB,)),
    "ScheduleSession": frozenset((LB,)),
    "Release": frozenset((LB,)),
    # The servicer compares the instance id and the kind that register with those of the certificate.
    "ReportSession": frozenset((WORKER, KVSTORE)),
    "Explain": frozenset((LB, WORKER, ADMIN)),
    "ListInstances": frozenset((LB, WORKER, ADMIN)),
    "LookupBlocks": frozenset((LB, WORKER, ADMIN)),
}
