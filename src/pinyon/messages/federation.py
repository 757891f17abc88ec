"""What load balancers and the regional controller tell each other."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeVar

from pinyon.api.controller.v1 import controller_pb2
from pinyon.core.address import parse_address
from pinyon.core.errors import InvalidArgument
from pinyon.core.request import check_geography
from pinyon.federation.changes import CHANGES_MAX
from pinyon.federation.members import InstanceLoad, LbInfo, LbLoad, LbState, OwnedCluster
from pinyon.federation.position import Position
from pinyon.federation.registry import MEMBERS_MAX
from pinyon.federation.registry import UPSTREAMS_MAX as ALL_UPSTREAMS_MAX
from pinyon.federation.view import Cluster, Federation, Member, Region
from pinyon.federation.watched import DISPLACED_MAX
from pinyon.messages.checks import ADDRESS_CHARS_MAX, check_id, check_text

URL_CHARS_MAX = 512
CLUSTERS_MAX = 16
UPSTREAMS_MAX = 256
"""That one load balancer names for a cluster; a cluster of several has more, and people add to it."""
INSTANCES_MAX = 256
REGIONS_MAX = 64
LATENCIES_MAX = 256
LATENCY_MS_MAX = 3.6e6
T = TypeVar("T", bound=Collection[Any])
_URL = re.compile(r"https?://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?(?:/[A-Za-z0-9._~%/-]*)?")

_STATES = {
    LbState.LIVE: controller_pb2.LB_STATE_LIVE,
    LbState.DRAINING: controller_pb2.LB_STATE_DRAINING,
    LbState.FAILED: controller_pb2.LB_STATE_FAILED,
    LbState.LEFT: controller_pb2.LB_STATE_LEFT,
}
_STATES_BACK = {number: state for state, number in _STATES.items()}

_COUNTS = (
    *("queue", "in_flight", "available_instances", "instances"),
    *("forwarded_total", "accepted_total", "hit_chunks_total", "asked_chunks_total"),
)
"""Of a report: the same in message and value."""
_counts: Callable[[Any], tuple[int, ...]] = attrgetter(*_COUNTS)


def check_region(name: str, field: str) -> str:
    """A name that requests can allow or forbid."""
    return check_geography(name, field)


def check_url(url: str, field: str) -> str:
    """The base of URLs, without a query, and without a password, which would be on logs."""
    match = _URL.fullmatch(check_text(url, field, URL_CHARS_MAX))
    if match is None or int(match[1] or 0) > 65535:
        raise InvalidArgument("must be http://HOST or https://HOST, with port and path if need be", field=field)
    return url


def check_instance(name: str, field: str) -> str:
    """An instance's id, or an upstream's base URL."""
    return check_url(name, field) if "://" in name else check_id(name, field)


def _address(address: str, field: str) -> str:
    try:
        parse_address(check_text(address, field, ADDRESS_CHARS_MAX))
    except InvalidArgument as error:
        raise InvalidArgument(error.message, field=field) from None
    return address


def _position_to_proto(position: Position | None) -> controller_pb2.Position | None:
    if position is None:
        return None
    return controller_pb2.Position(latitude=position.latitude, longitude=position.longitude)


def _position_of(message: controller_pb2.LoadBalancerInfo | controller_pb2.Region) -> Position | None:
    if not message.HasField("position"):
        return None
    return Position(message.position.latitude, message.position.longitude)


def lb_info_to_proto(info: LbInfo) -> controller_pb2.LoadBalancerInfo:
    return controller_pb2.LoadBalancerInfo(
        lb_id=info.lb_id,
        boot_id=info.boot_id,
        region=info.region,
        grpc_address=info.grpc_address,
        http_url=info.http_url,
        clusters=[
            controller_pb2.OwnedCluster(name=each.name, conductor=each.conductor, upstream_urls=each.upstreams)
            for each in info.clusters
        ],
        position=_position_to_proto(info.position),
    )


def lb_info_from_proto(message: controller_pb2.LoadBalancerInfo, field: str = "registration") -> LbInfo:
    """A registration. Raises :class:`InvalidArgument`."""
    region = check_region(message.region, f"{field}.region")
    owned = _few(message.clusters, CLUSTERS_MAX, f"{field}.clusters")
    clusters = tuple([_cluster(each, region, f"{field}.clusters") for each in owned])
    if len({each.name for each in clusters}) < len(clusters):
        raise InvalidArgument("must be different ones", field=f"{field}.clusters.name")
    return LbInfo(
        lb_id=check_id(message.lb_id, f"{field}.lb_id"),
        boot_id=check_id(message.boot_id, f"{field}.boot_id"),
        region=region,
        grpc_address=_address(message.grpc_address, f"{field}.grpc_address"),
        http_url=check_url(message.http_url, f"{field}.http_url") if message.http_url else "",
        clusters=clusters,
        position=_position_of(message),
    )


def _cluster(message: controller_pb2.OwnedCluster, region: str, field: str) -> OwnedCluster:
    if bool(message.conductor) == bool(message.upstream_urls):
        raise InvalidArgument("must have either a conductor or upstreams", field=field)
    return OwnedCluster(
        name=check_region(message.name or region, f"{field}.name"),
        conductor=_address(message.conductor, f"{field}.conductor") if message.conductor else "",
        upstreams=_urls(message.upstream_urls, f"{field}.upstream_urls"),
    )


def _urls(urls: Sequence[str], field: str, most: int = UPSTREAMS_MAX) -> tuple[str, ...]:
    return tuple(dict.fromkeys([check_url(url, field) for url in _few(urls, most, field)]))


def _few(items: T, most: int, field: str) -> T:
    if len(items) > most:
        raise InvalidArgument(f"must be at most {most}", field=field)
    return items


def lb_load_to_proto(load: LbLoad) -> controller_pb2.LoadBalancerLoad:
    """Of more instances and regions than a report may have, the first ones."""
    return controller_pb2.LoadBalancerLoad(
        **dict(zip(_COUNTS, _counts(load), strict=True)),
        forwarded_by_region=dict(list(load.forwarded_by_region.items())[:REGIONS_MAX]),
        accepted_by_region=dict(list(load.accepted_by_region.items())[:REGIONS_MAX]),
        per_instance=[
            controller_pb2.InstanceLoad(
                name=each.name,
                pending=each.pending,
                running=each.running,
                outstanding=each.outstanding,
                available=each.available,
            )
            for each in load.per_instance[:INSTANCES_MAX]
        ],
    )


def lb_load_from_proto(message: controller_pb2.LoadBalancerLoad) -> LbLoad:
    """A report. Raises :class:`InvalidArgument`."""
    return LbLoad(
        **dict(zip(_COUNTS, _counts(message), strict=True)),
        forwarded_by_region=_by_region(message.forwarded_by_region, "load.forwarded_by_region"),
        accepted_by_region=_by_region(message.accepted_by_region, "load.accepted_by_region"),
        per_instance=tuple(
            [
                InstanceLoad(
                    check_text(each.name, "load.per_instance.name", URL_CHARS_MAX),
                    each.pending,
                    each.running,
                    each.outstanding,
                    each.available,
                )
                for each in _few(message.per_instance, INSTANCES_MAX, "load.per_instance")
            ]
        ),
    )


def _by_region(counts: Mapping[str, int], field: str) -> dict[str, int]:
    return {check_region(name, field): count for name, count in _few(counts, REGIONS_MAX, field).items()}


def latencies_from_proto(latencies_ms: Mapping[str, float]) -> dict[str, float]:
    """Round trips by load balancer id. Raises :class:`InvalidArgument`."""
    for lb_id, latency_ms in _few(latencies_ms, LATENCIES_MAX, "latencies_ms").items():
        check_id(lb_id, "latencies_ms")
        if not math.isfinite(latency_ms) or not 0 <= latency_ms <= LATENCY_MS_MAX:
            raise InvalidArgument(f"must be from 0 to {LATENCY_MS_MAX:g}", field="latencies_ms")
    return dict(latencies_ms)


def federation_to_proto(federation: Federation) -> controller_pb2.Federation:
    return controller_pb2.Federation(
        epoch=federation.epoch,
        version=federation.version,
        regions=[
            controller_pb2.Region(name=each.name, tags=each.tags, position=_position_to_proto(each.position))
            for each in federation.regions
        ],
        load_balancers=[
            controller_pb2.LoadBalancer(
                info=lb_info_to_proto(each.info),
                state=_STATES[each.state],
                connected=each.connected,
                displaced_boot_ids=each.displaced,
            )
            for each in federation.members
        ],
        clusters=[
            controller_pb2.Cluster(
                region=each.region,
                name=each.name,
                conductor=each.conductor,
                upstream_urls=each.upstreams,
                removed_instances=each.removed,
                added_instances=each.added,
                owner_ids=each.owners,
                adopter_id=each.adopter,
            )
            for each in federation.clusters
        ],
    )


def federation_from_proto(message: controller_pb2.Federation) -> Federation:
    """Raises :class:`InvalidArgument` for what no controller of this kind would say."""
    members = []
    for each in _few(message.load_balancers, MEMBERS_MAX, "load_balancers"):
        state = _STATES_BACK.get(each.state)
        if state is None:
            raise InvalidArgument("must be given", field="load_balancers.state")
        boots = _few(each.displaced_boot_ids, DISPLACED_MAX, "load_balancers.displaced_boot_ids")
        displaced = tuple([check_id(boot, "load_balancers.displaced_boot_ids") for boot in boots])
        members.append(Member(lb_info_from_proto(each.info, "load_balancers.info"), state, each.connected, displaced))
    clusters = _few(message.clusters, MEMBERS_MAX * CLUSTERS_MAX, "clusters")
    return Federation(
        epoch=check_text(message.epoch, "epoch"),
        version=message.version,
        regions=tuple([_region(each) for each in _few(message.regions, MEMBERS_MAX, "regions")]),
        members=tuple(members),
        clusters=tuple([_told_cluster(each) for each in clusters]),
    )


def _region(message: controller_pb2.Region) -> Region:
    return Region(check_region(message.name, "regions.name"), tuple(message.tags), _position_of(message))


def _instances(names: Sequence[str], field: str) -> tuple[str, ...]:
    return tuple([check_instance(each, field) for each in _few(names, CHANGES_MAX, field)])


def _told_cluster(message: controller_pb2.Cluster) -> Cluster:
    owners = _few(message.owner_ids, MEMBERS_MAX, "clusters.owner_ids")
    return Cluster(
        region=check_region(message.region, "clusters.region"),
        name=check_region(message.name, "clusters.name"),
        conductor=_address(message.conductor, "clusters.conductor") if message.conductor else "",
        upstreams=_urls(message.upstream_urls, "clusters.upstream_urls", ALL_UPSTREAMS_MAX),
        removed=_instances(message.removed_instances, "clusters.removed_instances"),
        added=_instances(message.added_instances, "clusters.added_instances"),
        owners=tuple([check_id(each, "clusters.owner_ids") for each in owners]),
        adopter=check_text(message.adopter_id, "clusters.adopter_id"),
    )
