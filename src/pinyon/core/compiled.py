"""Whether the pure rooms run as machine code (``./dev build``, the container image) or as Python."""

from __future__ import annotations

from typing import Final

from pinyon import __version__

__all__ = ["compiled", "in_loops", "version_line"]

_COMPILED: Final = not __file__.endswith(".py")
LOOPED_MAX = 8
"""In Python an operation on arrays takes as long as a loop over so many."""


def compiled() -> bool:
    """Of all modules that mypyc compiles this one speaks for the others: they are compiled together or not at all."""
    return _COMPILED


def in_loops(count: int) -> bool:
    """Whether so many are looked at one by one in less time than by operations on arrays."""
    return _COMPILED or count <= LOOPED_MAX


def version_line() -> str:
    """What ``--version`` prints."""
    return f"pinyon {__version__} ({'compiled' if compiled() else 'Python'})"
