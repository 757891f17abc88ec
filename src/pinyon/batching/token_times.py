"""The time from token to token at an instance, and at which batch and KV: what it reports of its steps."""

from __future__ import annotations

SAMPLE_STEPS = 16
"""The least steps in one sample. Samples count alike, and a step with part of a prompt is as long as ten without.

With a sample for the step of each report, or for each second, such steps would seem to be most of them."""


class TokenTimes:
    """Steps since the last sample was taken."""

    __slots__ = ("_batches", "_kv_tokens", "_seconds", "_steps", "_tokens")

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._seconds = 0.0
        self._steps = self._tokens = self._batches = self._kv_tokens = 0

    def decoded(self, requests: int, seconds: float, kv_tokens: int, steps: int = 1, running: int = 0) -> None:
        """Records ``steps`` steps in which ``requests`` got a token each, ``seconds`` after the step before.

        ``running`` requests (0: no others) have KV of ``kv_tokens``. Those that get their tokens in other steps of a
        round delay each token in proportion to their number. In the mean that is the round's length, and all count."""
        running = max(running, requests)
        tokens = requests * steps
        self._tokens += tokens
        self._seconds += steps * running * seconds
        self._steps += steps
        self._batches += tokens * running
        self._kv_tokens += tokens * kv_tokens

    def take(self, *, idle: bool) -> tuple[float, float, float]:
        """Returns milliseconds between tokens, requests in the batch, and tokens whose KV it read.

        All are means of the same tokens, so that times fit the loads they were measured at. Zeros while there are fewer
        steps than ``SAMPLE_STEPS``, unless nothing is decoded any more (``idle``)."""
        tokens = self._tokens
        if not tokens or (self._steps < SAMPLE_STEPS and not idle):
            return 0.0, 0.0, 0.0
        means = 1e3 * self._seconds / tokens, self._batches / tokens, self._kv_tokens / tokens
        self._clear()
        return means
