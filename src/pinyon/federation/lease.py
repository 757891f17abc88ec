"""The lease by which a load balancer serves what it adopted while it hears nothing from the controller.

The controller may be gone, or only the way to it. Both must go well:

- **the controller is gone**, and so is the owner: some load balancer must go on serving, for as long as it takes;
- **the adopter is cut off** from the controller, and the owner is back: the adopter should let go.

So a lease that has run out ends an adoption only if an owner serves. The adopter finds out by itself: it has streams to
the other load balancers. While it reaches no owner, it goes on. An owner that lives serves its own at any time. Two
that serve one cluster share its load, as two load balancers of a region always do: that costs balance, never
correctness.
"""

from __future__ import annotations

from collections.abc import Collection

from pinyon.federation.view import Cluster, Federation


def adopted_now(
    federation: Federation | None, lb_id: str, silent_s: float, lease_s: float, reachable: Collection[str]
) -> tuple[Cluster, ...]:
    """Returns the adopted clusters that the load balancer serves.

    ``silent_s``: seconds since the controller's last message; ``reachable``: ids of load balancers that it reaches by
    itself.
    """
    if federation is None:
        return ()
    adopted = federation.adopted_by(lb_id)
    if silent_s < lease_s:
        return adopted
    return tuple([cluster for cluster in adopted if not any(owner in reachable for owner in cluster.owners)])
