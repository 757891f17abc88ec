"""The mode of the pure rooms: machine code (``./dev build``, the container image) or Python."""

from __future__ import annotations

from typing import Final

from pinyon import __version__

_COMPILED: Final = not __file__.endswith(".py")


def compiled() -> bool:
    """Returns whether this module is compiled, and so all that mypyc compiles: they are compiled together."""
    return _COMPILED


def version_line() -> str:
    """Returns the output of ``--version``."""
    return f"pinyon {__version__} ({'compiled' if compiled() else 'Python'})"
