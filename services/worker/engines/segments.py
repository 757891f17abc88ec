"""Softmax over keys in segments of a fixed length, each on its own, merged in one order.

Segment ``s`` holds the positions ``[s * SEGMENT_TOKENS, (s + 1) * SEGMENT_TOKENS)``. A query at position ``p`` sees
all of the segments before its own, and of its own as many keys as :func:`last_length` says: a function of ``p`` alone,
and so are the shapes of all its products. Of each segment it has the highest score, the sum of ``exp(score - highest)``
and the output weighted by the same; how they become one softmax depends on their number only. So it makes no difference
to a query's bits which queries a segment was read for.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.worker.engines.blas import TILE

_F32 = npt.NDArray[np.float32]

SEGMENT_TOKENS = 256
"""Keys of a segment, a multiple of :data:`LENGTH_STEP`. A query's bits depend on it, so all processes that exchange KV
need the same. Longer ones share fewer calls of NumPy's, shorter ones stay in the second-level cache beside their scores
and are shared more often."""

LENGTH_STEP = 64
"""A query's last segment is padded to a multiple of this. A prompt's queries are computed in panels of as many
positions."""

_ELEMENTS = [np.dtype((np.void, 4 * lanes)) for lanes in range(TILE + 1)]
"""By float32 in each."""

_ABREAST = 32
"""Keys whose sums are taken side by side."""


def last_length(position: int) -> int:
    """Keys in the products of a query at ``position`` with its last segment."""
    return (position % SEGMENT_TOKENS // LENGTH_STEP + 1) * LENGTH_STEP


def blocks_of_lanes(array: _F32, lanes: int) -> npt.NDArray[np.void]:
    """A view of the last axis as elements of so many lanes each, what is left over cut off: copied as one element, few
    lanes are copied several times as fast as one by one."""
    if left_over := array.shape[-1] % lanes:
        array = array[..., :-left_over]
    return array.view(_ELEMENTS[lanes])


def exp_of_softmax(scores: _F32) -> tuple[_F32, _F32]:
    """``exp(scores - their highest)`` in place over ``(..., length, lanes)``; returns the highest ones and the sums
    over the keys, ``(..., 1, lanes)`` each.

    ``_ABREAST`` keys are taken side by side: long inner loops, and still one fixed order of sums.
    """
    *outer, length, lanes = scores.shape
    wide = scores.reshape(-1, length // _ABREAST, _ABREAST * lanes)
    highest = _reduce_keys(np.maximum, wide, lanes)
    wide -= np.repeat(highest, _ABREAST, axis=1).reshape(-1, 1, _ABREAST * lanes)
    np.exp(wide, out=wide)
    shape = (*outer, 1, lanes)
    return highest.reshape(shape), _reduce_keys(np.add, wide, lanes).reshape(shape)


def _reduce_keys(operation: np.ufunc, wide: _F32, lanes: int) -> _F32:
    """``(n, length / 32, 32 * lanes)`` over all keys: ``(n, 1, lanes)``.

    First over the multiples of 32, then 4 by 4 and the rest. Each step runs over an outer axis, where NumPy goes one by
    one in order: the order of the sums depends on the length only.
    """
    folded = operation.reduce(wide, axis=1)
    folded = operation.reduce(folded.reshape(-1, 8, 4 * lanes), axis=1)
    result: _F32 = operation.reduce(folded.reshape(-1, 4, lanes), axis=1, keepdims=True)
    return result


def merge(parts: _F32) -> _F32:
    """The output of one softmax over all segments, ``(..., head_dim, lanes)``; ``parts`` is overwritten.

    ``parts``: ``(segments, ..., head_dim + 2, lanes)``, contiguous: the output of each, below it the sum that it is to
    be divided by, and the highest score. They are added one segment after the other, in order: the axis is not the
    innermost.
    """
    segments, *shape = parts.shape
    total = parts[0]
    if segments > 1:
        highest = parts[..., -1:, :]
        weights = highest - np.maximum.reduce(highest, axis=0)
        np.exp(weights, out=weights)
        flat = parts.reshape(segments, -1)
        # Repeated, as broadcasting would make NumPy's inner loops as short as there are lanes.
        flat *= np.repeat(weights, shape[-2], axis=-2).reshape(segments, -1)
        total = np.add.reduce(flat, axis=0).reshape(shape)
    result: _F32 = total[..., :-2, :] / total[..., -2:-1, :]
    return result
