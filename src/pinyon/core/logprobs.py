"""How likely tokens were."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["TokenLogprob"]


class TokenLogprob(NamedTuple):
    """Of one token: its log-probability (natural) by the model alone, before penalties, temperature and the like."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens at its place, ids and log-probabilities, the likeliest first and equal ones by rising id."""
