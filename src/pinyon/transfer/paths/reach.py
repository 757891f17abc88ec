"""The paths from memory here to memory there, best first (Mooncake §3.2.3, topology-aware path selection). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pinyon.transfer.host.nic import Nic, same_network
from pinyon.transfer.host.topology import Topology
from pinyon.transfer.path import Path, Tiers

__all__ = ["MAX_TIER_PATHS", "End", "candidate_paths"]

MAX_TIER_PATHS = 64
"""Of more pairs of NICs the first are kept; every NIC is in one of them as long as no end has more NICs than this."""


class End(NamedTuple):
    """What one side of a transfer says about itself."""

    nics: tuple[Nic, ...]
    topology: Topology | None = None
    """``None``: all NICs are equally near."""
    location: str = "cpu:0"
    """Of the memory."""


_NO_NIC = Nic("", "tcp", "", 0)
"""A host that published no NIC still has a tcp address, and its kernel chooses the interface."""


def candidate_paths(
    local: End, remote: End, transports: Sequence[str], *, same_process: bool = False, shm: bool = False
) -> Tiers:
    """The paths between two memory locations by the given transports, in that order.

    ``local`` needs ``same_process``, ``shm`` needs ``shm``; each is a tier of one path. A transport with NICs has up to
    two tiers: preferred NICs at both ends, then the pairs with a secondary NIC at one end or both. Where any two NICs
    are on one network, pairs on different networks are left out ("rails"); where none are, a router is assumed.
    Inside a tier the i-th NIC here is paired with the i-th there first, and successive paths change the NIC here.
    Where no NICs fit together, tcp still has its one path without NICs.
    """
    tiers: list[tuple[Path, ...]] = []
    for transport in transports:
        if transport == "local":
            tiers += [(Path("local", "", ""),)] * same_process
        elif transport == "shm":
            tiers += [(Path("shm", "", ""),)] * shm
        else:
            tiers += _nic_tiers(local, remote, transport)
    return tuple(tiers)


def _nic_tiers(local: End, remote: End, transport: str) -> list[tuple[Path, ...]]:
    ours, ours_preferred = _by_preference(local, transport)
    theirs, theirs_preferred = _by_preference(remote, transport)
    # Diagonals: (0, 0), (1, 1), ... then (0, 1), (1, 2), ...
    pairs = [
        (here, (here + shift) % len(theirs))
        for shift in range(len(theirs))
        for here in range(len(ours))
        if _same_family(ours[here], theirs[(here + shift) % len(theirs)])
    ]
    if any(same_network(ours[here], theirs[there]) for here, there in pairs):
        pairs = [(here, there) for here, there in pairs if same_network(ours[here], theirs[there]) is not False]
    preferred: list[Path] = []
    secondary: list[Path] = []
    for here, there in pairs:
        tier = preferred if here < ours_preferred and there < theirs_preferred else secondary
        tier.append(Path(transport, ours[here].name, theirs[there].name))
    if not pairs and transport == "tcp":
        preferred.append(Path("tcp", "", ""))
    return [tuple(tier[:MAX_TIER_PATHS]) for tier in (preferred, secondary) if tier]


def _by_preference(end: End, transport: str) -> tuple[list[Nic], int]:
    """NICs of the transport, preferred ones first, and how many those are.

    A NIC in neither list is not used, unless the topology says nothing at all about NICs of this transport.
    """
    nics: dict[str, Nic] = {}
    for nic in end.nics:
        if nic.transport == transport:
            nics.setdefault(nic.name, nic)
    if not nics:
        return ([_NO_NIC], 1) if transport == "tcp" else ([], 0)
    if end.topology is not None:
        preferred = [nics[name] for name in end.topology.preferred(end.location) if name in nics]
        secondary = [nics[name] for name in end.topology.secondary(end.location) if name in nics]
        if preferred:
            return preferred + secondary, len(preferred)
        if secondary:
            return secondary, len(secondary)
    return list(nics.values()), len(nics)


def _same_family(one: Nic, other: Nic) -> bool:
    """IPv4 does not reach IPv6; an unknown address may."""
    return not one.address or not other.address or (":" in one.address) == (":" in other.address)
