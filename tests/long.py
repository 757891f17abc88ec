"""The amount of work per test: enough to find faults on every run, or the maximum (``./dev test --long``)."""

from __future__ import annotations

import os

LONG = "PINYON_TEST_LONG"


def usually(count: int, *, long: int) -> int:
    """Returns ``count``, or ``long`` when the environment variable asks for it."""
    return long if os.environ.get(LONG, "") not in ("", "0") else count
