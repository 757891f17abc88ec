"""The header fields about limits per minute, as OpenAI's clients know them."""

from __future__ import annotations

from math import ceil
from typing import Final

from pinyon.core.errors import ResourceExhausted
from pinyon.http.answer import field
from pinyon.routing.rates import Level

Levels = tuple[Level | None, Level | None]
"""The levels of requests and of tokens; None where there is no limit."""
NO_LEVELS: Final[Levels] = (None, None)


class RateLimited(ResourceExhausted):
    """The error when a tenant exceeds its limit per minute. Without ``retry_after_s``, a retry never helps."""

    def __init__(self, error: ResourceExhausted, levels: Levels) -> None:
        super().__init__(error.message, retry_after_s=error.retry_after_s)
        self.levels = levels


def rate_fields(levels: Levels) -> bytes:
    """Returns the lines ``x-ratelimit-{limit,remaining,reset}-{requests,tokens}``; empty without limits."""
    if levels is NO_LEVELS:
        return b""
    fields = b""
    for what, level in zip((b"requests", b"tokens"), levels, strict=True):
        if level is not None:
            fields += field(b"x-ratelimit-limit-" + what, b"%d" % level.limit)
            fields += field(b"x-ratelimit-remaining-" + what, b"%d" % level.remaining)
            fields += field(b"x-ratelimit-reset-" + what, _duration(level.full_s))
    return fields


def _duration(seconds: float) -> str:
    """Returns a duration as OpenAI writes it: ``17ms``, ``1.5s``, ``6m0s``."""
    millis = ceil(seconds * 1e3)
    if millis < 1000:
        return f"{millis}ms"
    minutes, millis = divmod(millis, 60_000)
    return f"{minutes}m{millis / 1e3:g}s" if minutes else f"{millis / 1e3:g}s"
