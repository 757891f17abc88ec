"""The paths from memory here to memory there, best first (Mooncake §3.2.3, topology-aware path selection). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from pinyon.transfer.types.limits import TransferLimits
from pinyon.transfer.types.nic import Nic, same_network
from pinyon.transfer.types.path import Path, Tiers
from pinyon.transfer.types.request import Opcode
from pinyon.transfer.types.segment import SegmentDescriptor
from pinyon.transfer.types.topology import Topology

MAX_TIER_PATHS = 64
"""Pairs of NICs that a tier keeps: the first ones. Each NIC is in one, if no end has more NICs than this."""


class End(NamedTuple):
    """One side of a transfer, as it describes itself."""

    nics: tuple[Nic, ...]
    topology: Topology | None = None
    """The side's topology; ``None`` if all NICs are equally near."""
    location: str = "cpu:0"
    """The location of the memory."""


MAX_LOCATION_PAIRS = 256
_MAX_REGIONS = 4096
"""Regions of a peer for which the transports that do not reach them are remembered."""
# NIXL only READs here (docs/design/transfer.md says why). Beside ``shm`` it is slower at every size: it makes the same
# system call, by way of a library that makes a request object per transfer and cannot check a seal in that call. Beside
# ``rdma`` nobody has measured it, and rdma takes keys back at the NIC. Beside ``tcp`` it is faster as long as it saves
# more (the peer's part in a READ) than its copy out of the arrival buffer costs
# (docs/notebook/transfer.md, ``./dev bench transfer --only pinyon_nixl pinyon_shm pinyon_tcp``).
MOST_READ_BYTES = MappingProxyType({"local": 0, "shm": 0, "rdma": 0, "tcp": 1 << 20})
"""Bytes of the largest chain that is read by NIXL instead, by the transport that would serve else."""
ANY_BYTES = 1 << 62
NIXL = Path("nixl", "", "")
"""NIXL's path to a peer, of which there is one: its UCX chooses among NICs itself."""
_NO_NIC = Nic("", "tcp", "", 0)
"""The NIC of a host that published none: it still has a tcp address, and its kernel chooses the interface."""


def candidate_paths(
    local: End, remote: End, transports: Sequence[str], *, same_process: bool = False, shm: bool = False
) -> Tiers:
    """Returns the paths between two memory locations by the given transports, in that order.

    The transport ``local`` needs ``same_process``, and ``shm`` what is named like it; each is a tier of one path. A
    transport with NICs has up to two tiers: preferred NICs at both ends, then the pairs with a secondary NIC at one end
    or both. Where any two NICs are on one network, pairs on different ones are left out ("rails"); where none are, a
    router is assumed. Inside a tier the i-th NIC here is paired with the i-th there first, and successive paths change
    the NIC here. Where no NICs fit together, tcp still has its one path without NICs.
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
    """Returns the NICs of the transport, preferred ones first, and the number of preferred ones.

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
    nixl: str = "off"
    """The READs that go by NIXL: one of ``NIXL_MODES``."""

    def candidates(self, remote: SegmentDescriptor, local_location: str, remote_location: str) -> Tiers:
        """Returns the paths between these memory locations, best first."""
        own = remote.boot_id == self.boot_id
        return candidate_paths(
            End(self.nics, self.topology, local_location),
            End(remote.nics, remote.topology, remote_location),
            self.order,
            same_process=own,
            shm=self._same_host(remote) and not own,
        )

    def most_read_bytes(self, remote: SegmentDescriptor, remote_location: str, others: Tiers) -> int:
        """Returns the bytes of the largest READ that goes by NIXL instead of by ``others``; 0 if none does."""
        in_host_memory = not remote_location or remote_location.startswith("cpu:")
        if self.nixl == "off" or not remote.nixl or remote.boot_id == self.boot_id or not in_host_memory:
            return 0
        if self.nixl == "prefer" or not others:
            return ANY_BYTES
        return MOST_READ_BYTES.get(others[0][0].transport, 0)

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
        if path.transport == "nixl":
            return 1  # NIXL has one connection to a peer
        return self.limits.queue_pairs_per_path if path.transport == "rdma" else 2

    def _same_host(self, remote: SegmentDescriptor) -> bool:
        return bool(remote.shm) and remote.host_id == self.host_id


class PeerPaths:
    """The paths to one peer, as far as it has told about itself.

    The caller serialises the calls, except calls of ``is_news`` and ``known_by_nixl``.
    """

    def __init__(self, reach: Reach, remote: SegmentDescriptor) -> None:
        self.remote = remote
        self.beyond: dict[bytes, frozenset[str]] = {}
        """Transports that, as the peer says, cannot reach a region of it, by the region's key."""
        self._reach = reach
        self.has_nixl = reach.nixl != "off"
        """True if some of the paths may be by NIXL."""
        self._known: dict[tuple[str, str], tuple[Tiers, int]] = {}
        """The paths without NIXL's, and the bytes of the largest READ by NIXL, by memory locations."""

    def is_news(self, remote: SegmentDescriptor) -> bool:
        """Returns whether ``remote`` says anything about the peer's addresses that is new."""
        mine = self.remote
        if not remote.nics and not remote.shm:
            return False
        elsewhere = remote.nics != mine.nics or remote.shm != mine.shm or remote.nixl != mine.nixl
        return elsewhere or remote.topology != mine.topology

    def learn(self, remote: SegmentDescriptor) -> None:
        self.remote = remote
        self._known.clear()

    def exclude(self, region: bytes, transport: str) -> None:
        """Notes that this transport does not reach the region."""
        if len(self.beyond) >= _MAX_REGIONS:
            self.beyond.clear()
        self.beyond[region] = self.beyond.get(region, frozenset()) | {transport}

    def by_nixl(self, local_location: str, remote_location: str, opcode: Opcode, nbytes: int) -> bool:
        """Returns whether NIXL is the better way for this transfer between these memory locations."""
        return opcode is Opcode.READ and nbytes <= self._between(local_location, remote_location)[1]

    def known_by_nixl(self, local_location: str, remote_location: str, opcode: Opcode, nbytes: int) -> bool:
        """Answers like :meth:`by_nixl`, as far as is known; any number of threads may ask at once."""
        known = self._known.get((local_location, remote_location))
        return known is not None and opcode is Opcode.READ and nbytes <= known[1]

    def tiers(
        self, local_location: str, remote_location: str, regions: Iterable[bytes] = (), *, by_nixl: bool = False
    ) -> Tiers:
        """Returns the paths that reach all of these regions; with ``by_nixl`` NIXL's comes first."""
        tiers, _ = self._between(local_location, remote_location)
        if by_nixl:
            tiers = ((NIXL,), *tiers)
        if self.beyond:
            useless = {name for region in regions for name in self.beyond.get(region, ())}
            tiers = tuple(tier for tier in tiers if tier[0].transport not in useless)
        return tiers

    def _between(self, local_location: str, remote_location: str) -> tuple[Tiers, int]:
        where = local_location, remote_location
        known = self._known.get(where)
        if known is None:
            if len(self._known) >= MAX_LOCATION_PAIRS:
                self._known.clear()
            tiers = self._reach.candidates(self.remote, *where)
            known = self._known[where] = tiers, self._reach.most_read_bytes(self.remote, remote_location, tiers)
        return known
