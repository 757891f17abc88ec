"""The way that this program was called, and what else is there, for lines that people copy."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

from pinyon.runtime.arguments import module_as_typed


def called_as() -> str:
    """Returns ``pinyon`` where a shell finds it, else its path as it was typed."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return module_as_typed("pinyon.cli")
    found = shutil.which("pinyon")
    if called.name != "pinyon" or (found and Path(found).absolute() == called.absolute()):
        return "pinyon"
    return sys.argv[0]


def has_dev() -> bool:
    """Returns whether ``./dev``, which starts suites, is there: in checkouts, but not in container images."""
    return importlib.util.find_spec("launch") is not None
