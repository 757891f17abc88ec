"""The tokens that a request has had so far, and how often it made them: penalties are a function of these."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pinyon.core.request import SamplingParams

_SPARE = 64


class TokenCounts:
    """The different tokens of a prompt and of what followed, each with the times it was generated.

    Arrays hold as many numbers as there are different tokens. One more token takes constant time, so a penalty costs no
    more after 32,000 tokens than their different ones do. Not to be changed while a step has it."""

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
        """Places of added tokens."""

    @classmethod
    def needed(cls, sampling: SamplingParams, tokens: npt.NDArray[np.uint32], generated: int) -> TokenCounts | None:
        """Returns what ``sampling`` needs to know of the tokens so far, or None."""
        if not sampling.penalised:
            return None
        # Only the repetition penalty counts the prompt.
        return cls(tokens if sampling.repetition_penalty != 1.0 else tokens[len(tokens) - generated :], generated)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The tokens, each once, in no order."""
        return self._ids[: self._size]

    @property
    def generated(self) -> npt.NDArray[np.int64]:
        """Times that each of :attr:`ids` was generated; 0: it is in the prompt only."""
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
