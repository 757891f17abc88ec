"""The answering side of RDMA: a thread per peer's queue pair that says where regions lie; the NIC does the rest."""

from __future__ import annotations

import logging
import secrets

from pinyon.transfer.links.acceptor import Inbound
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.memory.grant import Grant
from pinyon.transfer.transports.keys import tell
from pinyon.transfer.transports.rdma import wire as rdma_wire
from pinyon.transfer.transports.rdma.hcas import HcaTable
from pinyon.transfer.transports.rdma.lent import LentMemory, LentTable
from pinyon.transfer.transports.rdma.queue_pair import QueuePair
from pinyon.transfer.transports.rdma.verbs import VerbsError
from pinyon.transfer.transports.rdma.wire import Code, Op, RegionGrant
from pinyon.transfer.types.errors import WireError
from pinyon.transfer.types.request import Reason

_log = logging.getLogger(__name__)


class RdmaServer:
    """Serves the links of service ``RDMA``: one queue pair each, which ends with the link."""

    def __init__(self, context: EngineContext, hcas: HcaTable) -> None:
        self._context = context
        self._limits = context.limits
        self._clock = context.clock
        self._table = LentTable()
        context.memory.on_revoke.append(self._table.take_back)
        self._hcas = hcas

    def serve(self, inbound: Inbound) -> None:
        lent: LentMemory | None = None
        paired = False
        head = memoryview(bytearray(rdma_wire.HEADER_BYTES))
        while inbound.receive_request(head):
            header = rdma_wire.parse_request(head)
            deadline = self._clock() + self._limits.stall_s
            body = inbound.receive_bytes(rdma_wire.body_bytes(header, reply=False), deadline)
            if header.op is Op.PAIR:
                if paired:  # also after one that failed: what it had made ends with the link
                    raise WireError("a second PAIR on a link")
                paired = True
                lent, answer = self._pair(inbound, body)
            elif header.op is Op.RESOLVE:
                if lent is None:
                    raise WireError("RESOLVE before PAIR")
                answer = self._resolve(inbound, lent, body)
            else:
                continue
            inbound.stream.send([answer], deadline)

    def _pair(self, inbound: Inbound, body: bytes) -> tuple[LentMemory | None, bytes]:
        name, theirs = rdma_wire.parse_pair(body)
        try:
            hca = self._hcas.use(name, inbound, inbound.abort)
        except VerbsError:
            return None, rdma_wire.pack_paired(Code.NO_HCA, None)
        inbound.on_end.append(lambda: self._hcas.leave(hca, inbound))
        try:
            lent = LentMemory(hca, self._table)
            inbound.on_end.append(lent.close)
            pair = QueuePair(hca, lent.pd, posts=False)
            # destroyed before its memory and the HCA are left, and before anybody who waits for the link's end goes on
            inbound.on_end.append(pair.close)
            first_packet = secrets.randbits(24)
            mtu, reads = min(theirs.mtu, hca.mtu), min(theirs.reads, hca.reads_in)
            pair.connect(theirs, first_packet, mtu, reads)
        except VerbsError:
            return None, rdma_wire.pack_paired(Code.NO_ROOM, None)
        return lent, rdma_wire.pack_paired(Code.OK, pair.half(first_packet, mtu, reads))

    def _resolve(self, inbound: Inbound, lent: LentMemory, body: bytes) -> bytes:
        keys = rdma_wire.parse_keys(body)
        try:
            grants = tell(
                self._context, inbound, keys, rdma_wire.MAX_PARTS, lambda grant: _lend(lent, grant), RegionGrant
            )
        except VerbsError as error:
            _log.warning("memory cannot be lent to a peer: %s", error)
            return rdma_wire.pack_resolved(Code.NO_ROOM, [])
        return rdma_wire.pack_resolved(Code.OK, grants)


def _lend(lent: LentMemory, grant: Grant) -> RegionGrant:
    region = grant.region
    try:
        if not grant.rights:
            return RegionGrant(0)
        if region.device is not None and not region.direct:
            return RegionGrant(Reason.OTHER_TRANSPORT)
        return lent.lend(grant) or RegionGrant(Reason.UNKNOWN_REGION)
    except VerbsError:
        if region.device is not None and not region.direct:
            return RegionGrant(Reason.OTHER_TRANSPORT)
        raise
