"""What people type: ``pinyon instances``, ``pinyon lookup``, ``pinyon generate``."""

from pinyon.cli.main import main

__all__ = ["main"]
