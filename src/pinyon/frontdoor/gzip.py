"""Decompression of request bodies with ``content-encoding: gzip``."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pinyon.frontdoor.off_loop import OffLoop
from pinyon.http.answer import HttpError
from pinyon.http.budget import Budget

INLINE_BYTES = 64 << 10
INLINE_PACKED_BYTES = 4 << 10
"""Bodies up to both sizes are inflated on the event loop, in less than 1 ms. The compressed size counts too, as empty
blocks take as long as others: 4 MiB of them took 3 s for two bytes of data."""
SLACK_BYTES = 4 << 10
"""The bytes by which a compressed body may exceed twice its inflated size; no honest encoder enlarges data so much."""
MEMBER_BYTES_MIN = 18
_GZIP = 31
"""The ``wbits`` value of zlib for gzip with a window of any size."""


class Inflater:
    """The inflating of bodies within a byte ``budget`` that is shared with arriving bodies. A body's inflated size is
    counted before it is inflated, so that a gzip bomb finds no room."""

    def __init__(self, off_loop: OffLoop, budget: Budget, limit_bytes: int) -> None:
        self._off_loop = off_loop
        self._budget = budget
        self._limit_bytes = limit_bytes

    @asynccontextmanager
    async def inflated(self, body: bytes | bytearray, holder: str) -> AsyncIterator[bytes]:
        """Yields the inflated body, counted against the budget until the end. Raises :class:`HttpError`: 400, 413, 503.

        The budget is taken for the size at the end of the gzip member; a body that inflates to another size is refused.
        """
        if len(body) < MEMBER_BYTES_MIN:
            raise _malformed()
        size = int.from_bytes(body[-4:], "little")
        if len(body) > 2 * size + SLACK_BYTES:
            raise _malformed()
        if size > self._limit_bytes:
            raise HttpError(413, f"The request's body is larger than {self._limit_bytes} bytes.")
        if not self._budget.take(size, holder):
            raise HttpError(503, "Too many large requests are arriving.", retry_after_s=1.0)
        try:
            large = size > INLINE_BYTES or len(body) > INLINE_PACKED_BYTES
            yield await self._off_loop.run_large(large, holder, _inflate, body, size)
        finally:
            self._budget.take(-size, holder)


def _inflate(body: bytes | bytearray, size: int) -> bytes:
    """Returns the data of the only member, which must have ``size`` bytes. Raises :class:`HttpError`."""
    reader = zlib.decompressobj(_GZIP)
    try:
        data = reader.decompress(body, size + 1)
        # the second call reads the stream's end and checksum, which are not data
        data += reader.decompress(reader.unconsumed_tail, size + 1 - len(data)) if len(data) <= size else b""
    except zlib.error:
        raise _malformed() from None
    if not reader.eof or reader.unused_data or len(data) != size:
        raise _malformed()
    return data


def _malformed() -> HttpError:
    return HttpError(400, "The request's body is no gzip data of one member.")
