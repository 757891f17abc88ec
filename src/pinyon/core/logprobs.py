"""How likely tokens were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

PROMPT_LOGPROBS_MAX = 400_000
"""Of one prompt, the likeliest ones beside each token included: at 7 bytes each they fit into a message of 4 MiB."""


class TokenLogprob(NamedTuple):
    """Of one token: its log-probability (natural) by the model alone, before penalties, temperature and the like."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens at its place, ids and log-probabilities, the likeliest first and equal ones by rising id."""


class Logprobs(Protocol):
    """Those of tokens that follow each other, kept as they came: as values, those of a long answer would take a hundred
    times the room."""

    def __len__(self) -> int: ...

    def between(self, start: int, end: int) -> list[TokenLogprob]:
        """Those of the tokens ``[start, end)``. There may be so many that all at once would take a second."""


class _NoLogprobs:
    def __len__(self) -> int:
        return 0

    def between(self, start: int, end: int) -> list[TokenLogprob]:
        return []


NO_LOGPROBS = _NoLogprobs()


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """The same of many tokens, as arrays: ``(n,)``, and ``(n, top)`` for what stands beside each."""

    logprobs: npt.NDArray[np.float32]
    top_tokens: npt.NDArray[np.uint32]
    top_logprobs: npt.NDArray[np.float32]
