"""Whether the pure rooms run as machine code (``./dev build``, the container image) or as Python."""

from __future__ import annotations

from typing import Final

from pinyon import __version__

_COMPILED: Final = not __file__.endswith(".py")


def compiled() -> bool:
    """Of all modules that mypyc compiles this one speaks for the others: they are compiled together or not at all."""
    return _COMPILED


def version_line() -> str:
    """What ``--version`` prints."""
    return f"pinyon {__version__} ({'compiled' if compiled() else 'Python'})"
