"""The answering side of RDMA: a thread per peer's queue pair that says where regions lie; the NIC does the rest."""

from __future__ import annotations

import secrets
import time

from pinyon.core.clock import Clock
from pinyon.transfer.errors import WireError
from pinyon.transfer.limits import TransferLimits
from pinyon.transfer.links.inbound import Inbound
from pinyon.transfer.memory.region import Access
from pinyon.transfer.memory.table import MemoryTable
from pinyon.transfer.request import Reason
from pinyon.transfer.transports.rdma import wire as rdma_wire
from pinyon.transfer.transports.rdma.hca import Hca
from pinyon.transfer.transports.rdma.hcas import HcaTable
from pinyon.transfer.transports.rdma.queue_pair import QueuePair
from pinyon.transfer.transports.rdma.verbs import VerbsError
from pinyon.transfer.transports.rdma.wire import Code, Op, RegionGrant

__all__ = ["RdmaServer"]

REST_S = 4.0
"""A link that was silent for this long is not in use: whoever uses its queue pair says so every second or so."""


class RdmaServer:
    """Serves the links of service ``RDMA``: one queue pair each, which ends with the link."""

    def __init__(
        self, memory: MemoryTable, limits: TransferLimits, hcas: HcaTable, clock: Clock = time.monotonic
    ) -> None:
        self._clock = clock
        self._memory = memory
        self._limits = limits
        self._hcas = hcas

    def serve(self, inbound: Inbound) -> None:
        hca: Hca | None = None
        head = memoryview(bytearray(rdma_wire.HEADER_BYTES))
        while self._wait(inbound, head):
            header = rdma_wire.parse_request(head)
            deadline = self._clock() + self._limits.stall_s
            body = inbound.receive_bytes(rdma_wire.body_bytes(header, reply=False), deadline)
            if header.op is Op.PAIR:
                if hca is not None:
                    raise WireError("a second PAIR on a link")
                hca, answer = self._pair(inbound, body)
            elif header.op is Op.RESOLVE:
                if hca is None:
                    raise WireError("RESOLVE before PAIR")
                answer = self._resolve(hca, body)
            else:
                continue
            inbound.stream.send([answer], deadline)

    def _wait(self, inbound: Inbound, head: memoryview) -> bool:
        """The next request's header; False: the link is closed, was evicted or has been silent for too long."""
        resting = False
        give_up = self._clock() + max(self._limits.idle_s, REST_S)
        while True:
            now = self._clock()
            deadline = min(give_up, now + REST_S) if not resting else give_up
            if inbound.stream.receive_or_idle(head, deadline):
                return not resting or inbound.work()
            if self._clock() < deadline or deadline == give_up:
                return False
            resting = True
            inbound.rest()

    def _pair(self, inbound: Inbound, body: bytes) -> tuple[Hca | None, bytes]:
        name, theirs = rdma_wire.parse_pair(body)
        try:
            hca = self._hcas.use(name, inbound, inbound.abort)
        except VerbsError:
            return None, rdma_wire.pack_paired(Code.NO_HCA, None)
        inbound.on_end.append(lambda: self._hcas.leave(hca, inbound))
        try:
            pair = QueuePair(hca, posts=False)
            # destroyed before the HCA is left, and before anybody who waits for the link's end goes on
            inbound.on_end.append(pair.close)
            first_packet = secrets.randbits(24)
            mtu, reads = min(theirs.mtu, hca.mtu), min(theirs.reads, hca.reads_in)
            pair.connect(theirs, first_packet, mtu, reads)
        except VerbsError:
            return None, rdma_wire.pack_paired(Code.NO_ROOM, None)
        return hca, rdma_wire.pack_paired(Code.OK, pair.half(first_packet, mtu, reads))

    def _resolve(self, hca: Hca, body: bytes) -> bytes:
        try:
            grants = [self._grant(hca, key) for key in rdma_wire.parse_keys(body)]
        except VerbsError:
            return rdma_wire.pack_resolved(Code.NO_ROOM, [])
        return rdma_wire.pack_resolved(Code.OK, grants)

    def _grant(self, hca: Hca, key: bytes) -> RegionGrant:
        region = self._memory.get(key)
        if region is None:
            return RegionGrant(Reason.UNKNOWN_REGION)
        if region.access is Access.NONE:
            return RegionGrant(0)
        if region.device is not None and not region.direct:
            return RegionGrant(Reason.OTHER_TRANSPORT)
        try:
            registration = hca.register(region)
        except VerbsError:
            if region.device is not None and not region.direct:
                return RegionGrant(Reason.OTHER_TRANSPORT)
            if region.alive:
                raise
            return RegionGrant(Reason.UNKNOWN_REGION)
        return RegionGrant(0, region.access, registration.rkey, registration.base, region.length)
