"""Random numbers without a generator's state: a request that goes on elsewhere draws the same numbers."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from mypy_extensions import i64

from pinyon.core.compiled import compiled

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_NATIVE_MAX: Final = 1 << 62

# The same constants as signed 64-bit numbers; the masks cut off the sign bits that a right shift brings in.
_SIGNED_GOLDEN: Final = _GOLDEN - (1 << 64)
_FIRST: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND: Final = 0x94D049BB133111EB - (1 << 64)
_LOW_34: Final = (1 << 34) - 1
_LOW_37: Final = (1 << 37) - 1
_LOW_33: Final = (1 << 33) - 1
_LOW_53: Final = (1 << 53) - 1


def uniform(seed: int, index: int) -> float:
    """Returns a number in ``[0, 1)`` with 53 random bits: SplitMix64's finaliser over seed, then seed and index.

    Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators (OOPSLA 2014). Neighbouring seeds are mixed
    before the index is added, so ``(seed, index + 1)`` and ``(seed + golden, index)`` do not collide."""
    mixed = _mixed(seed)
    if compiled() and 0 <= index < _NATIVE_MAX:
        return _native(mixed, index)
    return (_mix(mixed + (index + 1) * _GOLDEN) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@lru_cache(maxsize=4096)
def _mixed(seed: int) -> int:
    """Returns the mixed seed as a signed number, cached because a request has the same seed for all its tokens."""
    mixed = _mix(seed)
    return mixed - (1 << 64) if mixed >> 63 else mixed


def _native(mixed: i64, index: i64) -> float:
    """Returns the same as :func:`uniform`, in compiled arithmetic, which wraps where Python's does not."""
    value = mixed + (index + 1) * i64(_SIGNED_GOLDEN) + i64(_SIGNED_GOLDEN)
    value = (value ^ ((value >> 30) & i64(_LOW_34))) * i64(_FIRST)
    value = (value ^ ((value >> 27) & i64(_LOW_37))) * i64(_SECOND)
    value ^= (value >> 31) & i64(_LOW_33)
    return float((value >> 11) & i64(_LOW_53)) * 2.0**-53
