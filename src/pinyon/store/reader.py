"""Reads of blocks of another process, a store node or a worker: Acquire, transfer READ, Release.

A reader may use the bytes only if the lease covered the whole read: afterwards the holder may write something else
there. The reader counts the lease from *before* its request and the holder from after it, so the reader's lease ends
first. The reader looks at the clock *after* the bytes arrived, so a reader that was frozen meanwhile uses nothing.

What arrived is checked against the checksums that were computed when it was put. Bytes that do not match are a miss."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pinyon.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from pinyon.core.block_keys import BlockKey, pack_keys
from pinyon.core.clock import Clock
from pinyon.core.errors import DeadlineExceeded, InvalidArgument, PinyonError
from pinyon.core.request import UNKNOWN_CLASS, RequestClass
from pinyon.messages.request_class import class_to_proto
from pinyon.messages.segment import segment_from_proto
from pinyon.runtime.logging import get_logger
from pinyon.runtime.tasks import ended
from pinyon.store.background import Background
from pinyon.store.checksums import all_checksums, in_host_memory
from pinyon.store.kv_memory import Pieces, RemotePiece, part_of, side_by_side
from pinyon.store.kv_object import CHECKSUM_BYTES, PARTS_MAX
from pinyon.store.node_channels import NodeChannels
from pinyon.transfer import Opcode, TransferEngine, TransferRequest, TransferResult

_log = get_logger("reader")

MAX_KEYS = 4096
"""The largest number of keys in one Acquire or PutStart."""
PIECES_MAX = 32768
"""The largest number of pieces that are moved at once: half of what the transfer engine takes."""
LAYERS_MAX = 1024
"""The largest number of layers that a holder may describe."""
RELEASE_S = 2.0
"""The seconds after which a Release is abandoned: the lease ends by itself."""
LEASE_SLACK_S = 0.25
"""The seconds of lease asked for beyond the read's deadline: a slow answer must not make a good read worthless."""
RENEW_PAUSE_S = 0.05
LEASE_S = 4.0
"""The longest lease asked for at once, in seconds. A longer read renews it; a dead reader does not."""


class PartRange(NamedTuple):
    """A range of the equal parts that objects were put with (layers, say): ``number`` of ``of``, from ``first`` on."""

    first: int = 0
    number: int = 1
    of: int = 1


WHOLE = PartRange()


class Mover(Protocol):
    """The mover of the bytes: :class:`pinyon.transfer.TransferEngine`, or an observer that watches them arrive."""

    async def transfer_async(
        self, requests: Sequence[TransferRequest], timeout_s: float | None = None
    ) -> list[TransferResult]:
        """Returns one result per request. When it returns or raises, nothing moves any more."""
        ...


class ReadResult(NamedTuple):
    leading: int
    """The number of blocks, from the first one on and without a gap, that have arrived completely."""
    worked: bool | None
    """True if the holder kept its word (a miss is fine); False if it answers, but its bytes do not come.

    None if nothing was learned: no time was left to ask, the answer was handled after the lease, or the holder withdrew
    its key. The last counts as a miss: the holder's lease is over, or the holder restarted."""

    def raise_for_failure(self) -> None:
        """Raises :class:`DeadlineExceeded` if the bytes did not come."""
        if self.worked is False:
            raise DeadlineExceeded("the bytes did not come")


@dataclass(slots=True)
class _Lease:
    """A lease of a read, and its end by the reader's clock."""

    address: str
    lease_id: int
    end_s: float
    corrupt: Sequence[int] = ()
    """The places among its blocks of those that arrived with other bytes."""


def objects_at_once(pieces: Pieces) -> int:
    """Returns how many objects that lie in as many pieces as this one are moved by one call."""
    return max(1, min(MAX_KEYS, PIECES_MAX // max(1, len(pieces))))


@dataclass(frozen=True, slots=True)
class ReadTerms:
    """The terms of a read, which its holder gets besides the keys.

    The first key is block ``first_block`` of the request's prompt."""

    request_id: str = ""
    traceparent: str = ""
    request_class: RequestClass = UNKNOWN_CLASS
    first_block: int = 0


class BlockReader:
    """A reader of leased blocks into registered local memory. One per process; ``close`` it."""

    def __init__(self, engine: TransferEngine, channels: NodeChannels, *, clock: Clock = time.monotonic) -> None:
        """Takes ``channels``, which may be shared and are closed by their owner."""
        self._engine = engine
        self._channels = channels
        self._clock = clock
        self.duties = Background()
        """The questions and releases under way."""
        self.corrupt = 0
        """The number of blocks that arrived with other bytes than were put; each was a miss."""

    async def close(self) -> None:
        """Waits for the releases under way."""
        await self.duties.close(RELEASE_S)

    async def read(
        self,
        address: str,
        keys: Sequence[BlockKey],
        places: Sequence[Pieces],
        block_bytes: int,
        timeout_s: float,
        *,
        terms: ReadTerms = ReadTerms(),  # a value
        arrivals: Mover | None = None,
        parts: PartRange = WHOLE,
    ) -> ReadResult:
        """Reads block ``keys[i]`` of the holder at ``address`` into the memory ``places[i]``, up to a gap.

        All places have as many pieces, with ``block_bytes`` in all: those of a whole object, or of some ``parts`` of
        objects that were put with so many. What arrives is checked against the checksums that the holder has.

        If given, ``arrivals`` moves the bytes instead of the engine, for a caller that uses parts of a read before its
        end. Where a block did not arrive, the target may hold anything. When this returns or raises (cancelled, too),
        nothing writes there any more. Raises Unavailable, DeadlineExceeded, … if the holder cannot be asked.
        Then no block counts as arrived, even if some of more than ``MAX_KEYS`` keys were read before."""
        if len(keys) != len(places):
            raise InvalidArgument("one place per key is needed", field="places")
        deadline = self._clock() + timeout_s
        leading = 0
        worked: bool | None = None
        at_once = objects_at_once(places[0]) if places else 1
        for start in range(0, len(keys), at_once):
            part = slice(start, start + at_once)
            request = kvstore_pb2.AcquireRequest(
                keys=pack_keys(keys[part]),
                request_id=terms.request_id,
                traceparent=terms.traceparent,
                request_class=class_to_proto(terms.request_class),
                first_block=terms.first_block + start,
            )
            self._channels.reads[address] += len(keys[part])
            try:
                got = await self._read_part(address, request, places[part], block_bytes, deadline, arrivals, parts)
            finally:
                self._channels.reads[address] -= len(keys[part])
                if not self._channels.reads[address]:
                    del self._channels.reads[address]
            leading += got.leading
            worked = worked if got.worked is None else got.worked
            if not got.worked or got.leading < len(keys[part]):
                break
        return ReadResult(leading, worked)

    async def _read_part(
        self,
        address: str,
        request: kvstore_pb2.AcquireRequest,
        places: Sequence[Pieces],
        block_bytes: int,
        deadline: float,
        arrivals: Mover | None,
        parts: PartRange,
    ) -> ReadResult:
        nothing, unknown = ReadResult(0, worked=True), ReadResult(0, worked=None)
        asked = self._clock()
        left_s = deadline - asked
        if left_s <= 0:
            return unknown
        request.lease_ms = round(min(left_s + LEASE_SLACK_S, LEASE_S) * 1000)
        reply: kvstore_pb2.AcquireResponse = await self.duties.answer(
            "acquire",
            self._call(address, "Acquire", request, left_s),
            "release",
            lambda reply: self._release(_Lease(address, reply.lease_id, asked)),
        )
        if not reply.lease_id:
            return nothing
        lease = _Lease(address, reply.lease_id, asked + reply.lease_ms / 1000)
        try:
            requests, sums = _plan(reply, places, block_bytes, parts)
            left_s = deadline - self._clock()
            if not requests:
                return nothing
            if left_s <= 0:
                return unknown
            if arrivals is None:
                seen = all(sums) and in_host_memory(requests, self._engine.view)
                moving = self._engine.transfer_async(requests, left_s, checksum=not seen)
            else:  # its caller uses parts of blocks, which have no checksum of their own
                moving = arrivals.transfer_async(requests, left_s)
            results = await self._renewed(lease, moving, left_s)
            if self._clock() >= lease.end_s:
                return unknown
            good = next((number for number, result in enumerate(results) if not result.ok), len(results))
            leading = sum([each.length for each in requests[:good]]) // block_bytes
            lease.corrupt = await self._changed(places[:leading], sums[:leading], block_bytes)
            if lease.corrupt:
                self.corrupt += len(lease.corrupt)
                _log.error("%d blocks of %s arrived with other bytes than were put", len(lease.corrupt), address)
                # One block has changed where it lay; several come over a path that is not to be trusted.
                return ReadResult(lease.corrupt[0], worked=len(lease.corrupt) == 1)
        finally:
            self.duties.run(self._release(lease), "release")
        if good == len(results):
            return ReadResult(leading, worked=True)
        worked = None if all(result.ok or result.reason.is_stale for result in results) else False
        return ReadResult(leading, worked)

    async def _renewed(
        self, lease: _Lease, moving: Awaitable[list[TransferResult]], timeout_s: float
    ) -> list[TransferResult]:
        """Waits for what moves the bytes, and renews the lease as long as that takes."""
        if self._clock() + timeout_s <= lease.end_s:
            return await moving
        renewing = asyncio.ensure_future(self._renew(lease))
        try:
            return await moving
        finally:
            await ended(renewing)

    async def _renew(self, lease: _Lease) -> None:
        """Renews a lease halfway to its end, until it is over or this is cancelled."""
        while (left_s := lease.end_s - self._clock()) > 0:
            await asyncio.sleep(max(RENEW_PAUSE_S, left_s / 2))
            request = kvstore_pb2.RenewRequest(lease_id=lease.lease_id, lease_ms=round(LEASE_S * 1000))
            asked = self._clock()
            try:
                reply = await self._call(lease.address, "Renew", request, max(0.001, lease.end_s - asked))
            except PinyonError as error:
                _log.info("a lease of %s was not renewed: %s", lease.address, error.message)
                continue
            if not reply.lease_ms:
                return
            lease.end_s = asked + reply.lease_ms / 1000

    async def _changed(self, places: Sequence[Pieces], sums: Sequence[bytes], block_bytes: int) -> list[int]:
        """Returns the numbers of the blocks that do not match their checksums, where there are some."""
        known = [number for number, each in enumerate(sums) if each]
        counts = [len(sums[number]) // CHECKSUM_BYTES for number in known]
        found = await all_checksums([places[number] for number in known], counts, block_bytes, self._engine.view)
        pairs = zip(known, found, strict=True)
        return [number for number, each in pairs if each is not None and each != sums[number]]

    async def _call(self, address: str, method: str, request: Any, timeout_s: float) -> Any:
        return await self._channels.call(address, kvstore_pb2_grpc.BlockReadServiceStub, method, request, timeout_s)

    async def _release(self, lease: _Lease) -> None:
        """Releases the lease. If this fails, the lease expires."""
        if lease.lease_id:
            request = kvstore_pb2.ReleaseRequest(lease_id=lease.lease_id, corrupt=lease.corrupt)
            await self._call(lease.address, "Release", request, RELEASE_S)


def _plan(
    reply: kvstore_pb2.AcquireResponse, places: Sequence[Pieces], block_bytes: int, parts: PartRange
) -> tuple[list[TransferRequest], list[bytes]]:
    """Returns a READ for each piece of each leading key that is held, up to the first implausible part of the answer.

    Also returns what is to be read of each block's checksums; empty, if the holder knows none."""
    try:
        segment = segment_from_proto(reply.segment)
    except PinyonError:
        segment = None
    if segment is None or not segment.regions:
        return [], []
    layers = reply.layers
    if (
        len(layers) > LAYERS_MAX
        or len(layers) * len(places) > 2 * PIECES_MAX
        or any(each.region >= len(segment.regions) for each in layers)
    ):
        return [], []
    object_bytes, start = block_bytes * parts.of // parts.number, block_bytes * parts.first // parts.number
    wanted = slice(CHECKSUM_BYTES * parts.first, CHECKSUM_BYTES * (parts.first + parts.number))
    requests: list[TransferRequest] = []
    sums: list[bytes] = []
    for position, (block, pieces) in enumerate(zip(reply.blocks, places, strict=False)):
        there = [RemotePiece(segment.regions[0], block.offset_bytes, object_bytes)]
        if layers:
            number = block.offset_bytes
            there = [
                RemotePiece(
                    segment.regions[each.region], each.base_bytes + number * each.stride_bytes, each.length_bytes
                )
                for each in layers
            ]
        fits = block.length_bytes == object_bytes == sum([each.length for each in there])
        if block.index != position or not fits or any(each.end > each.region.length for each in there):
            break
        found = block.checksums
        if parts != WHOLE:
            there = part_of(there, start, block_bytes)
            if found and len(found) != CHECKSUM_BYTES * parts.of:
                break  # it was put with other parts, so a part of it could not be checked
            found = found[wanted]
        if len(found) % CHECKSUM_BYTES or len(found) > CHECKSUM_BYTES * PARTS_MAX:
            break
        sums.append(found)
        requests += [
            TransferRequest(Opcode.READ, here.region_key, here.offset, segment, piece.region.key, piece.offset,
                            here.length)
            for here, piece in side_by_side(pieces, there)
        ]  # fmt: skip
    return requests, sums
