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
from pinyon.store.node_channels import NodeChannels
from pinyon.transfer import Opcode, Region, TransferRequest, TransferResult

MAX_KEYS = 4096
"""The largest number of keys in one Acquire or PutStart."""
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
        region: Region,
        offsets: Sequence[int],
        block_bytes: int,
        timeout_s: float,
        *,
        terms: ReadTerms = ReadTerms(),  # a value
        arrivals: Mover | None = None,
    ) -> ReadResult:
        """Reads block ``keys[i]`` of the holder at ``address`` to byte ``offsets[i]`` of ``region``, up to a gap.

        If given, ``arrivals`` moves the bytes instead of the engine, for a caller that uses parts of a read before its
        end. Where a block did not arrive, the target may hold anything. When this returns or raises (cancelled, too),
        nothing writes to the region any more. Raises Unavailable, DeadlineExceeded, … if the holder cannot be asked.
        Then no block counts as arrived, even if some of more than ``MAX_KEYS`` keys were read before."""
        if len(keys) != len(offsets):
            raise InvalidArgument("one offset per key is needed", field="offsets")
        deadline = self._clock() + timeout_s
        mover = arrivals or self._engine
        leading = 0
        worked: bool | None = None
        for start in range(0, len(keys), MAX_KEYS):
            part = slice(start, start + MAX_KEYS)
            request = kvstore_pb2.AcquireRequest(
                keys=pack_keys(keys[part]),
                request_id=terms.request_id,
                traceparent=terms.traceparent,
                request_class=class_to_proto(terms.request_class),
                first_block=terms.first_block + start,
            )
            got = await self._read_part(address, request, region, offsets[part], block_bytes, deadline, mover)
            leading += got.leading
            worked = worked if got.worked is None else got.worked
            if not got.worked or got.leading < len(keys[part]):
                break
        return ReadResult(leading, worked)

    async def _read_part(
        self,
        address: str,
        request: kvstore_pb2.AcquireRequest,
        region: Region,
        offsets: Sequence[int],
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
            requests = self._plan(reply, region, offsets, block_bytes)
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
        leading = next((number for number, result in enumerate(results) if not result.ok), len(results))
        if leading == len(results):
            return ReadResult(leading, worked=True)
        worked = None if all(result.ok or result.reason.is_stale for result in results) else False
        return ReadResult(leading, worked)

    @staticmethod
    def _plan(
        reply: kvstore_pb2.AcquireResponse, region: Region, offsets: Sequence[int], block_bytes: int
    ) -> list[TransferRequest]:
        """Returns a READ for each leading key that is held, up to the first implausible part of the answer."""
        try:
            segment = segment_from_proto(reply.segment)
        except PinyonError:
            segment = None
        if segment is None or not segment.regions:
            return []
        source = segment.regions[0]
        requests: list[TransferRequest] = []
        for position, (block, offset) in enumerate(zip(reply.blocks, offsets, strict=False)):
            place = block.offset_bytes
            fits = block.length_bytes == block_bytes and place + block_bytes <= source.length
            if block.index != position or not fits:
                break
            requests.append(TransferRequest(Opcode.READ, region.key, offset, segment, source.key, place, block_bytes))
        return requests

    async def _call(self, address: str, method: str, request: Any, timeout_s: float) -> Any:
        return await self._channels.call(address, kvstore_pb2_grpc.BlockReadServiceStub, method, request, timeout_s)

    async def _release(self, address: str, lease_id: int) -> None:
        """Releases the lease. If this fails, the lease expires."""
        if lease_id:
            await self._call(address, "Release", kvstore_pb2.ReleaseRequest(lease_id=lease_id), RELEASE_S)
