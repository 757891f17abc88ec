"""The serving side of shm: tells peers where regions lie, and copies what they WRITE from their memory into ours."""

from __future__ import annotations

import logging
from array import array

from pinyon.transfer.links.acceptor import InboundLink
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.memory.grant import Grant
from pinyon.transfer.memory.region import Access, Region
from pinyon.transfer.transports.control import LinkWatch, tell
from pinyon.transfer.transports.shm import wire as shm_wire
from pinyon.transfer.transports.shm.cma import FETCH_BYTES, Move, PeerMemory, Unreachable, meet
from pinyon.transfer.transports.shm.seal import Seals
from pinyon.transfer.types.errors import WireError
from pinyon.transfer.types.request import Opcode, Reason
from pinyon.transfer.types.segment import Range

_log = logging.getLogger(__name__)
_ONE = (shm_wire.MAGIC, shm_wire.WRITE, 0, 1)


class ShmService:
    """The service of :attr:`pinyon.transfer.links.handshake.Service.SHM` links, which come by a Unix socket."""

    def __init__(self, context: EngineContext, seals: Seals) -> None:
        self.context = context
        self.memory = context.memory
        self.clock = context.clock
        self.limits = context.limits
        self.seals = seals
        self._meter = context.meter
        self._told: set[str] = set()
        context.memory.on_revoke.append(seals.revoke)

    def serve(self, inbound: InboundLink) -> None:
        stream = inbound.stream
        deadline = self.clock() + self.limits.connect_s
        _, address = shm_wire.parse_proof(stream.receive_bytes(shm_wire.PROOF_BYTES, deadline))
        try:
            seal = shm_wire.Seal(address, inbound.marks.initiator)
            peer = meet(stream, seal)
        except Unreachable as why:
            if str(why) not in self._told:
                self._told.add(str(why))
                _log.info("a peer on this host is served by tcp: %s", why)
            stream.send([shm_wire.pack_proof(shm_wire.UNREACHABLE)], deadline)
            return
        session = _Session(self, inbound, peer, seal)
        stream.send([shm_wire.pack_proof(shm_wire.OK, session.mark.buffer_info()[0])], deadline)
        session.serve()

    def served(self, nbytes: int, refusals: bytes | None) -> None:
        with self._meter.lock:
            self._meter.served(Opcode.WRITE, nbytes, refusals)


class _Session:
    """The requests of one link, served one at a time."""

    def __init__(self, service: ShmService, inbound: InboundLink, peer: PeerMemory, seal: shm_wire.Seal) -> None:
        self._service = service
        self._inbound = inbound
        self._peer = peer
        self._seal = seal
        """The peer's mark of the link, in its memory."""
        self.mark = array("Q", inbound.marks.server)
        """Our mark of the link, which the peer checks."""
        self._watch = LinkWatch(inbound.stream)
        self._inbox = memoryview(bytearray(shm_wire.MAX_REQUEST_BYTES))

    def serve(self) -> None:
        limits, clock = self._service.limits, self._service.clock
        stream, inbox = self._inbound.stream, self._inbox
        while True:
            got = stream.poll(inbox)
            if got is None:
                got = self._inbound.await_request(inbox)
            if not got:
                return
            deadline = clock() + limits.base_deadline_s
            if got == shm_wire.WRITE_OF_ONE_BYTES and self._write_one(inbox, deadline):
                continue
            if got < shm_wire.HEAD_BYTES:
                stream.receive([inbox[got : shm_wire.HEAD_BYTES]], deadline)
                got = shm_wire.HEAD_BYTES
            request = shm_wire.parse_request(inbox[: shm_wire.HEAD_BYTES])
            end = shm_wire.HEAD_BYTES + request.body_bytes
            if got > end:
                raise WireError("bytes after a request")
            if got < end:
                stream.receive([inbox[got:end]], deadline)
            body = inbox[shm_wire.HEAD_BYTES : end]
            if request.kind == shm_wire.RESOLVE:
                self._resolve(request, shm_wire.parse_keys(body, request), deadline)
            else:
                self._write(request, *shm_wire.parse_ranges(body, request), deadline)

    # --- READ: the peer copies; it only asks for the place ---

    def _resolve(self, request: shm_wire.ShmRequestHead, keys: list[bytes], deadline: float) -> None:
        places = tell(self._service.context, self._inbound, keys, self._place, shm_wire.ShmPlace)
        self._inbound.stream.send([shm_wire.pack_places(request, places)], deadline)

    def _place(self, grant: Grant) -> shm_wire.ShmPlace:
        """Returns what the grant opens for reading."""
        if not grant.rights & Access.READ:
            return shm_wire.ShmPlace(Reason.ACCESS_DENIED)
        if grant.region.device is not None:
            return shm_wire.ShmPlace(Reason.OTHER_TRANSPORT)
        seal = self._service.seals.issue(grant)
        if seal is None:
            return shm_wire.ShmPlace(Reason.UNKNOWN_REGION)
        return shm_wire.ShmPlace(0, grant.region.address, seal, grant.spans)

    # --- WRITE: we copy ---

    def _write(
        self, request: shm_wire.ShmRequestHead, ranges: list[Range], addresses: tuple[int, ...], deadline: float
    ) -> None:
        memory, inbound = self._service.memory, self._inbound
        found, refusals, pinned = memory.admit(Opcode.WRITE, ranges, inbound, inbound.abort, host_only=True)
        try:
            moves, accepted = _moves(ranges, addresses, found)
            # If the peer closes the link, the copy ends between two pieces, so that a WRITE given up by the peer goes
            # no further.
            if moves and not self._peer.copy(moves, accepted, self._seal, self._check_open):
                raise ConnectionResetError("the peer's memory is gone")
        finally:
            memory.unpin(pinned, inbound)
        self._service.served(accepted, refusals)
        inbound.stream.send([shm_wire.pack_answer(request, refusals)], deadline)

    def _write_one(self, inbox: memoryview, deadline: float) -> bool:
        """Serves the usual small WRITE: one granted range. Returns False, with nothing done, in any other case."""
        message = shm_wire.unpack_write_of_one(inbox)
        magic, kind, code, ranges, message_id, nbytes, key, offset, length, address = message
        if (magic, kind, code, ranges) != _ONE or not 0 < length == nbytes <= FETCH_BYTES or address >> 62:
            return False
        self._check_open()
        data = self._peer.fetch_one(address, nbytes, self._seal)
        if data is None:
            raise ConnectionResetError("the peer's memory is gone")
        if not self._service.memory.put(key, offset, data):
            return False
        self._service.served(nbytes, None)
        answer = shm_wire.pack_head(magic, shm_wire.WRITE_DONE, shm_wire.OK, 1, message_id, 0)
        self._inbound.stream.send_one(answer, deadline)
        return True

    def _check_open(self) -> None:
        if not self._watch.is_open():
            raise ConnectionResetError("the peer closed the link")


def _moves(ranges: list[Range], addresses: tuple[int, ...], found: list[Region | None]) -> tuple[list[Move], int]:
    """Returns the moves for the accepted ranges, with neighbours joined, and their bytes together."""
    moves: list[Move] = []
    total = to = source = size = 0
    for (_, offset, length), address, region in zip(ranges, addresses, found, strict=True):
        if region is None:
            continue
        here = region.address + offset
        total += length
        if here == to + size and address == source + size and size:
            size += length
            continue
        if size:
            moves.append((to, source, size))
        to, source, size = here, address, length
    if size:
        moves.append((to, source, size))
    return moves, total
