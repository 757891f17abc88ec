"""What an engine is told besides its bounds: which transports it uses, and which network it is on. Pure values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pinyon.transfer.types.errors import InvalidTransfer
from pinyon.transfer.types.nic import Nic, check_nic
from pinyon.transfer.types.topology import Topology

TRANSPORTS = ("local", "shm", "rdma", "tcp")
"""All that are used unless said otherwise, fastest first. ``nixl`` is asked for by a setting of its own."""
NIXL_MODES = ("off", "auto", "prefer")
"""``auto``: the READs that are measured to be faster so. ``prefer``: all READs that can be."""
CHECKSUM_MODES = ("on", "off")


@dataclass(frozen=True, slots=True)
class Transports:
    """How peers are reached, and how they may reach us. Raises InvalidTransfer: an unknown transport or none at all, an
    unknown mode."""

    names: Sequence[str] | None = None
    """Which may be used to reach peers, best first, of ``TRANSPORTS``. None: those that work on this host. What is
    named here and does not work is an error."""
    offer_shm: bool = True
    """Whether processes of this host may use shared memory to reach this one, and it them."""
    nixl: str = "off"
    """One of ``NIXL_MODES``; but for "off" peers may read here by it, too. Another transport is needed beside it."""
    nixl_without_authentication: bool = False
    """NIXL opens connections of its own, which know neither the secret nor TLS: with either it is refused unless this
    says that it may."""
    checksum: str = "on"
    """Of tcp payloads: "on" or "off"."""

    def __post_init__(self) -> None:
        names = TRANSPORTS if self.names is None else self.names
        if not names or not set(names) <= set(TRANSPORTS):
            known, given = ", ".join(TRANSPORTS), ", ".join(names)
            raise InvalidTransfer(f"transports are {known}; not {given!r}", field="transports")
        if self.nixl not in NIXL_MODES:
            raise InvalidTransfer(f"nixl is {', '.join(NIXL_MODES)}; not {self.nixl!r}", field="nixl")
        if self.checksum not in CHECKSUM_MODES:
            raise InvalidTransfer(f"checksum is one of {', '.join(CHECKSUM_MODES)}", field="checksum")


@dataclass(frozen=True, slots=True)
class Network:
    """What peers are told of this host's addresses, besides the one that the engine listens on."""

    nics: Sequence[Nic] = ()
    """What large transfers are spread over: tcp NICs are named as the interface and are listened on (port 0 picks a
    free one); rdma NICs are named as the device. Empty: only the engine's own address for tcp, and all active devices
    for rdma."""
    topology: Topology | None = None
    """Which NICs are near to which memory; None means all alike (see ``host.discovery``)."""
    advertise_host: str | None = None
    """What peers connect to, when it is not the address that is listened on (needed for 0.0.0.0). Prefer an address:
    the time a resolver takes for a name is not bounded by our limits."""

    def __post_init__(self) -> None:
        for nic in self.nics:
            check_nic(nic._replace(port=1) if nic.transport == "tcp" and not nic.port else nic)
