"""What people type: ``pinyon instances``, ``pinyon generate``, ``pinyon topology``, ``pinyon transfer``."""

from pinyon.cli.main import main

__all__ = ["main"]
