"""NIXL: READs of peers' host memory by the library that NVIDIA Dynamo and others move KV with (UCX underneath).

The initiator reads, one-sided, into a buffer of its own, checks the seal that belongs to the key, and copies the bytes
to their place. It never WRITEs: NIXL can neither take a key back at once nor end what another process writes. Without
both, the bytes of a WRITE that was given up could land in memory that serves another purpose by then. So another
transport is needed beside it, for the WRITEs and for the READs that NIXL does not make faster
(:mod:`pinyon.transfer.paths.reach`)."""

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
    """The initiator's side of nixl; ``service`` is the serving side."""

    name = "nixl"

    def __init__(self, context: EngineContext, *, loopback: bool) -> None:
        """Makes the agent, which takes up to seconds the first time in a process. Raises NixlError.

        With ``loopback``, only processes of this host are to reach us, so UCX does not listen on other interfaces
        (unless ``UCX_NET_DEVICES`` says where)."""
        super().__init__(context, 1)  # NIXL has one connection to each peer
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
        """Logs each reason once, up to a bound, because peers could fill a log otherwise."""
        if str(error) not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(str(error))
            _log.info("not using NIXL with %s:%d: %s", remote.host, remote.port, error)

    def maintain(self, now: float) -> None:
        super().maintain(now)
        self._agent.tend(now)
        self.service.help()

    def close(self) -> None:
        super().close()
        self.service.close()
        self._agent.close()
