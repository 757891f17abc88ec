"""Whether the pure rooms run as machine code (``./dev build``, the container image) or as Python."""

from __future__ import annotations

from pinyon import __version__

__all__ = ["compiled", "version_line"]


def compiled() -> bool:
    """Of all modules that mypyc compiles this one speaks for the others: they are compiled together or not at all."""
    return not __file__.endswith(".py")


def version_line() -> str:
    """What ``--version`` prints."""
    return f"pinyon {__version__} ({'compiled' if compiled() else 'Python'})"
