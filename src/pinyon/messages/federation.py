"""Messages between load balancers and the regional controller."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from pinyon.api.controller.v1 import controller_pb2
from pinyon.core.errors import InvalidArgument
from pinyon.core.request import check_geography
from pinyon.federation.clusters import CHANGES_MAX
from pinyon.federation.distances import Position
from pinyon.federation.registry import LATENCIES_MAX, MEMBERS_MAX
from pinyon.federation.registry import UPSTREAMS_MAX as ALL_UPSTREAMS_MAX
from pinyon.federation.view import Cluster, Federation, LbInfo, LbState, Member, OwnedCluster, RegionView
from pinyon.federation.watched import DISPLACED_MAX
from pinyon.messages.checks import check_address, check_id, check_text
from pinyon.messages.enums import numbered

URL_CHARS_MAX = 512
CLUSTERS_MAX = 16
UPSTREAMS_MAX = 256
"""The maximum number of servers that one load balancer names for a cluster.

A cluster of several load balancers has more, and operators can add servers."""
INSTANCES_MAX = 256
REGIONS_MAX = 64
LATENCY_MS_MAX = 3.6e6
T = TypeVar("T", bound=Collection[Any])
_Check = Callable[[Any, str], Any]
"""A function that returns a field's value in its final form; raises :class:`InvalidArgument` naming the field."""
_URL = re.compile(r"https?://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?(?:/[A-Za-z0-9._~%/-]*)?")

_STATE_NUMBERS, _STATES = numbered(LbState, controller_pb2, "LB_STATE")


def check_url(url: str, field: str) -> str:
    """Returns a base URL without query and without a password, which would appear in logs."""
    match = _URL.fullmatch(check_text(url, field, URL_CHARS_MAX))
    if match is None or int(match[1] or 0) > 65535:
        raise InvalidArgument("must be http://HOST or https://HOST, with port and path if need be", field=field)
    return url


def check_instance(name: str, field: str) -> str:
    """Returns an instance's id, or the base URL of an upstream."""
    return check_url(name, field) if "://" in name else check_id(name, field)


def _few(items: T, most: int, field: str) -> T:
    if len(items) > most:
        raise InvalidArgument(f"must be at most {most}", field=field)
    return items


def _or_none(check: _Check) -> _Check:
    """Returns a check that also accepts an empty text."""
    return lambda text, field: check(text, field) if text else ""


def _all(check: _Check, most: int) -> _Check:
    """Returns a check of each of at most ``most`` items."""
    return lambda items, field: tuple([check(each, field) for each in _few(items, most, field)])


def _urls(most: int) -> _Check:
    """Returns a check of a list of URLs that drops duplicates."""
    return lambda urls, field: tuple(dict.fromkeys(_all(check_url, most)(urls, field)))


_Fields = Sequence[tuple[str, str, _Check]]
"""The attribute of a value, the field of the message and its check, for each field."""

_LB: _Fields = (
    ("lb_id", "lb_id", check_id),
    ("boot_id", "boot_id", check_id),
    ("region", "region", check_geography),
    ("grpc_address", "grpc_address", check_address),
    ("http_url", "http_url", _or_none(check_url)),
)
_OWNED: _Fields = (
    ("name", "name", check_geography),
    ("conductor", "conductor", _or_none(check_address)),
    ("upstreams", "upstream_urls", _urls(UPSTREAMS_MAX)),
)
_CLUSTER: _Fields = (
    ("region", "region", check_geography),
    ("name", "name", check_geography),
    ("conductor", "conductor", _or_none(check_address)),
    ("upstreams", "upstream_urls", _urls(ALL_UPSTREAMS_MAX)),
    ("removed", "removed_instances", _all(check_instance, CHANGES_MAX)),
    ("added", "added_instances", _all(check_instance, CHANGES_MAX)),
    ("owners", "owner_ids", _all(check_id, MEMBERS_MAX)),
    ("adopter", "adopter_id", check_text),
)
_REGION: _Fields = (("name", "name", check_geography), ("tags", "tags", lambda tags, _: tuple(tags)))
_MEMBER: _Fields = (
    ("connected", "connected", lambda connected, _: connected),
    ("displaced", "displaced_boot_ids", _all(check_id, DISPLACED_MAX)),
)


def _to_proto(value: object, fields: _Fields) -> dict[str, Any]:
    return {field: getattr(value, attribute) for attribute, field, _ in fields}


def _from_proto(message: object, fields: _Fields, at: str) -> dict[str, Any]:
    return {attribute: check(getattr(message, field), f"{at}.{field}") for attribute, field, check in fields}


def _position_of(message: controller_pb2.LoadBalancerInfo | controller_pb2.Region) -> Position | None:
    if not message.HasField("position"):
        return None
    return Position(message.position.latitude, message.position.longitude)


def lb_info_to_proto(info: LbInfo) -> controller_pb2.LoadBalancerInfo:
    return controller_pb2.LoadBalancerInfo(
        **_to_proto(info, _LB),
        clusters=[controller_pb2.OwnedCluster(**_to_proto(each, _OWNED)) for each in info.clusters],
        position=asdict(info.position) if info.position else None,
    )


def lb_info_from_proto(message: controller_pb2.LoadBalancerInfo, field: str = "registration") -> LbInfo:
    """Returns a checked registration. Raises :class:`InvalidArgument`."""
    said = _from_proto(message, _LB, field)
    owned = _few(message.clusters, CLUSTERS_MAX, f"{field}.clusters")
    clusters = tuple([_owned(each, message.region, f"{field}.clusters") for each in owned])
    if len({each.name for each in clusters}) < len(clusters):
        raise InvalidArgument("must be different ones", field=f"{field}.clusters.name")
    return LbInfo(**said, clusters=clusters, position=_position_of(message))


def _owned(message: controller_pb2.OwnedCluster, region: str, field: str) -> OwnedCluster:
    """Returns a load balancer's own cluster, which has the name of the region if it has no other."""
    if bool(message.conductor) == bool(message.upstream_urls):
        raise InvalidArgument("must have either a conductor or upstreams", field=field)
    named = message.name or region
    return OwnedCluster(**_from_proto(message, _OWNED[1:], field), name=check_geography(named, f"{field}.name"))


def check_load(load: controller_pb2.LoadBalancerLoad) -> controller_pb2.LoadBalancerLoad:
    """Returns a load report that is within its limits. Raises :class:`InvalidArgument` for another one."""
    for each in _few(load.per_instance, INSTANCES_MAX, "load.per_instance"):
        check_text(each.name, "load.per_instance.name", URL_CHARS_MAX)
    for field in ("forwarded_by_region", "accepted_by_region"):
        for name in _few(getattr(load, field), REGIONS_MAX, f"load.{field}"):
            check_geography(name, f"load.{field}")
    load.DiscardUnknownFields()  # it is kept and passed on as it is
    return load


def latencies_from_proto(latencies_ms: Mapping[str, float]) -> dict[str, float]:
    """Returns round trips in ms by load balancer id. Raises :class:`InvalidArgument`."""
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
            controller_pb2.Region(**_to_proto(each, _REGION), position=asdict(each.position) if each.position else None)
            for each in federation.regions
        ],
        load_balancers=[
            controller_pb2.LoadBalancer(
                info=lb_info_to_proto(each.info), state=_STATE_NUMBERS[each.state], **_to_proto(each, _MEMBER)
            )
            for each in federation.members
        ],
        clusters=[controller_pb2.Cluster(**_to_proto(each, _CLUSTER)) for each in federation.clusters],
    )


def federation_from_proto(message: controller_pb2.Federation) -> Federation:
    """Returns the checked federation. Raises :class:`InvalidArgument` for what no controller would send."""
    regions = _few(message.regions, MEMBERS_MAX, "regions")
    members = _few(message.load_balancers, MEMBERS_MAX, "load_balancers")
    clusters = _few(message.clusters, MEMBERS_MAX * CLUSTERS_MAX, "clusters")
    return Federation(
        epoch=check_text(message.epoch, "epoch"),
        version=message.version,
        regions=tuple(
            [RegionView(**_from_proto(each, _REGION, "regions"), position=_position_of(each)) for each in regions]
        ),
        members=tuple([_member(each, "load_balancers") for each in members]),
        clusters=tuple([Cluster(**_from_proto(each, _CLUSTER, "clusters")) for each in clusters]),
    )


def _member(message: controller_pb2.LoadBalancer, field: str) -> Member:
    state = _STATES.get(message.state)
    if state is None:
        raise InvalidArgument("must be given", field=f"{field}.state")
    info = lb_info_from_proto(message.info, f"{field}.info")
    return Member(info=info, state=state, **_from_proto(message, _MEMBER, field))
