"""shm: peers on one host. Every byte is copied once, by the process whose memory is written, out of the other's memory.

A READ is copied here and does not involve the peer's threads once it has said where the region lies; a WRITE is copied
by the peer, whom we ask over the link. So no process ever writes into another one's memory, and each checks what it
writes itself. Any buffer can be registered; nothing needs to be allocated as shared memory.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Mapping

from pinyon.transfer.chain import BAD_BYTES, GONE, LATE, LOST, NO_CONNECTION, STALLED, Chain, Outcome
from pinyon.transfer.errors import WireError
from pinyon.transfer.host.nic import Nic
from pinyon.transfer.limits import TransferLimits
from pinyon.transfer.links.dialer import Link, dial, dial_failure
from pinyon.transfer.links.endpoint_pool import EndpointPool
from pinyon.transfer.links.handshake import Service
from pinyon.transfer.links.identity import Identity
from pinyon.transfer.links.stream import DeadlineReached, Stalled
from pinyon.transfer.memory.table import MemoryTable
from pinyon.transfer.path import Path
from pinyon.transfer.request import Opcode, Reason, TransferStatus
from pinyon.transfer.segment import PeerId, SegmentDescriptor
from pinyon.transfer.stats import Meter
from pinyon.transfer.transports.shm import wire as shm_wire
from pinyon.transfer.transports.shm.cma import FETCH_BYTES, FETCH_MOVES, Move, PeerMemory, shm_available
from pinyon.transfer.transports.shm.link import Unreachable, meet
from pinyon.transfer.transports.shm.seal import Seals
from pinyon.transfer.transports.shm.server import ShmService
from pinyon.transfer.transports.tcp import wire

__all__ = ["ShmTransport", "shm_available"]

_log = logging.getLogger(__name__)

_COMPLETED = Outcome(TransferStatus.COMPLETED)
_READ_TRIES = 4
"""A READ whose regions are unregistered one after another while it runs starts again so often."""

_Key = tuple[PeerId, Path]


class _Aborted(Exception):
    """The chain was stopped or interrupted."""


class _NoEndpoint(Exception):
    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.reason.name)
        self.outcome = outcome


class _Endpoint:
    """A link to a peer, the peer's memory, and where its regions lie. One chain at a time."""

    def __init__(self, link: Link, memory: PeerMemory, max_places: int) -> None:
        self.link = link
        self.answered = False
        """Did any byte of an answer arrive for the present chain?"""
        self.aborted = False
        self._memory = memory
        self._places: dict[bytes, shm_wire.Place] = {}
        self._max_places = max_places
        self._ids = itertools.count(1)
        self._head = memoryview(bytearray(shm_wire.HEAD_BYTES))

    def abort(self) -> None:
        """Make the present exchange end soon; the endpoint is of no use afterwards. From any thread."""
        self.aborted = True
        self.link.stream.abort()

    def exchange(self, chain: Chain) -> Outcome:
        """Any exception leaves the endpoint unusable.

        Raises:
            WireError, OSError, Stalled, DeadlineReached, _Aborted
        """
        self.answered = False
        return self._read(chain) if chain.opcode is Opcode.READ else self._write(chain)

    def _write(self, chain: Chain) -> Outcome:
        slices, regions = chain.slices, chain.regions
        addresses = [regions[local].address + offset for _, local, offset, _, _, _ in slices]
        message_id = next(self._ids)
        request = shm_wire.pack_write(message_id, [part[3:] for part in slices], addresses, chain.nbytes)
        self.link.stream.send([request], chain.deadline)
        code = self._receive_answer(shm_wire.WRITE, len(slices), message_id, chain.deadline)
        refusals = None
        if code == shm_wire.SOME_REFUSED:
            refusals = self.link.receive_bytes(len(slices), chain.deadline)
            wire.check_refusals(refusals)
        return Outcome(TransferStatus.COMPLETED, Reason.NONE, refusals)

    def _read(self, chain: Chain) -> Outcome:
        for _ in range(_READ_TRIES):
            places = self._locate(chain)
            moves, nbytes, refusals = _plan_read(chain, places)
            if not moves or self._copy(
                chain, moves, nbytes, [place.seal for place in places.values() if not place.code]
            ):
                return _COMPLETED if refusals is None else Outcome(TransferStatus.COMPLETED, Reason.NONE, refusals)
            self._check(chain)
            self._places.clear()
        return LOST

    def _copy(self, chain: Chain, moves: list[Move], nbytes: int, seals: list[shm_wire.Seal]) -> bool:
        """False: some region is not what it was."""
        memory = self._memory
        if nbytes <= FETCH_BYTES and len(moves) <= FETCH_MOVES >= len(seals):
            return memory.fetch(moves, nbytes, seals)
        # Before: a region that has gone costs nothing but a question. After: what was copied was still registered.
        return (
            memory.holds(seals)
            and memory.copy(moves, nbytes, seals[0], lambda: self._check(chain))
            and (len(seals) == 1 or memory.holds(seals))
        )

    def _check(self, chain: Chain) -> None:
        if self.aborted:
            raise _Aborted
        if time.monotonic() > chain.deadline:
            raise DeadlineReached

    def _locate(self, chain: Chain) -> dict[bytes, shm_wire.Place]:
        """Where the chain's remote regions lie; asks for those that are not known yet."""
        places: dict[bytes, shm_wire.Place] = {}
        unknown: list[bytes] = []
        for key in {part.remote_region for part in chain.slices}:
            place = self._places.get(key)
            if place is None:
                unknown.append(key)
            else:
                places[key] = place
        if unknown:
            self._resolve(chain, unknown, places)
        return places

    def _resolve(self, chain: Chain, keys: list[bytes], places: dict[bytes, shm_wire.Place]) -> None:
        message_id = next(self._ids)
        self.link.stream.send([shm_wire.pack_resolve(message_id, keys)], chain.deadline)
        self._receive_answer(shm_wire.RESOLVE, len(keys), message_id, chain.deadline)
        data = self.link.receive_bytes(len(keys) * shm_wire.PLACE_BYTES, chain.deadline)
        if len(self._places) + len(keys) > self._max_places:
            self._places.clear()
        for key, place in zip(keys, shm_wire.parse_places(data, len(keys)), strict=True):
            places[key] = place
            if not place.code:
                self._places[key] = place

    def _receive_answer(self, kind: int, count: int, message_id: int, deadline: float) -> int:
        self.link.stream.receive_soon(self._head, deadline)
        self.answered = True
        return shm_wire.parse_answer(self._head, kind, count, message_id)


def _plan_read(chain: Chain, places: dict[bytes, shm_wire.Place]) -> tuple[list[Move], int, bytes | None]:
    """What to copy, neighbours joined; its bytes; the refusal codes (None = nothing refused)."""
    moves: list[Move] = []
    codes: bytearray | None = None
    regions = chain.regions
    last_local = last_key = b""
    base = there = limit = code = 0
    total = to = source = size = 0
    for position, (_, local, local_offset, key, offset, length) in enumerate(chain.slices):
        if local is not last_local:
            last_local = local
            base = regions[local].address
        if key is not last_key:
            last_key = key
            code, there, limit, _ = places[key]
        if code or offset + length > limit:
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


class ShmTransport:
    """Initiator side; its :class:`ShmService` is the other one."""

    name = "shm"

    def __init__(
        self,
        memory: MemoryTable,
        limits: TransferLimits,
        identity: Identity,
        meter: Meter,
        nics: Mapping[str, Nic],
    ) -> None:
        self.unavailable = shm_available()
        """Why this process cannot use shm at all; None if it can."""
        self.address = "" if self.unavailable else f"@pinyon-transfer-{identity.boot_id.hex()}"
        """The abstract Unix socket to listen on and to publish."""
        self._limits = limits
        self._identity = identity
        self._meter = meter
        self._seals = Seals()
        self.service = ShmService(memory, limits, meter, self._seals)
        self._lock = threading.Lock()
        self._pool: EndpointPool[_Key, _Endpoint] = EndpointPool(limits.max_endpoints, limits.connections_per_peer)
        self._told: set[str] = set()

    # --- running chains ---

    def run(self, chain: Chain, path: Path) -> Outcome:
        """One attempt; a second one when a link that sat idle turns out to have been closed by the peer."""
        while True:
            endpoint = None if chain.fence else self._lease((chain.remote.peer, path))
            idled = endpoint is not None
            if endpoint is None:
                try:
                    endpoint = self._set_up(chain.remote, path, chain.deadline, chain.fence)
                except _NoEndpoint as none:
                    return none.outcome
                chain.fence = 0  # the peer has ended that link
            if not chain.claim(endpoint.abort):
                self._release(endpoint)
                return GONE
            try:
                outcome = self._exchange(chain, endpoint)
            except BaseException:  # Ctrl-C in a blocking caller's thread, or a defect
                self._discard(endpoint)
                chain.unclaim()
                raise
            stopped = not chain.unclaim()
            if outcome is not None and outcome.status is TransferStatus.COMPLETED:
                self._release(endpoint)
                return outcome
            self._discard(endpoint)
            if chain.opcode is Opcode.WRITE:
                chain.fence = endpoint.link.id
            if outcome is not None:
                return outcome
            if stopped or endpoint.aborted or endpoint.answered or not idled:
                return LOST
            self.forget(chain.remote, path)
            with self._meter.lock:
                self._meter.retries += 1

    def _exchange(self, chain: Chain, endpoint: _Endpoint) -> Outcome | None:
        """None: the link broke, or the peer is gone."""
        try:
            return endpoint.exchange(chain)
        except Stalled:
            return STALLED
        except DeadlineReached:
            return LATE
        except WireError as error:
            _log.info("a peer broke the shm protocol: %s", error)
            return BAD_BYTES
        except _Aborted:
            return LOST
        except OSError:
            return None

    # --- endpoints ---

    def _lease(self, key: _Key) -> _Endpoint | None:
        with self._lock:
            return self._pool.lease(key)

    def _set_up(self, remote: SegmentDescriptor, path: Path, deadline: float, replaces: int) -> _Endpoint:
        """A new endpoint, in use by the caller.

        Raises:
            _NoEndpoint
        """
        key = (remote.peer, path)
        with self._lock:
            evicted = self._pool.reserve(key)
        if evicted is None:
            raise _NoEndpoint(Outcome(TransferStatus.FAILED, Reason.BUSY))
        _close(evicted)
        try:
            endpoint = self._dial(remote, deadline, replaces)
        except BaseException:
            with self._lock:
                self._pool.cancel(key)
            raise
        with self._lock:
            self._pool.add(key, endpoint)
        return endpoint

    def _dial(self, remote: SegmentDescriptor, deadline: float, replaces: int) -> _Endpoint:
        if not remote.shm or self.unavailable:
            raise _NoEndpoint(NO_CONNECTION)
        try:
            link = dial(
                remote.shm,
                expected_boot=remote.boot_id,
                service=Service.SHM,
                identity=self._identity,
                limits=self._limits,
                deadline=deadline,
                replaces=replaces,
            )
            try:
                memory = self._prove(link, min(deadline, time.monotonic() + self._limits.connect_s))
            except BaseException:
                link.stream.close(hard=True)
                raise
        except Unreachable as why:
            if str(why) not in self._told:
                self._told.add(str(why))
                _log.info("not using shm with a peer on this host: %s", why)
            raise _NoEndpoint(NO_CONNECTION) from None
        except Exception as error:
            outcome = dial_failure(error, deadline)
            if outcome is None:
                raise
            raise _NoEndpoint(outcome) from None
        return _Endpoint(link, memory, self._limits.max_regions)

    def _prove(self, link: Link, deadline: float) -> PeerMemory:
        link.stream.send([shm_wire.pack_proof(shm_wire.OK, self._seals.process)], deadline)
        proof = shm_wire.parse_proof(link.receive_bytes(shm_wire.PROOF_BYTES, deadline))
        if proof.code:
            raise Unreachable("the peer cannot read this process's memory; its log says why")
        return meet(link.stream, proof.seal)

    def _release(self, endpoint: _Endpoint) -> None:
        with self._lock:
            kept = not endpoint.aborted and self._pool.release(endpoint, time.monotonic())
            if not kept:
                self._pool.discard(endpoint)
        if not kept:
            _close([endpoint])

    def _discard(self, endpoint: _Endpoint) -> None:
        with self._lock:
            self._pool.discard(endpoint)
        _close([endpoint])

    def probe(self, remote: SegmentDescriptor, path: Path, deadline: float) -> bool:
        try:
            self._release(self._set_up(remote, path, deadline, 0))
        except _NoEndpoint as none:
            return none.outcome.reason is Reason.BUSY  # as many as may be are in use: it is alive
        return True

    def forget(self, remote: SegmentDescriptor, path: Path) -> None:
        with self._lock:
            idle = self._pool.drop((remote.peer, path))
        _close(idle)

    def maintain(self, now: float) -> None:
        with self._lock:
            idle = self._pool.expire(now, self._limits.idle_s)
        _close(idle)

    @property
    def endpoints(self) -> int:
        return self._pool.open

    def close(self) -> None:
        with self._lock:
            idle = self._pool.close()
        _close(idle)
        self._seals.close()


def _close(endpoints: list[_Endpoint]) -> None:
    for endpoint in endpoints:
        endpoint.link.stream.close(hard=True)
