"""Blocks of vLLM's memory that other instances read: the ``BlockReadService`` of one rank.

Nothing is pinned for a reader. Each step says beforehand which blocks it gives new content. Leases on these end first,
and their keys are refused, so that a reader gets the old content or a miss."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from pinyon.api.kvstore.v1 import kvstore_pb2
from pinyon.core.block_keys import BlockKey
from pinyon.core.clock import Clock
from pinyon.core.errors import InvalidArgument
from pinyon.messages.checks import keys_from_proto
from pinyon.messages.segment import region_to_proto, segment_to_proto
from pinyon.paging.leases import LeaseTable
from pinyon.runtime.logging import get_logger
from pinyon.store.reader import MAX_KEYS
from pinyon.transfer import Access, Grant, TransferEngine
from pinyon.transfer.types.errors import TransferError
from pinyon.vllm.memory import EngineMemory

GRACE_S = 0.05
"""The time that a running read gets to end when its blocks get new content."""

_log = get_logger("vllm.lending")


class Lending:
    """The lent blocks. The engine's thread says what blocks hold; the event loop's thread lends."""

    def __init__(
        self, engine: TransferEngine, memory: EngineMemory, lease_s: float, max_lease_s: float, clock: Clock
    ) -> None:
        self._engine, self._memory, self._clock = engine, memory, clock
        self._lease_s, self._max_lease_s = lease_s, max_lease_s
        self._lock = threading.Lock()
        self._block_of: dict[BlockKey, int] = {}
        self._key_of: dict[int, BlockKey] = {}
        self._promised: dict[int, dict[int, BlockKey]] = {}
        """Blocks whose content is being computed, by batches."""
        self._leases: LeaseTable[int] = LeaseTable(first_id=1 + secrets.randbits(48))
        self._grants: dict[int, list[Grant]] = {}
        self._by_block: dict[int, set[int]] = {}
        """The leases on each block."""
        self._lends = True
        self._layers = [
            kvstore_pb2.LayerPlace(
                region=number, base_bytes=place.base, stride_bytes=place.stride, length_bytes=place.length
            )
            for number, place in memory.places
        ]

    def __len__(self) -> int:
        """Counts the leases."""
        return len(self._leases)

    # -- the engine's thread

    def promised(self, blocks: Iterable[tuple[BlockKey, int]]) -> dict[int, BlockKey]:
        """Notes that these blocks get their content by a step that was launched; :meth:`filled` follows."""
        batch = {block: key for key, block in blocks}
        with self._lock:
            self._promised[id(batch)] = batch
        return batch

    def filled(self, batch: dict[int, BlockKey]) -> None:
        """Notes that those of the promised blocks have their content which were not overwritten meanwhile."""
        with self._lock:
            self._promised.pop(id(batch), None)
            for block, key in batch.items():
                self._block_of[key], self._key_of[block] = block, key

    def overwritten(self, blocks: Iterable[int]) -> None:
        """Ends all that others read of these blocks. On return nobody reads them any more."""
        ended: list[Grant] = []
        with self._lock:
            for block in blocks:
                for batch in self._promised.values():
                    batch.pop(block, None)
                key = self._key_of.pop(block, None)
                if key is not None and self._block_of.get(key) == block:
                    del self._block_of[key]
                for lease_id in list(self._by_block.get(block, ())):
                    ended += self._end(lease_id)
        running = [grant for grant in ended if not self._engine.revoke_now(grant)]
        until_s = self._clock() + GRACE_S  # all of them together
        for grant in running:
            try:
                self._engine.revoke(grant, max(0.001, until_s - self._clock()))
            except TransferError:
                _log.exception("a reader cannot be shut out; it may read what is not its own")

    def forget(self) -> None:
        """Ends everything: all content is void."""
        with self._lock:
            blocks = {*self._key_of, *(block for batch in self._promised.values() for block in batch)}
        self.overwritten(blocks)

    def stop(self) -> None:
        """Lends nothing from now on."""
        self._lends = False
        self.forget()

    # -- the event loop's thread

    async def Acquire(self, request: kvstore_pb2.AcquireRequest, context: Any) -> kvstore_pb2.AcquireResponse:
        keys = keys_from_proto(request.keys, MAX_KEYS)
        if len(set(keys)) < len(keys):
            raise InvalidArgument("names a key twice", field="keys")
        lease_s = self._length_s(request.lease_ms)
        self._expire()
        with self._lock:
            held = self._held(keys, allow_gaps=request.allow_gaps) if self._lends else []
            if not held:
                return kvstore_pb2.AcquireResponse()
            lease_id = self._leases.grant([block for _, block in held], self._clock(), lease_s)
            for _, block in held:
                self._by_block.setdefault(block, set()).add(lease_id)
            self._grants[lease_id] = []
        # Beside the lock, for which steps wait. Nobody knows the keys before it is seen that the lease still holds.
        grants: list[Grant] = []
        try:
            self._open(grants, [block for _, block in held], lease_s)
        finally:
            with self._lock:
                holds = self._grants.get(lease_id) is not None and len(grants) == len(self._memory.regions)
                if holds:
                    self._grants[lease_id] = grants
                else:
                    self._end(lease_id)
            if not holds:
                for grant in grants:
                    self._engine.revoke_now(grant)
        if not holds:
            return kvstore_pb2.AcquireResponse()
        size = self._memory.kv.object_bytes
        reply = kvstore_pb2.AcquireResponse(
            lease_id=lease_id,
            lease_ms=round(1000 * lease_s),
            segment=segment_to_proto(self._engine.descriptor([])),
            blocks=[
                kvstore_pb2.BlockLocation(index=index, offset_bytes=block, length_bytes=size) for index, block in held
            ],
            layers=self._layers,
        )
        reply.segment.regions.extend([region_to_proto(grant.descriptor()) for grant in grants])
        return reply

    def _length_s(self, asked_ms: int) -> float:
        return min(asked_ms / 1000 if asked_ms else self._lease_s, self._max_lease_s)

    async def Renew(self, request: kvstore_pb2.RenewRequest, context: Any) -> kvstore_pb2.RenewResponse:
        lease_s, lease_id = self._length_s(request.lease_ms), request.lease_id
        with self._lock:
            grants = self._grants.get(lease_id, [])
            renewed = bool(grants) and self._leases.renew(lease_id, self._clock(), lease_s)
            renewed = renewed and all(self._engine.extend(grant, lease_s) for grant in grants)
        return kvstore_pb2.RenewResponse(lease_ms=int(1000 * lease_s) if renewed else 0)

    async def Release(self, request: kvstore_pb2.ReleaseRequest, context: Any) -> kvstore_pb2.ReleaseResponse:
        with self._lock:
            grants = self._end(request.lease_id)
        for grant in grants:
            await self._engine.revoke_async(grant)
        self._expire()
        return kvstore_pb2.ReleaseResponse(released=bool(grants))

    def _held(self, keys: Sequence[BlockKey], *, allow_gaps: bool) -> list[tuple[int, int]]:
        held: list[tuple[int, int]] = []
        for index, key in enumerate(keys):
            block = self._block_of.get(key)
            if block is not None:
                held.append((index, block))
            elif not allow_gaps:
                break
        return held

    def _open(self, grants: list[Grant], blocks: Sequence[int], lease_s: float) -> None:
        """Adds a key for each region, to the layers of these blocks that lie there."""
        for number, region in enumerate(self._memory.regions):
            ranges = [
                (place.base + block * place.stride, place.length)
                for at, place in self._memory.places
                if at == number
                for block in blocks
            ]
            grants.append(self._engine.grant(region, ranges, Access.READ, lifetime_s=lease_s))

    def _end(self, lease_id: int) -> list[Grant]:
        """Forgets a lease; returns the keys that must be revoked."""
        for block in self._leases.release(lease_id) or ():
            leases = self._by_block.get(block)
            if leases is not None:
                leases.discard(lease_id)
                if not leases:
                    del self._by_block[block]
        return self._grants.pop(lease_id, [])

    def _expire(self) -> None:
        """Forgets leases whose time is up; the transfer engine refuses their keys by itself."""
        with self._lock:
            grants = [grant for lease_id in self._leases.overdue(self._clock()) for grant in self._end(lease_id)]
        for grant in grants:
            self._engine.revoke_now(grant)
