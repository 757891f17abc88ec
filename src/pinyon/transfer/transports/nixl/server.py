"""The answering side of NIXL: a thread per peer's link that says where regions lie; kernel or NIC do the rest."""

from __future__ import annotations

import logging
import select
import threading
from typing import Any, NamedTuple

from pinyon.transfer.links.acceptor import InboundLink
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.memory.grant import Grant
from pinyon.transfer.memory.region import Access, Region
from pinyon.transfer.transports.control import tell
from pinyon.transfer.transports.nixl import wire
from pinyon.transfer.transports.nixl.agent import NixlAgent, NixlError
from pinyon.transfer.transports.nixl.process_state import closed_on_exec
from pinyon.transfer.transports.nixl.wire import PROOF_S, NixlCode, NixlHeader, NixlOp, NixlPlace, Page
from pinyon.transfer.transports.shm.seal import Seals
from pinyon.transfer.transports.shm.wire import MAX_SPANS
from pinyon.transfer.types.errors import WireError
from pinyon.transfer.types.request import Reason

_log = logging.getLogger(__name__)
_BUSY_S = 0.05
"""The seconds for which a peer that is ready waits for another proof to end before it is told to come again."""
_HELP_MS = 1
"""The milliseconds between two turns of our agent while a peer connects to it."""
_PAGE_BYTES = 1 << 20
"""The bytes of the page of seals, which is registered because NIXL reads registered memory only."""


class _Shown(NamedTuple):
    """A region that NIXL has registered."""

    registered: Any
    metadata: bytes


class NixlServer:
    """The service of ``NIXL`` links.

    A region is registered whole when a peer first asks for some of it, until it is unregistered. NIXL's keys are for
    all of a registration, and registrations must not overlap. Readers themselves must keep to what a grant opens, and
    stop when it is taken back (docs/design/transfer.md)."""

    def __init__(self, context: EngineContext, agent: NixlAgent) -> None:
        """Registers the page of seals. Raises NixlError."""
        self._context = context
        self._agent = agent
        page = agent.new_buffer(_PAGE_BYTES)
        self._seals = Seals(page.view)
        self._page = Page(page.address, _PAGE_BYTES, self._seals.own.value)
        self._metadata = agent.metadata(page.registered, connection=True)
        self._lock = threading.Lock()
        self._shown: dict[Region, _Shown] = {}
        context.memory.on_revoke.append(self._seals.revoke)
        context.memory.on_unregister.append(self._hide)

    def serve(self, inbound: InboundLink) -> None:
        head = memoryview(bytearray(wire.HEADER_BYTES))
        with closed_on_exec(only_tcp=True):
            paired = self._pair(inbound, head)
        if not paired:
            return
        while inbound.receive_request(head):
            header = wire.parse_request(head)
            if header.op is NixlOp.TOUCH:
                continue
            if header.op is not NixlOp.RESOLVE:
                raise WireError(f"{header.op.name} on a link that is paired")
            deadline = self._context.clock() + self._context.limits.stall_s
            keys = wire.parse_keys(inbound.stream.receive_bytes(wire.request_bytes(header), deadline))
            places = tell(self._context, inbound, keys, MAX_SPANS, self._place, NixlPlace)
            inbound.stream.send([wire.pack_answer(NixlOp.RESOLVE, NixlCode.OK, wire.pack_places(places))], deadline)

    # --- set-up ---

    def _pair(self, inbound: InboundLink, head: memoryview) -> bool:
        """Sets the connection up. Returns False if it comes to nothing, which the peer knows."""
        deadline = self._context.clock() + self._context.limits.connect_s
        stream = inbound.stream
        version = inbound.stream.receive_bytes(self._expect(inbound, head, NixlOp.PAIR, deadline).size, deadline)
        if version != self._agent.version.encode():
            _log.info("a peer has another version of NIXL than %s", self._agent.version)
            stream.send([wire.pack_answer(NixlOp.PAIR, NixlCode.OTHER_VERSION)], deadline)
            return False
        stream.send(
            [wire.pack_answer(NixlOp.PAIR, NixlCode.OK, wire.pack_paired(self._page, self._metadata))], deadline
        )
        heard = select.poll()
        heard.register(stream.sock, select.POLLIN | select.POLLRDHUP)
        while True:
            while not heard.poll(_HELP_MS):
                self._agent.help()
                if self._context.clock() >= deadline:
                    return False
            self._expect(inbound, head, NixlOp.READY, deadline)
            if self._stand_still(inbound, head, deadline):
                return True
            stream.send([wire.pack_answer(NixlOp.READY, NixlCode.BUSY)], deadline)

    def _stand_still(self, inbound: InboundLink, head: memoryview, deadline: float) -> bool:
        """Stands still until the peer has proved that it reads without us. Returns False during another proof."""
        agent = self._agent
        if not agent.pairing.acquire(timeout=_BUSY_S):
            return False
        try:
            with agent.turn:
                inbound.stream.send([wire.pack_answer(NixlOp.READY, NixlCode.OK)], deadline)
                self._expect(inbound, head, NixlOp.PROVED, min(deadline, self._context.clock() + 2 * PROOF_S))
        finally:
            agent.pairing.release()
        return True

    def _expect(self, inbound: InboundLink, head: memoryview, op: NixlOp, deadline: float) -> NixlHeader:
        inbound.stream.receive([head], deadline)
        header = wire.parse_request(head)
        if header.op is not op:
            raise WireError(f"{header.op.name} in place of {op.name}")
        return header

    # --- what keys open ---

    def _place(self, grant: Grant) -> NixlPlace:
        """Returns what the grant opens for reading."""
        region = grant.region
        if not grant.rights & Access.READ:
            return NixlPlace(Reason.ACCESS_DENIED)
        if region.device is not None:
            return NixlPlace(Reason.OTHER_TRANSPORT)
        shown = self._show(region)
        seal = self._seals.issue(grant) if shown is not None else None
        if shown is None or seal is None:
            return NixlPlace(Reason.OTHER_TRANSPORT if grant.alive else Reason.UNKNOWN_REGION)
        return NixlPlace(0, region.address, region.length, seal, grant.spans, shown.metadata)

    def _show(self, region: Region) -> _Shown | None:
        """Registers the region at its first use. Returns None if it overlaps another or NIXL does not take it."""
        with self._lock:
            shown = self._shown.get(region)
            if shown is not None:
                return shown
            start, end = region.address, region.address + region.length
            if any(one.address < end and start < one.address + one.length for one in self._shown):
                return None
            registered = None
            try:
                registered = self._agent.register(start, region.length)
                metadata = self._agent.metadata(registered, connection=False)
            except NixlError as error:
                if registered is not None:
                    self._agent.deregister(registered)
                _log.warning("memory cannot be shown by NIXL: %s", error)
                return None
            shown = self._shown[region] = _Shown(registered, metadata)
            return shown

    def _hide(self, region: Region) -> None:
        """Ends the registration of a region that nobody uses any more; pins for ``_place`` were waited for before."""
        with self._lock:
            shown = self._shown.pop(region, None)
        if shown is not None:
            self._agent.deregister(shown.registered)

    def close(self) -> None:
        self._seals.close()
