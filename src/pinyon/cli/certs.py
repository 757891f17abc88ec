"""The ``pinyon certs`` command: makes and renews the files that a cluster with TLS needs."""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path
from typing import Any

from pinyon.core.errors import InvalidArgument
from pinyon.core.request import check_geography
from pinyon.runtime.identity import (
    ANY,
    LB,
    ROLES,
    Identity,
    check_region_name,
    cluster_identities,
    hosts_of,
    names_region,
)

_DESCRIPTION = """\
Make an authority and a cluster secret in DIR/ca (if there are none), and for each process a folder DIR/ROLE/INSTANCE
with ca.crt, tls.crt, tls.key and cluster.secret, which its setting --tls-dir names. A certificate is good for one role
and instance id, so nobody registers as another. Existing files are kept while a third of their time is left; --renew
renews everything in DIR. Services load renewed files by themselves, without a restart."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser("certs", help="make certificates for a cluster with TLS", description=_DESCRIPTION)
    add = parser.add_argument
    add("dir", metavar="DIR", type=Path)
    add(
        "processes",
        metavar="ROLE/ID[@REGION]",
        nargs="*",
        help=f"make certificates for this process; roles: {', '.join(ROLES)} (admin is for people); ID {ANY} is "
        "any instance; REGION is the region that a load balancer may claim",
    )
    add(
        "--cluster",
        action="store_true",
        help="make certificates for all processes of a suite on one machine; the options below give their numbers",
    )
    for name, count in (("prefill", 2), ("decode", 2), ("mixed", 0), ("stores", 1), ("lbs", 1)):
        add(f"--{name}", type=int, default=count, metavar="N", help=f"with --cluster: number of them (default {count})")
    add(
        "--host",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names by which clients reach HTTPS and Redis, besides loopback",
    )
    add("--days", type=float, default=90.0, help="how long certificates are good (default 90)")
    add("--renew", action="store_true", help="renew all certificates in DIR")
    add("--owner", default="", metavar="UID:GID", help="give the files to this user and group")
    parser.set_defaults(run=certs)


def certs(arguments: argparse.Namespace) -> int:
    """Makes the certificates that are asked for, and prints what it wrote."""
    # Imported here because it brings cryptography, which other commands do without.
    from pinyon.runtime.certificates import DAYS_MAX, Authority, Wanted, folder_of

    if not 0 < arguments.days <= DAYS_MAX:
        raise InvalidArgument(f"--days must be over 0 and at most {DAYS_MAX}", field="days")
    owner = _owner(arguments.owner)
    wanted = [Wanted(each, hosts_of(each, arguments.host, region)) for each, region in _identities(arguments)]
    now = datetime.datetime.now(datetime.UTC)
    authority = Authority.open(arguments.dir, now)
    there = {each.identity: (each, ends) for each, ends in authority.found()}
    if arguments.renew:
        wanted += [each for identity, (each, _) in there.items() if identity not in {one.identity for one in wanted}]
    for each in wanted:
        known, ends = there.get(each.identity, (None, now))
        fresh = ends - now > datetime.timedelta(days=arguments.days) / 3
        if known is not None and set(each.hosts) <= set(known.hosts) and fresh and not arguments.renew:
            sys.stdout.write(f"{folder_of(arguments.dir, each.identity)}: kept, good until {ends:%Y-%m-%d}\n")
            continue
        if known is not None:  # the process keeps its hosts, and its region unless it gets another one
            moves = any(map(names_region, each.hosts))
            before = [host for host in known.hosts if not (moves and names_region(host))]
            each = Wanted(each.identity, tuple(dict.fromkeys((*each.hosts, *before))))
        folder = authority.issue(each, now, arguments.days, owner)
        until = now + datetime.timedelta(days=arguments.days)
        sys.stdout.write(f"{folder}: {each.identity}, good until {until:%Y-%m-%d %H:%M} UTC\n")
    return 0


def _identities(arguments: argparse.Namespace) -> list[tuple[Identity, str]]:
    """Returns the identities, each with its region or none."""
    found: list[tuple[Identity, str]] = []
    if arguments.cluster:
        counts = (arguments.prefill, arguments.decode, arguments.mixed, arguments.stores, arguments.lbs)
        if not all(0 <= count <= 1024 for count in counts):
            raise InvalidArgument("numbers of processes are 0 to 1024", field="cluster")
        found += [(each, "") for each in cluster_identities(*counts)]
    for each in arguments.processes:
        process, at, region = each.partition("@")
        role, _, instance_id = process.partition("/")
        if not instance_id:
            raise InvalidArgument(f"{each!r} is not ROLE/ID", field="processes")
        if at:
            check_geography(region, "REGION")
            check_region_name(region, "processes")
        if at and role != LB:
            raise InvalidArgument(f"{each!r}: only a load balancer (lb) is of a region", field="processes")
        found.append((Identity(role, "" if instance_id == ANY else instance_id), region))
    if not found and not arguments.renew:
        raise InvalidArgument("say whose certificates: --cluster, ROLE/ID, or --renew for all", field="processes")
    return found


def _owner(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    user, _, group = text.partition(":")
    if not user.isdecimal() or not group.isdecimal():
        raise InvalidArgument(f"--owner {text!r} is not UID:GID", field="owner")
    return int(user), int(group)
