"""Reads of blocks of another process, a store node or a worker: Acquire, transfer READ, Release.

A reader may use the bytes only if the lease covered the whole read: afterwards the holder may write something else
there. The reader counts the lease from *before* its request and the holder from after it, so the reader's lease ends
first. The reader looks at the clock *after* the bytes arrived, so a reader that was frozen meanwhile uses nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pinyon.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from pinyon.core.block_keys import BlockKey, pack_keys
from pinyon.core.clock import Clock
from pinyon.core.errors import DeadlineExceeded, InvalidArgument, PinyonError
from pinyon.core.request import UNKNOWN_CLASS, RequestClass
from pinyon.messages.request_class import class_to_proto
from pinyon.messages.segment import segment_from_proto
from pinyon.store.background import Background
from pinyon.store.kv_memory import Pieces, RemotePiece, side_by_side
from pinyon.store.node_channels import NodeChannels
from pinyon.transfer import Opcode, TransferRequest, TransferResult

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

    def __init__(self, engine: Mover, channels: NodeChannels, *, clock: Clock = time.monotonic) -> None:
        """Takes ``channels``, which may be shared and are closed by their owner."""
        self._engine = engine
        self._channels = channels
        self._clock = clock
        self.duties = Background()
        """The questions and releases under way."""

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
    ) -> ReadResult:
        """Reads block ``keys[i]`` of the holder at ``address`` into the memory ``places[i]``, up to a gap.

        All places have as many pieces, with ``block_bytes`` in all.

        If given, ``arrivals`` moves the bytes instead of the engine, for a caller that uses parts of a read before its
        end. Where a block did not arrive, the target may hold anything. When this returns or raises (cancelled, too),
        nothing writes there any more. Raises Unavailable, DeadlineExceeded, … if the holder cannot be asked.
        Then no block counts as arrived, even if some of more than ``MAX_KEYS`` keys were read before."""
        if len(keys) != len(places):
            raise InvalidArgument("one place per key is needed", field="places")
        deadline = self._clock() + timeout_s
        mover = arrivals or self._engine
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
            got = await self._read_part(address, request, places[part], block_bytes, deadline, mover)
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
        mover: Mover,
    ) -> ReadResult:
        nothing, unknown = ReadResult(0, worked=True), ReadResult(0, worked=None)
        asked = self._clock()
        left_s = deadline - asked
        if left_s <= 0:
            return unknown
        request.lease_ms = round((left_s + LEASE_SLACK_S) * 1000)
        reply: kvstore_pb2.AcquireResponse = await self.duties.answer(
            "acquire",
            self._call(address, "Acquire", request, left_s),
            "release",
            lambda reply: self._release(address, reply.lease_id),
        )
        if not reply.lease_id:
            return nothing
        lease_end = asked + reply.lease_ms / 1000
        try:
            requests = self._plan(reply, places, block_bytes)
            left_s = min(deadline, lease_end) - self._clock()
            if not requests:
                return nothing
            if left_s <= 0:
                return unknown
            results = await mover.transfer_async(requests, left_s)
            if self._clock() >= lease_end:
                return unknown
        finally:
            self.duties.run(self._release(address, reply.lease_id), "release")
        good = next((number for number, result in enumerate(results) if not result.ok), len(results))
        leading = sum([each.length for each in requests[:good]]) // block_bytes
        if good == len(results):
            return ReadResult(leading, worked=True)
        worked = None if all(result.ok or result.reason.is_stale for result in results) else False
        return ReadResult(leading, worked)

    @staticmethod
    def _plan(reply: kvstore_pb2.AcquireResponse, places: Sequence[Pieces], block_bytes: int) -> list[TransferRequest]:
        """Returns a READ for each piece of each leading key that is held, up to the first implausible part of the
        answer."""
        try:
            segment = segment_from_proto(reply.segment)
        except PinyonError:
            segment = None
        if segment is None or not segment.regions:
            return []
        layers = reply.layers
        if (
            len(layers) > LAYERS_MAX
            or len(layers) * len(places) > 2 * PIECES_MAX
            or any(each.region >= len(segment.regions) for each in layers)
        ):
            return []
        requests: list[TransferRequest] = []
        for position, (block, pieces) in enumerate(zip(reply.blocks, places, strict=False)):
            there = [RemotePiece(segment.regions[0], block.offset_bytes, block_bytes)]
            if layers:
                number = block.offset_bytes
                there = [
                    RemotePiece(
                        segment.regions[each.region], each.base_bytes + number * each.stride_bytes, each.length_bytes
                    )
                    for each in layers
                ]
            fits = block.length_bytes == block_bytes == sum([each.length for each in there])
            if block.index != position or not fits or any(each.end > each.region.length for each in there):
                break
            requests += [
                TransferRequest(Opcode.READ, here.region_key, here.offset, segment, piece.region.key, piece.offset,
                                here.length)
                for here, piece in side_by_side(pieces, there)
            ]  # fmt: skip
        return requests

    async def _call(self, address: str, method: str, request: Any, timeout_s: float) -> Any:
        return await self._channels.call(address, kvstore_pb2_grpc.BlockReadServiceStub, method, request, timeout_s)

    async def _release(self, address: str, lease_id: int) -> None:
        """Releases the lease. If this fails, the lease expires."""
        if lease_id:
            await self._call(address, "Release", kvstore_pb2.ReleaseRequest(lease_id=lease_id), RELEASE_S)
