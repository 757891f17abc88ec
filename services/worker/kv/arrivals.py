"""Fetched KV layer by layer: computing begins with the first layer, while the others still arrive (Mooncake §5.4.3).

The block reader asks for whole blocks and gets them. Between it and the transfer engine the read is cut into one batch
per layer, each of which can be waited for. The layers count only when the reader says so at the end: it knows whether
the lease covered all of the read."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from pinyon.core.errors import Unavailable
from pinyon.core.layout import KvLayout
from pinyon.transfer import TransferEngine, TransferHandle, TransferRequest, TransferResult

MAX_REQUESTS = 8192
"""The number of blocks × layers above which a read stays whole: each request costs microseconds."""
LAYER_WAIT_S = 0.5
"""The engine thread's longest wait for one layer, in s: the whole step waits with it."""


class LayerLost(Unavailable):
    """The error for a layer that did not arrive in time: the blocks must be computed instead."""


class LayerArrivals:
    """The :class:`pinyon.store.reader.Mover` of one read. The engine's thread calls ``wait``, the loop all else.

    The first batch is cut into layers unless it is too large; later requests of the reader come whole."""

    def __init__(self, transfer: TransferEngine, layout: KvLayout) -> None:
        self._transfer = transfer
        self._layout = layout
        self._handles: list[TransferHandle] = []
        self.first_layer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The blocks under way, when their first layer has ended (well or not); never done if the read stays whole."""
        self.stalled_s = 0.0
        """The time the engine's thread has waited."""

    async def transfer_async(
        self, requests: Sequence[TransferRequest], timeout_s: float | None = None
    ) -> list[TransferResult]:
        """Returns one result per request, as the transfer engine does: a block is here when all its layers are."""
        layers, size = self._layout.layers, self._layout.layer_bytes
        if self._handles or len(requests) * layers > MAX_REQUESTS:
            return await self._transfer.transfer_async(requests, timeout_s)
        group = self._transfer.group()
        self._handles = [
            group.submit(
                [
                    request._replace(
                        local_offset=request.local_offset + layer * size,
                        remote_offset=request.remote_offset + layer * size,
                        length=size,
                    )
                    for request in requests
                ],
                timeout_s,
            )
            for layer in range(layers)
        ]
        self._tell_first(len(requests))
        results = await group.wait_async()
        by_layer = [results[start : start + len(requests)] for start in range(0, len(results), len(requests))]
        return [next((part for part in parts if not part.ok), parts[-1]) for parts in zip(*by_layer, strict=True)]

    def _tell_first(self, blocks: int) -> None:
        loop = asyncio.get_running_loop()

        def ended() -> None:
            if not self.first_layer.done():
                self.first_layer.set_result(blocks)

        def wake(_: TransferHandle) -> None:  # in a thread of the transfer engine
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(ended)

        self._handles[0].add_done_callback(wake)

    def wait(self, layer: int) -> None:
        """Waits until the layer is here. Raises :class:`LayerLost` if it does not come."""
        handle = self._handles[layer]
        if not handle.done:
            start_s = time.perf_counter()
            handle.wait(LAYER_WAIT_S)
            self.stalled_s += time.perf_counter() - start_s
        if not all(result.ok for result in handle.results()):
            raise LayerLost(f"layer {layer} of the reused KV did not arrive")
