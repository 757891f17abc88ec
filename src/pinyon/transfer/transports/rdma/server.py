"""The answering side of RDMA: a thread per peer's queue pair that says where regions lie; the NIC does the rest.

A NIC checks a key of 32 bits, which can be guessed. So each link has a protection domain of its own. A NIC's key works
only for the queue pair of the link that asked for it, in the granted ranges and direction, until the grant is revoked.
A registration is a system call per range (docs/design/transfer.md has the figures), so it is made only for the ranges
that a peer asks for by RDMA."""

from __future__ import annotations

import logging
import secrets
import threading
from typing import Any

from pinyon.transfer.links.acceptor import InboundLink
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.memory.grant import Grant
from pinyon.transfer.transports.control import tell
from pinyon.transfer.transports.rdma import wire as rdma_wire
from pinyon.transfer.transports.rdma.hca import Hca, register_memory
from pinyon.transfer.transports.rdma.hcas import HcaTable
from pinyon.transfer.transports.rdma.queue_pair import QueuePair
from pinyon.transfer.transports.rdma.verbs import VerbsError, free, pyverbs, verb
from pinyon.transfer.transports.rdma.wire import RdmaCode, RdmaOp, RegionGrant
from pinyon.transfer.types.errors import WireError
from pinyon.transfer.types.request import Reason

_log = logging.getLogger(__name__)


class RdmaServer:
    """The service of ``RDMA`` links: each has one queue pair, which ends with the link."""

    def __init__(self, context: EngineContext, hcas: HcaTable) -> None:
        self._context = context
        self._lent: set[LentMemory] = set()
        """The registrations of each link."""
        context.memory.on_revoke.append(self._take_back)
        self._hcas = hcas

    def serve(self, inbound: InboundLink) -> None:
        lent: LentMemory | None = None
        paired = False
        head = memoryview(bytearray(rdma_wire.HEADER_BYTES))
        while inbound.receive_request(head):
            header = rdma_wire.parse_request(head)
            deadline = self._context.clock() + self._context.limits.stall_s
            body = inbound.stream.receive_bytes(rdma_wire.body_bytes(header, reply=False), deadline)
            if header.op is RdmaOp.PAIR:
                if paired:  # also after a failed PAIR: what that PAIR had made ends with the link
                    raise WireError("a second PAIR on a link")
                paired = True
                lent, answer = self._pair(inbound, body)
            elif header.op is RdmaOp.RESOLVE:
                if lent is None:
                    raise WireError("RESOLVE before PAIR")
                answer = self._resolve(inbound, lent, body)
            else:
                continue
            inbound.stream.send([answer], deadline)

    def _pair(self, inbound: InboundLink, body: bytes) -> tuple[LentMemory | None, bytes]:
        name, theirs = rdma_wire.parse_pair(body)
        try:
            hca = self._hcas.use(name, inbound, inbound.abort)
        except VerbsError:
            return None, rdma_wire.pack_paired(RdmaCode.NO_HCA, None)
        inbound.on_end.append(lambda: self._hcas.leave(hca, inbound))
        try:
            lent = LentMemory(hca)
            self._lent.add(lent)
            inbound.on_end += [lambda: self._lent.remove(lent), lent.close]
            pair = QueuePair(hca, lent.pd, posts=False)
            # Destroyed before its memory and the HCA are released, and before a waiter for the link's end goes on.
            inbound.on_end.append(pair.close)
            first_packet = secrets.randbits(24)
            mtu, reads = min(theirs.mtu, hca.mtu), min(theirs.reads, hca.reads_in)
            pair.connect(theirs, first_packet, mtu, reads)
        except VerbsError:
            return None, rdma_wire.pack_paired(RdmaCode.NO_ROOM, None)
        return lent, rdma_wire.pack_paired(RdmaCode.OK, pair.half(first_packet, mtu, reads))

    def _resolve(self, inbound: InboundLink, lent: LentMemory, body: bytes) -> bytes:
        keys = rdma_wire.parse_keys(body)
        try:
            grants = tell(self._context, inbound, keys, lent.lend, RegionGrant)
        except VerbsError as error:
            _log.warning("memory cannot be lent to a peer: %s", error)
            return rdma_wire.pack_resolved(RdmaCode.NO_ROOM, [])
        return rdma_wire.pack_resolved(RdmaCode.OK, grants)

    def _take_back(self, grant: Grant) -> None:
        """Takes the grant back from all links: from then on, no NIC lets a peer use it."""
        if grant.lent:
            for lent in list(self._lent):
                lent.take_back(grant)


class LentMemory:
    """The protection domain of one link, and the memory that is registered in it."""

    def __init__(self, hca: Hca) -> None:
        """Makes the protection domain. Raises :class:`VerbsError` if the HCA has no room."""
        self._lock = threading.Lock()
        self._lent: dict[Grant, tuple[list[Any], RegionGrant]] = {}
        self._asked: set[Grant] = set()
        """Grants that are lent, or are about to be."""
        with verb(f"no protection domain on {hca.nic.name}"):
            self.pd = pyverbs().PD(hca.context)

    def lend(self, grant: Grant) -> RegionGrant:
        """Registers the grant's ranges at first use; returns what the peer must know, or why nothing is lent.

        The registration ends with the grant or the link. Raises VerbsError if the NIC has no room."""
        region = grant.region
        if not grant.rights:
            return RegionGrant(0)
        if region.device is not None and not region.direct:
            return RegionGrant(Reason.OTHER_TRANSPORT)
        self._asked.add(grant)  # before ``alive`` is read, like ``lent`` below
        with self._lock:
            known = self._lent.get(grant)
            if known is not None:
                return known[1]
            grant.lent = True  # before ``alive`` is read: a revoking thread sees this, or has already ended the grant
            if not grant.alive:
                self._asked.discard(grant)
                return RegionGrant(Reason.UNKNOWN_REGION)
            handles: list[Any] = []
            keys: list[tuple[int, int]] = []
            try:
                for start, end in zip(*grant.spans, strict=True):
                    handle, address = register_memory(self.pd, region, start, end - start, grant.access)
                    handles.append(handle)
                    keys.append((handle.rkey, address))
            except BaseException as error:
                for handle in handles:
                    free(handle)
                self._asked.discard(grant)
                if isinstance(error, VerbsError) and region.device is not None and not region.direct:
                    return RegionGrant(Reason.OTHER_TRANSPORT)  # this attempt has shown that it cannot be registered
                raise
            made = RegionGrant(0, grant.rights, grant.spans, tuple(keys))
            self._lent[grant] = handles, made
            return made

    def take_back(self, grant: Grant) -> None:
        """Takes the grant back: from then on the NIC refuses the keys that were lent for it."""
        if grant not in self._asked:  # returns without waiting for a registration under way
            return
        with self._lock:
            self._asked.discard(grant)
            handles, _ = self._lent.pop(grant, ((), None))
            for handle in handles:
                free(handle)

    def close(self) -> None:
        """Frees everything, after the link's queue pair was closed."""
        with self._lock:
            for handles, _ in self._lent.values():
                for handle in handles:
                    free(handle)
            self._lent.clear()
            free(self.pd)
