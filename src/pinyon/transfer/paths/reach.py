"""The paths from memory here to memory there, best first (Mooncake §3.2.3, topology-aware path selection). Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pinyon.transfer.types.limits import TransferLimits
from pinyon.transfer.types.nic import Nic, Path, Tiers, same_network
from pinyon.transfer.types.segment import SegmentDescriptor
from pinyon.transfer.types.topology import Topology

MAX_TIER_PATHS = 64
"""Pairs of NICs that a tier keeps: the first ones. Each NIC is in one, if no end has more NICs than this."""


_NO_NIC = Nic("", "tcp", "", 0)
"""The NIC of a host that published none: it still has a tcp address, and its kernel chooses the interface."""


def _nic_tiers(
    transport: str, ours: list[Nic], ours_preferred: int, theirs: list[Nic], theirs_preferred: int
) -> list[tuple[Path, ...]]:
    """Returns the tiers of a transport; each end has its NICs in order, of which the first so many are preferred."""
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


def _by_preference(
    nics: Iterable[Nic], topology: Topology | None, location: str, transport: str
) -> tuple[list[Nic], int]:
    """Returns the NICs of the transport, preferred ones first, and the number of preferred ones.

    A NIC in neither list is not used, unless the topology says nothing at all about NICs of this transport."""
    named: dict[str, Nic] = {}
    for nic in nics:
        if nic.transport == transport:
            named.setdefault(nic.name, nic)
    if not named:
        return ([_NO_NIC], 1) if transport == "tcp" else ([], 0)
    if topology is not None:
        preferred = [named[name] for name in topology.preferred(location) if name in named]
        secondary = [named[name] for name in topology.secondary(location) if name in named]
        if preferred:
            return preferred + secondary, len(preferred)
        if secondary:
            return secondary, len(secondary)
    return list(named.values()), len(named)


def _same_family(one: Nic, other: Nic) -> bool:
    """Returns whether one address may reach the other: IPv4 does not reach IPv6, an unknown address may."""
    return not one.address or not other.address or (":" in one.address) == (":" in other.address)


@dataclass(frozen=True, slots=True)
class Reach:
    """The abilities of this side, which determine the paths from it."""

    order: tuple[str, ...]
    """Transports that may be used to reach peers, best first."""
    nics: tuple[Nic, ...]
    topology: Topology | None
    boot_id: bytes
    host_id: str
    limits: TransferLimits
    cores: int
    """Number of cores that this process may run on."""

    def tiers(self, remote: SegmentDescriptor, local_location: str, remote_location: str) -> Tiers:
        """Returns the paths between these memory locations, by transports in their order.

        The transport ``local`` needs a peer that is this process, and ``shm`` another one on this host; each is a tier
        of one path. A transport with NICs has up to two tiers: preferred NICs at both ends, then the pairs with a
        secondary NIC at one end or both. Where any two NICs are on one network, pairs on different ones are left out
        ("rails"); where none are, a router is assumed. Inside a tier the i-th NIC here is paired with the i-th there
        first, and successive paths change the NIC here. Where no NICs fit together, tcp still has its one path without
        NICs."""
        own = remote.boot_id == self.boot_id
        tiers: list[tuple[Path, ...]] = []
        for transport in self.order:
            if transport in ("local", "shm"):
                if own if transport == "local" else self._same_host(remote) and not own:
                    tiers.append((Path(transport, "", ""),))
            else:
                ours = _by_preference(self.nics, self.topology, local_location, transport)
                theirs = _by_preference(remote.nics, remote.topology, remote_location, transport)
                tiers += _nic_tiers(transport, *ours, *theirs)
        return tuple(tiers)

    def streams(self, remote: SegmentDescriptor) -> int:
        """Returns the number of NICs that chains to this peer are spread over."""
        if remote.boot_id == self.boot_id or ("shm" in self.order and self._same_host(remote)):
            return 1
        for transport in self.order:
            here = sum(1 for nic in self.nics if nic.transport == transport)
            there = sum(1 for nic in remote.nics if nic.transport == transport)
            if here and there:
                return max(here, there)
        return 1

    def room(self, path: Path, alike: int, remote: SegmentDescriptor) -> int:
        """Returns how many chains may run at a time on a path that has ``alike`` paths (itself included) in its tier.

        With a peer on this host each connection keeps two cores busy, so more connections than half of the cores only
        take turns."""
        if path.transport == "tcp":
            most = self.limits.connections_per_peer
            if remote.host_id == self.host_id:
                most = min(most, max(2, self.cores // 2))
            return max(min(2, most), most // alike)
        return self.limits.queue_pairs_per_path if path.transport == "rdma" else 2

    def _same_host(self, remote: SegmentDescriptor) -> bool:
        return bool(remote.shm) and remote.host_id == self.host_id
