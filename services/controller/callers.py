"""Who may call the controller, where connections have certificates."""

from __future__ import annotations

from pinyon.runtime.callers import Callers
from pinyon.runtime.identity import ADMIN, LB

__all__ = ["CONTROLLER_CALLERS"]

CONTROLLER_CALLERS: Callers = {
    # The servicer compares the id that registers with that of the certificate.
    "Session": frozenset((LB,)),
    "ListRegions": frozenset((LB, ADMIN)),
    # Where requests go: without TLS, the servicer lets in only who is on this machine.
    "AddInstance": frozenset((ADMIN,)),
    "RemoveInstance": frozenset((ADMIN,)),
    "ForgetLoadBalancer": frozenset((ADMIN,)),
}
