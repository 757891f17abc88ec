"""The stream of a prompt's KV into the decode instance's memory, while it is computed (Mooncake §3.1 step 3).

When a layer of a chunk is in the pool, the engine's thread submits its WRITEs; the event loop awaits them after the
last chunk. Submitting never blocks and never raises into the engine: a failure is kept for :meth:`Push.finish`."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence

from pinyon.core.errors import PinyonError, Unavailable
from pinyon.core.layout import KvLayout
from pinyon.messages.orders import PushTarget
from pinyon.transfer import Opcode, TransferEngine, TransferRequest, TransferStatus, raise_for_failure

PushRange = tuple[int, int, int]
"""The tuple ``(offset here, offset there, length)``, in bytes."""

_ANSWERED = (TransferStatus.COMPLETED, TransferStatus.REFUSED)


class SendingFailed(Unavailable):
    """The error when the decode instance did not take the KV."""


def whole_blocks(
    layout: KvLayout, table: Sequence[int], target: PushTarget, first: int, end: int
) -> Iterator[PushRange]:
    """Yields blocks ``[first, end)`` of the prompt with all layers, without those that the target holds already."""
    size = layout.block_bytes
    for block in range(max(first, target.first_block), end):
        yield table[block] * size, target.offsets[block - target.first_block], size


def layer_ranges(
    layout: KvLayout, table: Sequence[int], target: PushTarget, layer: int, start: int, end: int
) -> Iterator[PushRange]:
    """Yields one layer of the tokens ``[start, end)``, without those in blocks that the target holds already."""
    size, tokens = layout.block_bytes, layout.block_tokens
    for block in range(max(start // tokens, target.first_block), layout.blocks_for(end)):
        base = block * tokens
        here, there = table[block] * size, target.offsets[block - target.first_block]
        for offset, length in layout.ranges(layer, max(start - base, 0), min(end - base, tokens)):
            yield here + offset, there + offset, length


class Push:
    """The WRITEs of one prompt, whose block ``table`` here must stay referenced until the push has ended."""

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
        self.error: PinyonError | None = None
        """The reason why nothing more is sent, if something could not be submitted."""

    def blocks(self, first: int, end: int) -> None:
        """Sends whole blocks whose content is complete."""
        self._submit(whole_blocks(self._layout, self._table, self._target, first, end))

    def layer(self, layer: int, start: int, end: int) -> None:
        """Sends one layer of tokens. Called in the engine's thread, in the middle of a step."""
        self._submit(layer_ranges(self._layout, self._table, self._target, layer, start, end))

    def _submit(self, ranges: Iterable[PushRange]) -> None:
        if self._stopped or self.error is not None:
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
                self.error = error

    async def finish(self) -> None:
        """Waits until all has arrived. Raises :attr:`error` if set, or :class:`TransferError` if a part is missing."""
        results = await self._group.wait_async()
        if self.error is not None:
            raise self.error
        raise_for_failure(results)

    async def stop(self, grace_s: float) -> bool:
        """Stops sending and waits until no WRITE is under way; after ``grace_s`` seconds the rest is aborted.

        Returns whether the target answered each WRITE: if not, bytes may still lie in a socket buffer. WRITEs that the
        engine's thread submits later, in a step that goes on, are dropped."""
        with self._submitting:
            self._stopped = True
        results = await self._group.wait_async(grace_s)
        return all(result.status in _ANSWERED for result in results)
