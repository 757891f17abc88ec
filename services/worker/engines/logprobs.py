"""The model's own log-probabilities of tokens, from rows of logits.

A row's log-softmax is computed in float64, each row by itself: other rows change none of its bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pinyon.core.errors import Internal
from pinyon.core.logprobs import LogprobRows, TokenLogprob
from services.worker.engines.sampling import by_falling_score

_F32 = npt.NDArray[np.float32]
_F64 = npt.NDArray[np.float64]
_I64 = npt.NDArray[np.int64]


def token_logprob(logits: _F32, token: int, top: int) -> TokenLogprob:
    """Returns those of ``token`` and of the ``top`` likeliest tokens; ``logits`` is ``(vocab_size,)``, finite."""
    own, ids, likeliest = _row(logits, token, top)
    return TokenLogprob(own, tuple(zip(ids.tolist(), likeliest.tolist(), strict=True)))


def logprob_rows(logits: _F32, tokens: npt.NDArray[np.uint32], top: int) -> LogprobRows:
    """Returns those of each token by its row, for ``logits`` ``(n, vocab_size)`` and ``tokens`` ``(n,)``.

    Raises :class:`Internal` if a logit is not finite.
    """
    if not np.isfinite(logits).all():
        raise Internal("the model computed a logit that is not finite")
    count, top = len(tokens), min(top, logits.shape[1])
    rows = LogprobRows(
        np.empty(count, np.float32), np.empty((count, top), np.uint32), np.empty((count, top), np.float32)
    )
    for number, token in enumerate(tokens.tolist()):
        row = _row(logits[number], token, top)
        rows.logprobs[number], rows.top_tokens[number], rows.top_logprobs[number] = row
    return rows


def _row(logits: _F32, token: int, top: int) -> tuple[float, _I64, _F64]:
    scores = logits.astype(np.float64)
    scores -= scores.max()
    total = np.log(np.exp(scores).sum())
    ids = by_falling_score(logits, top) if top else np.empty(0, np.int64)
    return float(scores[token] - total), ids, scores[ids] - total
