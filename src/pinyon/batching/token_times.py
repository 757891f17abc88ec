"""How long an instance takes from token to token, at which batch and KV: what it reports of its steps."""

from __future__ import annotations

SAMPLE_STEPS = 16
"""In one sample, at least. Samples count alike to who learns from them, and a step with part of a prompt in it is as
long as ten without: by the step of each report, or by the second, such steps would seem to be most of them."""


class TokenTimes:
    """Steps since the last sample was taken."""

    __slots__ = ("_batches", "_kv_tokens", "_seconds", "_steps", "_tokens")

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._seconds = 0.0
        self._steps = self._tokens = self._batches = self._kv_tokens = 0

    def decoded(self, requests: int, seconds: float, kv_tokens: int, steps: int = 1, running: int = 0) -> None:
        """In each of so many steps ``requests`` got a token, ``seconds`` after the step before, of ``running`` ones (0:
        of no others) whose KV is of so many tokens.

        Where others run that get theirs in other steps of a round, a token comes as much later as there are more of
        them: in the mean over a whole round that is its length, and all that run count as the batch."""
        running = max(running, requests)
        tokens = requests * steps
        self._tokens += tokens
        self._seconds += steps * running * seconds
        self._steps += steps
        self._batches += tokens * running
        self._kv_tokens += tokens * kv_tokens

    def take(self, *, idle: bool) -> tuple[float, float, float]:
        """Milliseconds between tokens, requests in the batch, tokens whose KV it read: all in the mean of the same
        tokens, so that the times fit the loads they were measured at. Zeros while there are fewer steps than
        ``SAMPLE_STEPS``, unless nothing is decoded any more (``idle``)."""
        tokens = self._tokens
        if not tokens or (self._steps < SAMPLE_STEPS and not idle):
            return 0.0, 0.0, 0.0
        means = 1e3 * self._seconds / tokens, self._batches / tokens, self._kv_tokens / tokens
        self._clear()
        return means
