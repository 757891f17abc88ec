"""Log-probabilities of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

PROMPT_LOGPROBS_MAX = 400_000
"""The maximum for one prompt, likeliest tokens included: at 7 bytes each they fit a message of 4 MiB."""


class TokenLogprob(NamedTuple):
    """A token's log-probability (natural) by the model alone, before penalties, temperature and the like."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens at this place as (id, log-probability), the likeliest first, equal ones by rising id."""


class Logprobs(Protocol):
    """The log-probabilities of consecutive tokens in their original form; as values they would take 100 times the
    memory."""

    def __len__(self) -> int: ...

    def between(self, start: int, end: int) -> list[TokenLogprob]:
        """Returns those of the tokens ``[start, end)``; all at once could take a second."""


class _NoLogprobs:
    def __len__(self) -> int:
        return 0

    def between(self, start: int, end: int) -> list[TokenLogprob]:
        return []


NO_LOGPROBS = _NoLogprobs()


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """The log-probabilities of ``n`` tokens as arrays: shape ``(n,)``, and ``(n, top)`` for the likeliest tokens."""

    logprobs: npt.NDArray[np.float32]
    top_tokens: npt.NDArray[np.uint32]
    top_logprobs: npt.NDArray[np.float32]
