"""How much a test does: enough to find what is wrong on every run, or as much as it can (``./dev test --long``)."""

from __future__ import annotations

import os

LONG = "PINYON_TEST_LONG"


def usually(count: int, *, long: int) -> int:
    """``count``, and ``long`` when the environment variable asks for it."""
    return long if os.environ.get(LONG, "") not in ("", "0") else count
