"""The shm transport, for peers on one host: the process whose memory is written copies every byte once.

A READ is copied here, and involves none of the peer's threads once the peer has said where the region lies. A WRITE is
copied by the peer, on our request over the link. So no process ever writes into another's memory, and each checks the
copies into its own. Any buffer can be registered; nothing needs to be allocated as shared memory."""

from __future__ import annotations

import itertools
import logging
from array import array

from pinyon.transfer.chains.chain import DONE, LOST, SHUTDOWN, UNDER_WAY, Chain, ChainOutcome
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.links.dialer import Link, dial
from pinyon.transfer.links.endpoint import Endpoint
from pinyon.transfer.links.endpoints import Endpoints
from pinyon.transfer.links.handshake import Service
from pinyon.transfer.links.stream import DeadlineReached
from pinyon.transfer.memory.region import Region
from pinyon.transfer.transports.control import KnownKeys
from pinyon.transfer.transports.shm import wire as shm_wire
from pinyon.transfer.transports.shm.cma import FETCH_BYTES, Move, PeerMemory, Unreachable, meet
from pinyon.transfer.transports.shm.seal import Seals
from pinyon.transfer.transports.shm.server import ShmService
from pinyon.transfer.transports.tcp import wire
from pinyon.transfer.types.errors import WireError
from pinyon.transfer.types.nic import Path
from pinyon.transfer.types.request import Opcode, Reason, TransferStatus
from pinyon.transfer.types.segment import SegmentDescriptor

_log = logging.getLogger(__name__)

_NOWHERE = shm_wire.ShmPlace(0)
_READ_TRIES = 4
"""The attempts of a READ whose regions are unregistered one after another while it runs."""


class _Endpoint(Endpoint):
    """A link to a peer, with the peer's memory and the places of its regions."""

    def __init__(self, context: EngineContext, link: Link, memory: PeerMemory, mark: array[int]) -> None:
        """Takes the peer's ``memory`` and our ``mark`` of the link, which the peer checks whenever it copies."""
        super().__init__(link)
        self._mark = mark
        self._memory = memory
        self._table = context.memory
        self._clock = context.clock
        self._keys: KnownKeys[shm_wire.ShmPlace] = KnownKeys(context.limits.max_regions)
        self._places = self._keys.opened
        self._ids = itertools.count(1)
        self._answer = memoryview(bytearray(shm_wire.HEAD_BYTES + 1))
        """The answer to a WRITE of one range: a head, and a code if it is refused."""
        self._head = self._answer[: shm_wire.HEAD_BYTES]
        self._message_id = 0
        """The id of that WRITE."""
        self._got = 0
        """The bytes of its answer that have arrived, while :meth:`proceed` collects them."""
        outbox = array("B", bytes(FETCH_BYTES))
        self._outbox = memoryview(outbox)
        """The payload of a small WRITE, for the peer to copy. Local memory is touched only while it is copied here."""
        self._outbox_address = outbox.buffer_info()[0]

    def begin(
        self, opcode: Opcode, region: Region, offset: int, key: bytes, remote_offset: int, nbytes: int, deadline: float
    ) -> ChainOutcome | None:
        """Copies a READ, which needs no answer, or sends the request of a WRITE.

        A payload of up to ``FETCH_BYTES`` passes through a buffer of ours. A larger one is copied straight between the
        regions, of which the caller has pinned ours."""
        if opcode is Opcode.READ:
            place = self._places.get(key)
            if place is None:
                return None
            _, base, seal, spans = place
            if spans.holding(remote_offset, remote_offset + nbytes) < 0:
                return None
            if nbytes > FETCH_BYTES:
                move = region.address + offset, base + remote_offset, nbytes
                return DONE if self._copy([move], nbytes, [seal], deadline) else None
            data = self._memory.fetch_one(base + remote_offset, nbytes, seal)
            if data is None:
                return None
            return DONE if self._table.store(region, offset, data) else SHUTDOWN
        address = self._outbox_address
        if nbytes > FETCH_BYTES:
            address = region.address + offset
        elif not self._table.load(region, offset, self._outbox[:nbytes]):
            return SHUTDOWN
        message_id = self._message_id = next(self._ids)
        request = shm_wire.pack_write_of_one(
            *(shm_wire.MAGIC, shm_wire.WRITE, 0, 1, message_id, nbytes), *(key, remote_offset, nbytes, address)
        )
        self._got = 0
        self.link.stream.send_one(request, deadline)
        return UNDER_WAY

    def wait(self, deadline: float) -> ChainOutcome:
        got = self.link.stream.receive_some(self._answer, shm_wire.HEAD_BYTES, deadline)
        self.answered = True
        return self._end_write(got, deadline)

    def proceed(self) -> ChainOutcome | None:
        while True:
            moved = self.link.stream.receive_now(self._answer[self._got :])
            if moved is None:
                return None
            if not moved:
                raise ConnectionResetError("the peer closed the connection")
            self.answered = True
            self._got += moved
            if self._got >= shm_wire.HEAD_BYTES and self._got >= shm_wire.HEAD_BYTES + self._refused():
                return self._end_write(self._got, 0.0)

    def _refused(self) -> int:
        """Returns how many codes follow the head of the answer to a WRITE of one range: 0 or 1."""
        good = shm_wire.pack_head(shm_wire.MAGIC, shm_wire.WRITE_DONE, shm_wire.OK, 1, self._message_id, 0)
        if self._head == good:
            return 0
        return shm_wire.parse_answer(self._head, shm_wire.WRITE, 1, self._message_id)[1]

    def _end_write(self, got: int, deadline: float) -> ChainOutcome:
        """Returns the outcome of a WRITE of one range. The answer's head has arrived, ``got`` bytes in all."""
        whole = shm_wire.HEAD_BYTES + self._refused()
        if got > whole:
            raise WireError("bytes after the answer")
        if whole == shm_wire.HEAD_BYTES:
            return DONE
        if got < whole:
            self.link.stream.receive([self._answer[got:whole]], deadline)
        return _completed(bytes(self._answer[shm_wire.HEAD_BYTES : whole]))

    def close(self, *, hard: bool) -> None:
        super().close(hard=hard)
        self._mark[0] = self._mark[1] = 0

    def exchange(self, chain: Chain) -> ChainOutcome:
        return self._read(chain) if chain.opcode is Opcode.READ else self._write(chain)

    def _write(self, chain: Chain) -> ChainOutcome:
        slices, regions = chain.slices, chain.regions
        addresses = [regions[local].address + offset for _, local, offset, _, _, _ in slices]
        message_id = next(self._ids)
        request = shm_wire.pack_write(message_id, [part[3:] for part in slices], addresses, chain.nbytes)
        self.link.stream.send([request], chain.deadline)
        _, size = self._receive_answer(shm_wire.WRITE, len(slices), message_id, chain.deadline)
        return _completed(self.link.stream.receive_bytes(size, chain.deadline)) if size else DONE

    def _read(self, chain: Chain) -> ChainOutcome:
        for _ in range(_READ_TRIES):
            keys = {part.remote_region for part in chain.slices}
            found = self._keys.find(keys, lambda asked: self._resolve(asked, chain.deadline))
            places = {key: found[key] for key in keys}
            moves, nbytes, refusals = _plan_read(chain, places)
            if not moves or self._copy(
                moves, nbytes, [place.seal for place in places.values() if not place.code], chain.deadline
            ):
                return DONE if refusals is None else ChainOutcome(TransferStatus.COMPLETED, Reason.NONE, refusals)
            self._check(chain.deadline)
            self._keys.forget()
        return LOST

    def _copy(self, moves: list[Move], nbytes: int, seals: list[shm_wire.Seal], deadline: float) -> bool:
        """Copies ``moves``, ``nbytes`` in all. Returns False if some region is not what it was."""
        memory = self._memory
        # Checked before, so that a region that has gone costs no copy, and after, so that what was copied was still
        # registered.
        return (
            memory.holds(seals)
            and memory.copy(moves, nbytes, seals[0], lambda: self._check(deadline))
            and (len(seals) == 1 or memory.holds(seals))
        )

    def _check(self, deadline: float) -> None:
        if self.aborted:
            raise ConnectionAbortedError("the chain was stopped or interrupted")
        if self._clock() > deadline:
            raise DeadlineReached

    def _resolve(self, keys: list[bytes], deadline: float) -> list[shm_wire.ShmPlace]:
        message_id = next(self._ids)
        self.link.stream.send([shm_wire.pack_resolve(message_id, keys)], deadline)
        _, size = self._receive_answer(shm_wire.RESOLVE, len(keys), message_id, deadline)
        return shm_wire.parse_places(self.link.stream.receive_bytes(size, deadline), len(keys))

    def _receive_answer(self, kind: int, count: int, message_id: int, deadline: float) -> tuple[int, int]:
        self.link.stream.receive_some(self._head, shm_wire.HEAD_BYTES, deadline)
        self.answered = True
        return shm_wire.parse_answer(self._head, kind, count, message_id)


def _completed(refusals: bytes) -> ChainOutcome:
    """Returns the outcome of a WRITE that was refused in part. Raises WireError if the codes make no sense."""
    wire.check_refusals(refusals)
    return ChainOutcome(TransferStatus.COMPLETED, Reason.NONE, refusals)


def _plan_read(chain: Chain, places: dict[bytes, shm_wire.ShmPlace]) -> tuple[list[Move], int, bytes | None]:
    """Returns the moves, with neighbours joined, their bytes, and a code per slice (None if nothing is refused)."""
    moves: list[Move] = []
    codes: bytearray | None = None
    regions = chain.regions
    last_local = last_key = b""
    place = _NOWHERE
    base = total = to = source = size = 0
    for position, (_, local, local_offset, key, offset, length) in enumerate(chain.slices):
        if local is not last_local:
            last_local = local
            base = regions[local].address
        if key is not last_key:
            last_key = key
            place = places[key]
        code, there, _, spans = place
        if code or spans.holding(offset, offset + length) < 0:
            if codes is None:
                codes = bytearray(len(chain.slices))
            codes[position] = code or Reason.OUT_OF_RANGE
            continue
        total += length
        if base + local_offset == to + size and there + offset == source + size and size:
            size += length
            continue
        if size:
            moves.append((to, source, size))
        to, source, size = base + local_offset, there + offset, length
    if size:
        moves.append((to, source, size))
    return moves, total, None if codes is None else bytes(codes)


class ShmTransport(Endpoints[_Endpoint]):
    """The initiator's side of shm, where it is available; :class:`ShmService` is the serving side."""

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context, context.limits.connections_per_peer)
        self.moves_bytes = context.limits.max_frame_bytes
        self.address = f"@pinyon-transfer-{context.boot_id.hex()}"
        """The abstract Unix socket to listen on and to publish."""
        self._seals = Seals(context.limits.max_grants + context.limits.max_regions)
        self.service = ShmService(context, self._seals)
        self._told: set[str] = set()

    def connect(self, remote: SegmentDescriptor, path: Path, deadline: float, replaces: int) -> _Endpoint:
        if not remote.shm:
            raise Unreachable("the peer does not listen for shm")
        link = dial(self._context, remote.shm, remote.boot_id, Service.SHM, deadline, replaces=replaces)
        try:
            mark = array("Q", link.marks.initiator)
            memory = self._prove(link, mark, min(deadline, self._clock() + self._limits.connect_s))
        except BaseException as why:
            link.stream.close(hard=True)
            if isinstance(why, Unreachable) and str(why) not in self._told:
                self._told.add(str(why))
                _log.info("not using shm with a peer on this host: %s", why)
            raise
        return _Endpoint(self._context, link, memory, mark)

    def _prove(self, link: Link, mark: array[int], deadline: float) -> PeerMemory:
        link.stream.send([shm_wire.pack_proof(shm_wire.OK, mark.buffer_info()[0])], deadline)
        code, address = shm_wire.parse_proof(link.stream.receive_bytes(shm_wire.PROOF_BYTES, deadline))
        if code:
            raise Unreachable("the peer cannot read this process's memory; its log says why")
        return meet(link.stream, shm_wire.Seal(address, link.marks.server))

    def close(self) -> None:
        super().close()
        self._seals.close()
