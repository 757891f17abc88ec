"""The identity of a process: its role and instance id, as named by its certificate.

A certificate of the cluster names one role, and one instance of it or any::

    worker.pinyon  prefill-0.worker.pinyon      the worker prefill-0
    worker.pinyon  *.worker.pinyon              any worker, for deployments that scale by copies

A client names the peer it means (``grpc.ssl_target_name_override``), so that addresses need not be trusted. It names an
instance if it knows the id, else a role. ``blocks.pinyon`` stands for all that serve ``BlockReadService``: workers and
store nodes. A load balancer's certificate also names the region that it may belong to: ``eu.region.pinyon``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pinyon.core.errors import InvalidArgument, PermissionDenied

ADMIN, CONDUCTOR, CONTROLLER, KVSTORE, LB, REDIS, WORKER = ROLES = (
    *("admin", "conductor", "controller", "kvstore", "lb", "redis", "worker"),
)

ANY = "_any"
"""The word for any instance in place of an instance id; no instance can have this id."""
DOMAIN = "pinyon"
BLOCKS_NAME = f"blocks.{DOMAIN}"
_REGION = f".region.{DOMAIN}"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_NAME = re.compile(rf"(?:(\*|{_LABEL.pattern})\.)?({'|'.join(ROLES)})\.{DOMAIN}")


@dataclass(frozen=True, slots=True)
class Identity:
    """An identity; ``instance_id`` is empty for a certificate of any instance of the role."""

    role: str
    instance_id: str = ""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise InvalidArgument(f"{self.role!r} is no role; roles are {', '.join(ROLES)}", field="role")
        if self.instance_id and not _LABEL.fullmatch(self.instance_id):
            raise InvalidArgument(
                f"{self.instance_id!r} cannot be in a certificate: 1 to 63 of a-z, 0-9 and -, no - at the ends",
                field="instance_id",
            )

    def covers(self, role: str, instance_id: str) -> bool:
        """Returns whether a process with this identity may claim that role and instance id."""
        return role == self.role and self.instance_id in ("", instance_id)

    @property
    def names(self) -> tuple[str, ...]:
        """The certificate's DNS names, the most specific first."""
        names = (peer_name(self.role, self.instance_id or "*"), peer_name(self.role))
        return (*names, BLOCKS_NAME) if self.role in (WORKER, KVSTORE) else names

    def __str__(self) -> str:
        return f"{self.role} {self.instance_id}" if self.instance_id else f"any {self.role}"


def peer_name(role: str, instance_id: str = "") -> str:
    """Returns the DNS name that a peer's certificate must have."""
    return f"{instance_id}.{role}.{DOMAIN}" if instance_id else f"{role}.{DOMAIN}"


def check_region_name(region: str, field: str) -> None:
    """Raises :class:`InvalidArgument` for a region whose name no certificate can carry."""
    if not all(0 < len(part) < 64 for part in region.split(".")):
        raise InvalidArgument(
            f"the region {region!r} cannot be in a certificate: 1 to 63 characters between dots, none at the end",
            field=field,
        )


def region_name(region: str) -> str:
    """Returns the DNS name in the certificates of that region's load balancers."""
    return f"{region}{_REGION}"


def names_region(name: str) -> bool:
    """Returns whether a DNS name is one of :func:`region_name`."""
    return name.endswith(_REGION)


def identity_from_names(names: Iterable[str]) -> Identity | None:
    """Returns the identity in a certificate's DNS names; None if there is none, or more than one."""
    roles: set[str] = set()
    instances: set[str] = set()
    for name in names:
        if match := _NAME.fullmatch(name):
            roles.add(match[2])
            if match[1]:
                instances.add("" if match[1] == "*" else match[1])
    if len(roles) != 1 or len(instances) != 1:
        return None
    return Identity(roles.pop(), instances.pop())


def caller(context: Any) -> Identity | None:
    """Returns the caller's identity by the connection's certificate; None without one (no TLS, or none asked for)."""
    names = context.peer_identities()
    return identity_from_names(name.decode("ascii", "replace") for name in names) if names else None


def check_claim(context: Any, role: str, instance_id: str) -> None:
    """Raises :class:`PermissionDenied` if the caller's certificate names another role or instance than it claims."""
    known = caller(context)
    if known is not None and not known.covers(role, instance_id):
        raise PermissionDenied(f"the certificate is that of {known}, not of {role} {instance_id}", field="instance_id")


def check_region_claim(context: Any, region: str) -> None:
    """Raises :class:`PermissionDenied` if the caller has a certificate that does not name the region it claims."""
    names = context.peer_identities()
    if names and region_name(region).encode() not in names:
        raise PermissionDenied(
            f"the certificate is not one for the region {region}: make it with pinyon certs DIR lb/ID@{region}",
            field="region",
        )


def cluster_identities(
    prefill: int, decode: int, mixed: int, stores: int, lbs: int, prefix: str = ""
) -> Iterator[Identity]:
    """Yields the identities of a local cluster's processes, whose ids begin with ``prefix``.

    The controller, Redis and an admin have the same ids in all clusters that belong together."""
    yield Identity(ADMIN, "admin")
    yield Identity(CONDUCTOR, f"{prefix}conductor")
    yield Identity(CONTROLLER, "controller")
    yield Identity(REDIS, "redis")
    for role, kind, count in (
        *((WORKER, "prefill", prefill), (WORKER, "decode", decode), (WORKER, "mixed", mixed)),
        *((KVSTORE, "kvstore", stores), (LB, "lb", lbs)),
    ):
        for index in range(count):
            yield Identity(role, f"{prefix}{kind}-{index}")


def hosts_of(identity: Identity, hosts: Iterable[str], region: str = "") -> tuple[str, ...]:
    """Returns what a certificate names besides its identity's names.

    For roles that other programs connect to, these are the hosts and loopback; for a load balancer, also its region. A
    worker's is its id, which may be its host on a private network: vLLM serves HTTPS with the same certificate."""
    if identity.role == WORKER and identity.instance_id:
        return (identity.instance_id,)
    if identity.role not in (CONTROLLER, LB, REDIS):
        return ()
    regions = (region_name(region),) if region and identity.role == LB else ()
    return tuple(dict.fromkeys((*regions, *hosts, *_LOOPBACK)))
