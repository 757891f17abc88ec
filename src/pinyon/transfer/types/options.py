"""The settings of an engine besides its bounds: its transports and the network it is on. Pure values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pinyon.transfer.types.errors import InvalidTransfer
from pinyon.transfer.types.nic import Nic, check_nic
from pinyon.transfer.types.topology import Topology

TRANSPORTS = ("local", "shm", "rdma", "tcp")
"""The transports used unless set otherwise, fastest first."""
CHECKSUM_MODES = ("on", "off")


@dataclass(frozen=True, slots=True)
class Transports:
    """The transports by which this process reaches peers, and by which they may reach it.

    Raises InvalidTransfer for an unknown transport, none at all, or an unknown mode."""

    names: Sequence[str] | None = None
    """Transports that may be used to reach peers, best first; None means all of ``TRANSPORTS`` that work on this host.

    To name one that does not work is an error."""
    offer_shm: bool = True
    """True if processes of this host may use shared memory to reach this one, and it them."""
    checksum: str = "on"
    """The checksums of tcp payloads: "on" or "off"."""

    def __post_init__(self) -> None:
        names = TRANSPORTS if self.names is None else self.names
        if not names or not set(names) <= set(TRANSPORTS):
            known, given = ", ".join(TRANSPORTS), ", ".join(names)
            raise InvalidTransfer(f"transports are {known}; not {given!r}", field="transports")
        if self.checksum not in CHECKSUM_MODES:
            raise InvalidTransfer(f"checksum is one of {', '.join(CHECKSUM_MODES)}", field="checksum")


@dataclass(frozen=True, slots=True)
class Network:
    """The addresses of this host that peers are told, besides the one that the engine listens on."""

    nics: Sequence[Nic] = ()
    """NICs over which large transfers are spread.

    A tcp NIC is named as its interface and listened on (port 0 picks a free one); an rdma NIC is named as the device.
    If empty, tcp uses only the engine's own address, and rdma all active devices."""
    topology: Topology | None = None
    """The NICs near to each memory location; None means all alike (see ``host.discovery``)."""
    advertise_host: str | None = None
    """The host that peers connect to, if it is not the address listened on (needed for 0.0.0.0).

    An address is better than a name: our limits do not bound the time that a resolver takes."""

    def __post_init__(self) -> None:
        for nic in self.nics:
            check_nic(nic._replace(port=1) if nic.transport == "tcp" and not nic.port else nic)
