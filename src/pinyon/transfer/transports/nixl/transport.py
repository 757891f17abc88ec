"""NIXL: READs of peers' host memory by the library that NVIDIA Dynamo and others move KV with (UCX underneath).

The initiator reads, one-sided, into a buffer of its own, checks the seal that belongs to the key, and copies the bytes
to their place. It never WRITEs: NIXL can neither take a key back at once nor end what another process writes. Without
both, the bytes of a WRITE that was given up could land in memory that serves another purpose by then. So another
transport is needed beside it, for the WRITEs and for the READs that NIXL does not make faster
(:mod:`pinyon.transfer.paths.reach`)."""

from __future__ import annotations

import logging
import mmap
import secrets
import time
from collections.abc import Iterator

import numpy as np

from pinyon.transfer.chains.chain import DONE, GONE, LOST, SHUTDOWN, Chain, ChainOutcome
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.links.dialer import Link, dial
from pinyon.transfer.links.endpoint import TryAgain
from pinyon.transfer.links.endpoints import Endpoints
from pinyon.transfer.links.handshake import Service
from pinyon.transfer.links.stream import DeadlineReached, Stalled, Stream
from pinyon.transfer.memory.region import Region
from pinyon.transfer.memory.table import SMALL_BYTES
from pinyon.transfer.transports.control import ControlEndpoint, KnownKeys
from pinyon.transfer.transports.nixl import wire
from pinyon.transfer.transports.nixl.agent import BUFFER_BYTES, Buffer, NixlAgent, NixlError
from pinyon.transfer.transports.nixl.process_state import closed_on_exec
from pinyon.transfer.transports.nixl.server import NixlServer
from pinyon.transfer.transports.nixl.wire import PROOF_S, NixlCode, NixlOp, NixlPlace, Page
from pinyon.transfer.transports.shm.wire import MAX_SPANS, SEAL_BYTES
from pinyon.transfer.types.path import Path
from pinyon.transfer.types.request import Opcode, Reason, TransferStatus
from pinyon.transfer.types.segment import SegmentDescriptor

_log = logging.getLogger(__name__)
_MOST_TOLD = 64
_PIECES = 512
"""The pieces of one READ by NIXL at most."""
_READ_TRIES = 4
"""The attempts of a READ whose keys are taken back one after another while it runs."""
_PROOF_BYTES = 64 << 10
_SLEEP_S = 0.001
"""The seconds between two checks of a READ beyond the spin limit: NIXL shows no descriptor to wait for."""
_MOST_REST_MS = 25
_LOOP_S = 0.001
"""The seconds that an event loop waits at most for a READ that should end at once."""

_Piece = tuple[bytes, int, int, Region, int]
"""A piece of a READ: key, the peer's address, bytes, region and offset here."""


class NixlEndpoint(ControlEndpoint[NixlPlace]):
    """An endpoint that reads by NIXL, for one user at a time.

    NIXL never writes into a region: its payload is copied out of ``_buffer``, so nothing can land late, whatever
    becomes of an abandoned READ. A payload larger than the buffer comes in pieces."""

    def __init__(self, context: EngineContext, link: Link, agent: NixlAgent, peer: str) -> None:
        """Takes the name of the peer's agent; ``pair`` must be called next. Raises NixlError."""
        most = context.limits.max_regions, MAX_SPANS, wire.MAX_KEYS
        super().__init__(context, link, wire.pack_request(NixlOp.TOUCH), KnownKeys(*most))
        self._agent = agent
        self._peer = peer
        self._table = context.memory
        self._page = Page(0, 0, b"")
        self._met = False
        self._places = self._keys.opened
        self._looks: dict[bytes, int] = {}
        """The prepared READ of the seal, by key."""
        self._running = 0
        """The request that was posted and has not ended; 0 if there is none."""
        self._at_once = True
        """True as long as every READ had ended when it was posted, as where the kernel copies."""
        self._buffer: Buffer | None = None
        """The buffer that a READ needs; None between READs."""
        self._seal_buffer: Buffer = agent.new_buffer(mmap.PAGESIZE)
        self._seal = self._seal_buffer.view[:SEAL_BYTES]

    # --- set-up ---

    def pair(self, deadline: float) -> None:
        """Connects the two agents, and checks that the peer has no part in a READ.

        Raises WireError, NixlError, OSError, Stalled, DeadlineReached."""
        body = self._ask(NixlOp.PAIR, self._agent.version.encode(), deadline)
        self._page, metadata = wire.parse_paired(body, self._peer)
        self._meet(metadata, deadline)
        while not self._prove(deadline):
            time.sleep((1 + secrets.randbelow(_MOST_REST_MS)) / 1000)  # perhaps both ends wait for each other
        self._give_buffer()
        self._agent.proved(self._peer, well=True)
        self.link.stream.send([wire.pack_request(NixlOp.PROVED)], deadline)

    def _meet(self, metadata: bytes, deadline: float) -> None:
        """Connects, or uses the connection that NIXL still has; makes it anew if it broke."""
        agent, again = self._agent, True
        while again:
            again = agent.meet(self._peer, metadata)
            self._met = True
            try:
                return self._read_page(SEAL_BYTES, deadline)
            except NixlError:
                agent.spoil(self._peer)
                if not again:
                    raise
                self._met = False
                agent.leave(self._peer)

    def _prove(self, deadline: float) -> bool:
        """Proves that the peer has no part in a READ: it stands still meanwhile. Returns False if it cannot now.

        Our own side takes part in no other proof meanwhile. Raises NixlError if the READ does not end."""
        if not self._agent.pairing.acquire(timeout=max(0.0, deadline - self._clock())):
            raise DeadlineReached
        try:
            code, _ = self._answer_to(NixlOp.READY, b"", deadline)
            if code is NixlCode.BUSY:
                return False
            proof = min(deadline, self._clock() + PROOF_S)
            self._at_once = True  # the READ that had to wait for the connection does not count
            for nbytes in (SEAL_BYTES, _PROOF_BYTES):
                self._read_page(nbytes, proof)
        except (DeadlineReached, Stalled):
            self._agent.proved(self._peer, well=False)
            raise NixlError("the peer's memory is not read without the peer: no RDMA, no cross-memory attach") from None
        finally:
            self._agent.pairing.release()
        return True

    def _read_page(self, nbytes: int, deadline: float) -> None:
        buffer = self._take_buffer()
        request = self._agent.prepare_one(buffer.address, self._page.address, nbytes, self._peer)
        self._complete(request, deadline)
        self._agent.release(request)
        if buffer.view[:SEAL_BYTES] != self._page.seal:
            self._agent.proved(self._peer, well=False)
            raise NixlError("what is read is not what the peer has there")

    def _ask(self, op: NixlOp, body: bytes, deadline: float) -> bytes:
        code, answer = self._answer_to(op, body, deadline)
        if code is not NixlCode.OK:
            raise NixlError(f"the peer answers {op.name} with {code.name}")
        return answer

    def _answer_to(self, op: NixlOp, body: bytes, deadline: float) -> tuple[NixlCode, bytes]:
        answer = wire.parse_answer(self._answer(wire.pack_request(op, body), wire.HEADER_BYTES, deadline), op)
        return answer.code, self._receive(answer.size, deadline) if answer.size else b""

    # --- the Endpoint's methods ---

    def exchange(self, chain: Chain) -> ChainOutcome:
        self._touch(chain.deadline)
        for _ in range(_READ_TRIES):
            refusals = self._read(chain)
            if refusals is not None:
                self._give_buffer()
                return ChainOutcome(TransferStatus.COMPLETED, Reason.NONE, bytes(refusals)) if any(refusals) else DONE
            self._keys.forget()
            self.prepare(chain)
        return LOST

    def _read(self, chain: Chain) -> bytearray | None:
        """Reads the chain. Returns a code per slice, or None if the peer has taken back what it had opened."""
        refusals = bytearray(len(chain.slices))
        pieces: list[_Piece] = []
        filled = 0
        for position, (_, local, local_offset, key, offset, length) in enumerate(chain.slices):
            code, address, _, _, spans, _ = self._known[key]
            if code or spans.holding(offset, offset + length) < 0:
                refusals[position] = code or Reason.OUT_OF_RANGE
                continue
            while length:
                if filled == BUFFER_BYTES or len(pieces) == _PIECES:
                    if not self._fetch(pieces, chain.deadline):
                        return None
                    pieces, filled = [], 0
                part = min(length, BUFFER_BYTES - filled)
                pieces.append((key, address + offset, part, chain.regions[local], local_offset))
                filled += part
                offset += part
                local_offset += part
                length -= part
        return refusals if not pieces or self._fetch(pieces, chain.deadline) else None

    def move(
        self, opcode: Opcode, region: Region, offset: int, key: bytes, remote_offset: int, nbytes: int, deadline: float
    ) -> ChainOutcome | None:
        place = self._places.get(key)
        if opcode is not Opcode.READ or place is None or nbytes > BUFFER_BYTES:
            return None
        if place.spans.holding(remote_offset, remote_offset + nbytes) < 0:
            return None
        agent = self._agent
        self._touch(deadline)
        buffer = self._take_buffer()
        request = agent.prepare_one(buffer.address, place.address + remote_offset, nbytes, self._peer)
        self._complete(request, deadline)
        agent.release(request)
        if not self._intact(key, deadline):
            self._give_buffer()
            self._keys.forget()
            return None
        stored = True
        if nbytes > SMALL_BYTES:  # pinned
            _store(region, offset, buffer, 0, nbytes)
        else:
            stored = self._table.store(region, offset, buffer.view[:nbytes])
        self._give_buffer()
        return DONE if stored else SHUTDOWN

    def begin(
        self, opcode: Opcode, region: Region, offset: int, key: bytes, remote_offset: int, nbytes: int, deadline: float
    ) -> ChainOutcome | None:
        """Does :meth:`move` on an event loop, so only where READs have ended by the time that they are posted."""
        if not self._at_once or self._agent.turn.locked():
            return None
        limit = min(deadline, self._clock() + _LOOP_S)
        try:
            return self.move(opcode, region, offset, key, remote_offset, nbytes, limit)
        except DeadlineReached:
            if limit < deadline:
                raise TryAgain("a READ by NIXL takes longer than it did") from None
            raise

    # --- what is where ---

    def _resolve(self, keys: list[bytes], deadline: float) -> Iterator[NixlPlace]:
        if not self._places:  # they were forgotten
            for request in self._looks.values():
                self._agent.release(request)
            self._looks.clear()
        body = self._ask(NixlOp.RESOLVE, b"".join(keys), deadline)
        for key, place in zip(keys, wire.parse_places(body, len(keys), self._page, self._peer), strict=True):
            if place.code:
                yield place
            elif self._agent.learn(self._peer, place, self._limits.max_regions):
                self._looks[key] = self._agent.prepare_one(
                    self._seal_buffer.address, place.seal.address, SEAL_BYTES, self._peer
                )
                yield place
            elif self._agent.renew(self._peer):
                # NIXL would confuse the region with an earlier one, which it forgets only with the connection.
                raise TryAgain("the peer has other regions than it had")
            else:
                yield NixlPlace(Reason.OTHER_TRANSPORT)

    # --- READs ---

    def _fetch(self, pieces: list[_Piece], deadline: float) -> bool:
        """Reads these pieces, which fit into the buffer, and copies each to its place; the chain holds the regions.

        Returns False, with nothing copied, if some key does not open any more what it did."""
        here: list[tuple[int, int]] = []
        buffer = self._take_buffer()
        at = buffer.address
        for _, _, nbytes, _, _ in pieces:
            here.append((at, nbytes))
            at += nbytes
        request = self._agent.prepare(here, [(address, nbytes) for _, address, nbytes, _, _ in pieces], self._peer)
        self._complete(request, deadline, len(pieces))
        self._agent.release(request)
        if not all(self._intact(key, deadline) for key in {piece[0] for piece in pieces}):
            return False
        start = 0
        for _, _, nbytes, region, offset in pieces:
            _store(region, offset, buffer, start, nbytes)
            start += nbytes
        return True

    def _take_buffer(self) -> Buffer:
        """Returns the buffer, which is still here after a READ that failed. Raises NixlError."""
        buffer = self._buffer
        if buffer is None:
            buffer = self._buffer = self._agent.take_buffer()
        return buffer

    def _give_buffer(self) -> None:
        """Gives the buffer back. No request that would write into it runs."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._agent.give_buffer(buffer)

    def _intact(self, key: bytes, deadline: float) -> bool:
        """Returns whether the key still opens the bytes that were just read."""
        self._complete(self._looks[key], deadline)
        return self._seal == self._places[key].seal.value

    def _complete(self, request: int, deadline: float, pieces: int = 1) -> None:
        """Posts the request and waits until it is done."""
        self._running = request
        try:
            if not self._agent.post(request):
                self._at_once = False
                self._wait(request, deadline)
        except NixlError:
            if pieces == 1:  # of several, others may still be on their way
                self._running = 0
                if request not in self._looks.values():
                    self._agent.release(request)
            raise
        self._running = 0

    def _wait(self, request: int, deadline: float) -> None:
        agent, clock = self._agent, self._clock
        began = clock()
        spun = began + self._limits.spin_s
        stalled = began + self._limits.stall_s
        while not agent.look(request):
            now = clock()
            if now >= deadline:
                raise DeadlineReached
            if now >= stalled:
                raise Stalled
            if now >= spun and not self._watch.is_open(_SLEEP_S):
                raise ConnectionResetError("the control link ended")

    def close(self, *, hard: bool) -> None:
        super().close(hard=hard)
        agent, running, met = self._agent, self._running, self._met
        self._running, self._met = 0, False
        looks, self._looks = self._looks, {}
        self._places.clear()
        for request in looks.values():
            if request != running:
                agent.release(request)
        buffers = (self._seal_buffer,) if self._buffer is None else (self._seal_buffer, self._buffer)
        if running:
            self._buffer = None
            agent.stray(self._peer, running, buffers)
            return
        self._give_buffer()
        agent.deregister(self._seal_buffer.registered)
        if met:
            agent.leave(self._peer)


def _store(region: Region, offset: int, buffer: Buffer, start: int, nbytes: int) -> None:
    """Copies from the buffer to a region that is pinned."""
    if nbytes > SMALL_BYTES:  # numpy lets go of the GIL meanwhile
        np.copyto(region.array[offset : offset + nbytes], buffer.array[start : start + nbytes])
    else:
        region.view[offset : offset + nbytes] = buffer.view[start : start + nbytes]


class NixlTransport(Endpoints[NixlEndpoint]):
    """The initiator's side of nixl; ``service`` is the serving side."""

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
        made: Stream | NixlEndpoint | None = None
        try:
            self._agent.check(name)
            limit = min(deadline, self._clock() + self._limits.connect_s)
            address = remote.host, remote.port
            link = dial(self._context, address, remote.boot_id, Service.NIXL, limit, replaces=replaces)
            made = link.stream
            made = endpoint = NixlEndpoint(self._context, link, self._agent, name)
            with closed_on_exec(only_tcp=True):
                endpoint.pair(limit)
        except BaseException as error:
            if made is not None:
                made.close(hard=True)
            if isinstance(error, NixlError):
                self._tell(remote, error)
            raise
        return endpoint

    def lease(self, chain: Chain, path: Path, replaces: int = 0) -> NixlEndpoint | ChainOutcome:
        """Leases as others do, but waits while a small request uses the connection to the peer: there is only one."""
        key = chain.remote.peer, path
        while not chain.done and key in self._open and not self._free.get(key):
            time.sleep(_SLEEP_S)
        return GONE if chain.done else super().lease(chain, path, replaces)

    def _tell(self, remote: SegmentDescriptor, error: NixlError) -> None:
        """Logs each reason once, up to a bound, because peers could fill a log otherwise."""
        if str(error) not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(str(error))
            _log.info("not using NIXL with %s:%d: %s", remote.host, remote.port, error)

    def maintain(self, now: float) -> None:
        super().maintain(now)
        self._agent.tend(now)
        self._agent.help()

    def close(self) -> None:
        super().close()
        self.service.close()
        self._agent.close()
