"""Checksums of KV objects, from the put to whoever uses what was read: XXH3 with 64 bits, big-endian.

An object has one checksum, or one for each of its equal parts (its layers, say), so that a part can be read alone. The
writer computes them from the memory in which the object was made. The node keeps them. The reader computes them from
the memory in which the object arrived. So bytes that change on any way, or in any tier, are found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from xxhash import xxh3_64, xxh3_64_digest

from pinyon.store.kv_memory import Pieces
from pinyon.transfer import TransferRequest

AT_ONCE_BYTES = 1 << 20
"""The bytes that are checked on the event loop, within 0.15 ms; more bytes are checked in a thread."""

ViewOf = Callable[[bytes], memoryview | None]
"""A function that returns the bytes of a region by its key; None if they are not in host memory."""


def in_host_memory(requests: Sequence[TransferRequest], view_of: ViewOf) -> bool:
    """Returns whether the local bytes of all requests can be seen, so that their objects' checksums can be computed."""
    return all(view_of(key) is not None for key in {each.local for each in requests})


def checksums_of(pieces: Pieces, view_of: ViewOf, parts: int = 1) -> bytes | None:
    """Returns the packed checksums of the parts of an object that lies in these pieces.

    Returns None if a piece is not in host memory. Raises ``ValueError`` if the parts are not equal."""
    views = []
    for key, offset, length in pieces:
        view = view_of(key)
        if view is None:
            return None
        views.append(view[offset : offset + length])
    if parts == 1 and len(views) == 1:
        return xxh3_64_digest(views[0])
    part_bytes, rest = divmod(sum([len(view) for view in views]), parts)
    if rest:
        raise ValueError(f"an object of {part_bytes * parts + rest} bytes has no {parts} equal parts")
    found, hasher, left = [], xxh3_64(), part_bytes
    for view in views:
        at = 0
        while at < len(view):
            step = min(left, len(view) - at)
            hasher.update(view[at : at + step])
            at, left = at + step, left - step
            if not left:
                found.append(hasher.digest())
                hasher.reset()
                left = part_bytes
    return b"".join(found)


async def all_checksums(
    objects: Sequence[Pieces], parts: Sequence[int], object_bytes: int, view_of: ViewOf
) -> list[bytes | None]:
    """Returns :func:`checksums_of` for each object, without keeping the event loop from others for long.

    If cancelled, the memory may be read for some milliseconds more."""

    def compute() -> list[bytes | None]:
        return [checksums_of(pieces, view_of, count) for pieces, count in zip(objects, parts, strict=True)]

    if len(objects) * object_bytes <= AT_ONCE_BYTES:
        return compute()
    return await asyncio.to_thread(compute)
