"""How this program was called, for lines that people copy."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from pinyon.runtime.arguments import module_as_typed

__all__ = ["called_as"]


def called_as() -> str:
    """``pinyon`` where a shell finds it, else its path as it was typed."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return module_as_typed("pinyon.cli")
    found = shutil.which("pinyon")
    if called.name != "pinyon" or (found and Path(found).absolute() == called.absolute()):
        return "pinyon"
    return sys.argv[0]
