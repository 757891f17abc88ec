"""Streaming a prompt's KV into the decode instance's memory while it is being computed (Mooncake §3.1 step 3).

As each layer of a chunk is in the pool, the engine's thread submits its WRITEs; the event loop awaits them when the
last chunk is done. Submitting never blocks and never raises into the engine: a failure is kept for :meth:`Push.finish`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence

from pinyon.core.errors import PinyonError, Unavailable
from pinyon.core.layout import KvLayout
from pinyon.messages.orders import PushTarget
from pinyon.transfer import Opcode, TransferEngine, TransferRequest, TransferStatus, raise_for_failure

PushRange = tuple[int, int, int]
"""``(offset here, offset there, length)`` in bytes."""

_ANSWERED = (TransferStatus.COMPLETED, TransferStatus.REFUSED)


class SendingFailed(Unavailable):
    """The decode instance did not take the KV."""


def whole_blocks(
    layout: KvLayout, table: Sequence[int], target: PushTarget, first: int, end: int
) -> Iterator[PushRange]:
    """Blocks ``[first, end)`` of the prompt with all layers; those the target holds already are left out."""
    size = layout.block_bytes
    for block in range(max(first, target.first_block), end):
        yield table[block] * size, target.offsets[block - target.first_block], size


def layer_ranges(
    layout: KvLayout, table: Sequence[int], target: PushTarget, layer: int, start: int, end: int
) -> Iterator[PushRange]:
    """One layer of the tokens ``[start, end)``; those in blocks the target holds already are left out."""
    size, tokens = layout.block_bytes, layout.block_tokens
    for block in range(max(start // tokens, target.first_block), layout.blocks_for(end)):
        base = block * tokens
        here, there = table[block] * size, target.offsets[block - target.first_block]
        for offset, length in layout.ranges(layer, max(start - base, 0), min(end - base, tokens)):
            yield here + offset, there + offset, length


class Push:
    """One prompt's WRITEs. ``table`` is the prompt's block table here; it must stay referenced until the push ended."""

    def __init__(
        self,
        transfer: TransferEngine,
        region_key: bytes,
        layout: KvLayout,
        table: Sequence[int],
        target: PushTarget,
        timeout_s: float,
    ) -> None:
        self._group = transfer.group()
        self._region_key = region_key
        self._layout = layout
        self._table = table
        self._target = target
        self._timeout_s = timeout_s
        self._stopped = False
        self._submitting = threading.Lock()
        self._error: PinyonError | None = None
        self.bytes = 0
        """Bytes submitted."""

    def blocks(self, first: int, end: int) -> None:
        """Send whole blocks whose content is complete."""
        self._submit(whole_blocks(self._layout, self._table, self._target, first, end))

    def layer(self, layer: int, start: int, end: int) -> None:
        """Send one layer of tokens. Called in the engine's thread, in the middle of a step."""
        self._submit(layer_ranges(self._layout, self._table, self._target, layer, start, end))

    def _submit(self, ranges: Iterable[PushRange]) -> None:
        if self._stopped or self._error is not None:
            return
        key, segment, remote = self._region_key, self._target.segment, self._target.region_key
        requests = [
            TransferRequest(Opcode.WRITE, key, here, segment, remote, there, length) for here, there, length in ranges
        ]
        if not requests:
            return
        with self._submitting:
            if self._stopped:
                return
            try:
                self._group.submit(requests, self._timeout_s)
            except PinyonError as error:
                self._error = error
                return
        self.bytes += sum(request.length for request in requests)

    async def finish(self) -> None:
        """Wait until all of it has arrived.

        Raises:
            TransferError: a part of it did not.
        """
        results = await self._group.wait_async()
        if self._error is not None:
            raise self._error
        raise_for_failure(results)

    @property
    def error(self) -> PinyonError | None:
        """Why nothing more is sent, if something could not be submitted."""
        return self._error

    async def stop(self, grace_s: float) -> bool:
        """Send nothing more and wait until no WRITE is under way; after ``grace_s`` seconds the rest is aborted.

        Whether each was answered by the target: if not, bytes may still lie in a socket buffer. What the engine's
        thread submits from now on, in a step that is still going on, is dropped.
        """
        with self._submitting:
            self._stopped = True
        results = await self._group.wait_async(grace_s)
        return all(result.status in _ANSWERED for result in results)
