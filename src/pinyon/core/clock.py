"""Clocks. Pure modules take ``now_s`` values; edges that need a source of time take a :class:`Clock`."""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]
"""A source of monotonic seconds. Production passes ``time.monotonic``, tests pass their own."""
