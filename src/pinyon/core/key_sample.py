"""The sample of block keys that the conductor is told of: those of every n-th block of a prompt.

Keys are chained, so a holder of a block of a prefix nearly always has the blocks before it. A key tells its block's
place (:mod:`pinyon.core.block_keys`): the sample of one in ``every`` has the keys of blocks ``every - 1``, ``2 * every
- 1`` and so on. Samples nest: a sample is part of every denser one, so reporters and readers may use different ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from librt.strings import BytesWriter, read_i64_le, write_i64_le
from mypy_extensions import i64
from numpy.typing import NDArray

from pinyon.core.block_keys import KEY_BYTES, BlockKey
from pinyon.core.compiled import compiled

EVERY_MAX: Final = 64
_PLACE: Final = 15
"""The byte of a key that tells its place."""


def sample_every(stride_tokens: int, block_tokens: int) -> int:
    """Returns the largest sampling distance whose samples are at most ``stride_tokens`` tokens apart, at least 1."""
    return min(EVERY_MAX, 1 << max(0, (stride_tokens // block_tokens).bit_length() - 1))


def is_sample(every: int) -> bool:
    """Returns whether ``every`` is a valid sampling distance."""
    return 1 <= every <= EVERY_MAX and not every & (every - 1)


def key_sample(packed_keys: bytes, every: int, first: int = 0) -> bytes:
    """Returns the sampled keys, packed, from the ``first`` block on."""
    if compiled() and every > 1:
        return _in_loop(packed_keys, every, first)
    if first:
        packed_keys = packed_keys[first * KEY_BYTES :]
    if every == 1 or not packed_keys:
        return packed_keys
    places = np.frombuffer(packed_keys, np.uint8)[_PLACE::KEY_BYTES]
    chosen: NDArray[np.bool_] = places & np.uint8(every - 1) == 0
    return np.frombuffer(packed_keys, f"V{KEY_BYTES}")[chosen].tobytes()


def _in_loop(packed_keys: bytes, every: i64, first: i64) -> bytes:
    sample, others = BytesWriter(), every - 1
    size: i64 = len(packed_keys)
    at: i64 = 0
    if first == 0:  # keys that are a sample already are not copied
        while at < size and not i64(packed_keys[at + _PLACE]) & others:
            at += KEY_BYTES
        if at >= size:
            return packed_keys
    for at in range(first * KEY_BYTES, size, KEY_BYTES):
        high = read_i64_le(packed_keys, at + 8)
        if not high >> 8 * (_PLACE - 8) & others:
            write_i64_le(sample, read_i64_le(packed_keys, at))
            write_i64_le(sample, high)
    return sample.getvalue()


def sampled_keys(keys: Sequence[BlockKey], every: int) -> Sequence[BlockKey]:
    """Returns the sample of keys that are not packed."""
    others = every - 1
    return [key for key in keys if not key[_PLACE] & others] if others else keys
