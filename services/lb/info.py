"""Who this load balancer is, for the controller."""

from __future__ import annotations

from collections.abc import Mapping

from pinyon.federation.members import LbInfo, OwnedCluster
from pinyon.frontdoor.upstreams.url import parse_upstreams
from services.lb.settings import LbSettings

__all__ = ["lb_info"]


def lb_info(settings: LbSettings, lb_id: str, boot_id: str, endpoints: Mapping[str, str], *, https: bool) -> LbInfo:
    """What the controller is told of who this is; ``endpoints`` are those that it is bound at."""
    urls = tuple([str(url) for url in parse_upstreams(settings.upstream)]) if settings.upstream else ()
    return LbInfo(
        lb_id,
        boot_id,
        settings.region,
        settings.reachable(endpoints.get("admin", endpoints["grpc"])),
        settings.http_url or f"{'https' if https else 'http'}://{settings.reachable(endpoints['http'])}",
        (OwnedCluster(settings.region, settings.conductor, urls),) if settings.conductor or urls else (),
        settings.position_value,
    )
