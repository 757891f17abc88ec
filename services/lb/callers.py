"""Who may call the load balancer's gRPC."""

from __future__ import annotations

from pinyon.runtime.callers import ANYBODY, Callers

LB_CALLERS: Callers = {
    # People's programs: the servicer asks for their API keys.
    "Generate": ANYBODY,
    "ListModels": ANYBODY,
    "WhereTo": ANYBODY,
}
