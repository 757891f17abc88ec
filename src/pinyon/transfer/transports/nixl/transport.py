"""NIXL: READs of peers' host memory by the library that NVIDIA Dynamo and others move KV with (UCX underneath).

The initiator reads, one-sided, into a buffer of its own, looks at the seal of what it was told, and copies the bytes to
their place. It never WRITEs: NIXL can neither take a key back at once nor end what another process writes, and without
both the bytes of a WRITE that was given up could land in memory that serves something else by then. So another
transport is needed beside it, which takes the WRITEs and the READs that are not better off here
(:mod:`pinyon.transfer.paths.reach`).
"""

from __future__ import annotations

import logging

from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.links.dialer import dial
from pinyon.transfer.links.endpoints import Endpoints
from pinyon.transfer.links.handshake import Service
from pinyon.transfer.transports.nixl.agent import BUFFER_BYTES, NixlAgent, NixlError, nixl_available
from pinyon.transfer.transports.nixl.endpoint import NixlEndpoint
from pinyon.transfer.transports.nixl.process_state import closed_on_exec
from pinyon.transfer.transports.nixl.server import NixlServer
from pinyon.transfer.types.path import Path
from pinyon.transfer.types.segment import SegmentDescriptor

__all__ = ["NixlError", "NixlTransport", "nixl_available"]

_log = logging.getLogger(__name__)
_MOST_TOLD = 64


class NixlTransport(Endpoints[NixlEndpoint]):
    """Initiator side; ``service`` is the other one."""

    name = "nixl"

    def __init__(self, context: EngineContext, *, loopback: bool) -> None:
        """``loopback``: only processes of this host are to reach us, so UCX does not listen on other interfaces (unless
        ``UCX_NET_DEVICES`` says where). Takes up to seconds the first time in a process. Raises NixlError."""
        super().__init__(context, 1)  # NIXL knows one connection to each peer
        self.moves_bytes = BUFFER_BYTES
        self._agent = NixlAgent(context.boot_id.hex(), loopback=loopback)
        self.service = NixlServer(context, self._agent)
        self._told: set[str] = set()

    def connect(self, remote: SegmentDescriptor, path: Path, deadline: float, replaces: int) -> NixlEndpoint:
        name = remote.boot_id.hex()
        try:
            self._agent.check(name)
        except NixlError as error:
            self._tell(remote, error)
            raise
        limit = min(deadline, self._clock() + self._limits.connect_s)
        address = remote.host, remote.port
        link = dial(self._context, address, remote.boot_id, Service.NIXL, limit, replaces=replaces)
        endpoint = None
        try:
            endpoint = NixlEndpoint(self._context, link, self._agent, name)
            with closed_on_exec(only_tcp=True):
                endpoint.pair(limit)
        except BaseException as error:
            if endpoint is None:
                link.stream.close(hard=True)
            else:
                endpoint.close(hard=True)
            if isinstance(error, NixlError):
                self._tell(remote, error)
            raise
        return endpoint

    def _tell(self, remote: SegmentDescriptor, error: NixlError) -> None:
        """Each reason once, up to a bound: peers could fill a log else."""
        if str(error) not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(str(error))
            _log.info("not using NIXL with %s:%d: %s", remote.host, remote.port, error)

    def maintain(self, now: float) -> None:
        """See ``Transport.maintain``."""
        super().maintain(now)
        self._agent.tend(now)
        self.service.help()

    def close(self) -> None:
        super().close()
        self.service.close()
        self._agent.close()
