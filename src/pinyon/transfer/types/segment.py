"""The descriptors that a process publishes so that peers can address its registered memory. Pure values.

A segment is the registered memory of one process life (``boot_id``); a region is one registered buffer. The region's
key is the capability: whoever holds it may use the region, so descriptors travel on authenticated channels only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from pinyon.transfer.types.errors import InvalidTransfer
from pinyon.transfer.types.nic import Nic, check_nic
from pinyon.transfer.types.topology import Topology

KEY_BYTES = 16
"""Length of a key: 128 random bits cannot be guessed."""
BOOT_ID_BYTES = 16
MAX_LOCATION_CHARS = 64
MAX_HOST_CHARS = 255
MAX_LENGTH = 1 << 62
MAX_REGIONS = 65536
MAX_NICS = 64
MAX_SHM_CHARS = 100

PeerId = tuple[str, int, bytes]
"""One life of one process: ``(host, port, boot_id)``."""


class Range(NamedTuple):
    """A range of a region as a peer names it; offset and length are bytes."""

    key: bytes
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class RegionDescriptor:
    """One registered buffer. ``location`` (``"cpu:0"``, ``"cuda:1"``, …) is the key into the topology matrix."""

    key: bytes
    location: str
    length: int
    """Bytes."""

    def __post_init__(self) -> None:
        if not isinstance(self.key, bytes) or len(self.key) != KEY_BYTES:
            raise InvalidTransfer(f"a region key is {KEY_BYTES} bytes", field="key")
        if not self.location or len(self.location) > MAX_LOCATION_CHARS:
            raise InvalidTransfer(f"a location has 1 to {MAX_LOCATION_CHARS} characters", field="location")
        if not 0 < self.length <= MAX_LENGTH:
            raise InvalidTransfer("a region has at least one byte", field="length")


@dataclass(frozen=True)
class SegmentDescriptor:
    """A process's addresses and regions, and the topology matrix that Mooncake §3.2.3 broadcasts.

    The matrix says which of its NICs are near to which memory location, so that both ends of a path can be chosen well.
    """

    host: str
    """IP address (preferred: resolving a name can block for the resolver's own time) or host name."""
    port: int
    boot_id: bytes
    """Random bytes (16), new at each start: an earlier life's descriptor is refused and hits no new memory."""
    regions: tuple[RegionDescriptor, ...] = ()
    nics: tuple[Nic, ...] = ()
    """Further NICs that reach the process. If empty, it is reached only at ``host`` and ``port`` by tcp."""
    topology: Topology | None = None
    """The NICs near to each memory location; None if all are equally near to all memory."""
    shm: str = ""
    """The Unix socket for peers on the same host; empty if the process is not reachable that way."""
    host_id: str = ""
    """Identity of the host in the sense of ``shm``: peers on it have an equal one. Empty equals none."""

    def __post_init__(self) -> None:
        if not self.host or len(self.host) > MAX_HOST_CHARS:
            raise InvalidTransfer(f"a host has 1 to {MAX_HOST_CHARS} characters", field="host")
        if not 0 < self.port < 65536:
            raise InvalidTransfer(f"no such port: {self.port}", field="port")
        if not isinstance(self.boot_id, bytes) or len(self.boot_id) != BOOT_ID_BYTES:
            raise InvalidTransfer(f"a boot id is {BOOT_ID_BYTES} bytes", field="boot_id")
        if len(self.regions) > MAX_REGIONS:
            raise InvalidTransfer(f"more than {MAX_REGIONS} regions", field="regions")
        if len(self.nics) > MAX_NICS:
            raise InvalidTransfer(f"more than {MAX_NICS} NICs", field="nics")
        _check_nics(self.nics)
        if len(self.shm) > MAX_SHM_CHARS:
            raise InvalidTransfer(f"shm has more than {MAX_SHM_CHARS} characters", field="shm")
        if len(self.host_id) > MAX_SHM_CHARS:
            raise InvalidTransfer(f"a host id has at most {MAX_SHM_CHARS} characters", field="host_id")

    @cached_property
    def peer(self) -> PeerId:
        return (self.host, self.port, self.boot_id)

    def region(self, key: bytes) -> RegionDescriptor | None:
        """Returns the published region with this key, or None."""
        return self._by_key.get(key)

    @cached_property
    def _by_key(self) -> dict[bytes, RegionDescriptor]:
        return {region.key: region for region in self.regions}

    def nic(self, name: str) -> Nic:
        """Returns the published NIC of this name; for any other name (such as "") the primary tcp address."""
        return self._by_name.get(name) or Nic("", "tcp", self.host, self.port)

    @cached_property
    def _by_name(self) -> dict[str, Nic]:
        return {nic.name: nic for nic in self.nics}


@lru_cache(maxsize=256)
def _check_nics(nics: tuple[Nic, ...]) -> None:
    """Raises InvalidTransfer if a NIC is invalid or two have one name.

    Valid NICs are cached: a process names its NICs in every answer, and checking one takes microseconds."""
    for nic in nics:
        check_nic(nic)
    if len({nic.name for nic in nics}) != len(nics):
        raise InvalidTransfer("two NICs have one name", field="nics")
