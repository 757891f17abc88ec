"""The tokens that a request has had so far, and how often each was generated: penalties are a function of these."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pinyon.core.request import SamplingParams

_SPARE = 64


class TokenCounts:
    """The distinct tokens of a prompt and its output, each with the number of times that it was generated.

    Arrays have one entry per distinct token. Adding a token takes constant time, so a penalty after 32,000 tokens costs
    no more than their distinct ones do. The object must not change while a step has it."""

    __slots__ = ("_at", "_first", "_ids", "_made", "_size")

    def __init__(self, tokens: npt.NDArray[np.uint32], generated: int) -> None:
        """Counts ``tokens``, of which the last ``generated`` were generated, without sorting: prompts are long."""
        seen = np.zeros(int(tokens.max(initial=0)) + 1, np.bool_)
        seen[tokens] = True
        ids = np.flatnonzero(seen)
        made = np.bincount(tokens[len(tokens) - generated :], minlength=len(seen))[ids]
        self._first = self._size = len(ids)
        self._ids = np.concatenate([ids, np.zeros(_SPARE, np.int64)])
        self._made = np.concatenate([made, np.zeros(_SPARE, np.int64)])
        self._at: dict[int, int] = {}
        """The array index of each token that was added."""

    @classmethod
    def needed(cls, sampling: SamplingParams, tokens: npt.NDArray[np.uint32], generated: int) -> TokenCounts | None:
        """Returns what ``sampling`` needs to know of the tokens so far; None if it needs nothing."""
        if not sampling.penalised:
            return None
        # Only the repetition penalty counts the prompt.
        return cls(tokens if sampling.repetition_penalty != 1.0 else tokens[len(tokens) - generated :], generated)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The distinct tokens, in no particular order."""
        return self._ids[: self._size]

    @property
    def generated(self) -> npt.NDArray[np.int64]:
        """The number of times that each of :attr:`ids` was generated; 0: it is in the prompt only."""
        return self._made[: self._size]

    def add(self, token: int) -> None:
        """Counts a generated token."""
        at = self._at.get(token)
        if at is None:
            at = self._at[token] = self._place(token)
        self._made[at] += 1

    def _place(self, token: int) -> int:
        at = int(np.searchsorted(self._ids[: self._first], token))
        if at < self._first and self._ids[at] == token:
            return at
        at = self._size
        if at == len(self._ids):
            self._ids, self._made = (np.concatenate([old, np.zeros_like(old)]) for old in (self._ids, self._made))
        self._ids[at] = token
        self._size += 1
        return at
