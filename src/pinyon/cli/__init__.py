"""The commands that people type: ``pinyon instances``, ``generate``, ``admin``, ``certs``, ``topology`` and so on."""

from pinyon.cli.main import main

__all__ = ["main"]
