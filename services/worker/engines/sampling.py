"""The choice of the next token from one row of logits, and the model's own log-probabilities of tokens.

The choice is a pure function of logits, parameters, index of the generated token, and, with penalties, the tokens so
far.

The order is vLLM's: logit bias, no end before ``min_tokens``, penalties (repetition, frequency, presence), suppressed
tokens out, temperature, min-p, top-k, top-p. Then follows one draw by inverse distribution function over tokens in
order of falling probability (ties by rising id). The uniform number is a hash of (seed, index), so a request that goes
on elsewhere draws the same numbers without carrying a generator along.

Repetition penalty: Keskar et al.: CTRL (2019), section 4.1. min-p: Nguyen et al.: Turning Up the Heat (ICLR 2025)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pinyon.batching import TokenCounts
from pinyon.core.errors import Internal, InvalidArgument
from pinyon.core.logprobs import LogprobRows, TokenLogprob
from pinyon.core.request import SamplingParams
from services.worker.engines.uniform import uniform

_F32 = npt.NDArray[np.float32]
_F64 = npt.NDArray[np.float64]
_I64 = npt.NDArray[np.int64]

SCORE_MAX = 1e300
"""A bound on penalised scores: a tiny repetition penalty overflows to infinity, and two infinities compare equal."""


class Sampler:
    """A sampler without state, but for the model's suppressed tokens and its tokens that end a text."""

    def __init__(
        self, vocab_size: int, suppress_tokens: tuple[int, ...] = (), eos_tokens: tuple[int, ...] = ()
    ) -> None:
        allowed = np.ones(vocab_size, dtype=np.bool_)
        allowed[list(suppress_tokens)] = False
        # Indices of the tokens that may be sampled, rising; None if that is all.
        self._allowed: _I64 | None = None if allowed.all() else np.flatnonzero(allowed)
        self._eos = list(eos_tokens)

    def sample(self, logits: _F32, params: SamplingParams, index: int, counts: TokenCounts | None = None) -> int:
        """Returns a token for ``logits`` of shape ``(vocab_size,)``.

        The tokens so far are counted in ``counts``, if ``params.penalised``. Raises :class:`Internal` if a logit is not
        finite, :class:`InvalidArgument` if ``params`` leave no token at all or need ``counts``."""
        if not np.isfinite(logits).all():
            raise Internal("the model computed a logit that is not finite")
        scores: _F32 | _F64 = logits
        adjusts = params.logit_bias or params.penalised or index < params.min_tokens
        if adjusts:
            scores = self._adjusted(logits, params, index, counts)
        allowed = self._allowed
        if allowed is not None:
            scores = scores[allowed]
        if adjusts and scores.max() == -np.inf:
            raise InvalidArgument("before min_tokens there is no token but those that end the text", field="min_tokens")
        if params.temperature == 0.0 or params.top_k == 1:
            choice = int(np.argmax(scores))  # the first one on ties
        else:
            choice = _draw(scores, params, uniform(params.seed, index))
        return choice if allowed is None else int(allowed[choice])

    def _adjusted(self, logits: _F32, params: SamplingParams, index: int, counts: TokenCounts | None) -> _F64:
        """Returns adjusted scores, with -inf for tokens that may not be sampled."""
        scores = logits.astype(np.float64)
        if params.logit_bias:
            tokens, biases = zip(*params.logit_bias, strict=True)
            scores[list(tokens)] += biases
        if index < params.min_tokens:
            scores[[*params.stop_token_ids, *self._eos]] = -np.inf  # EOS even where it is to be ignored
        if params.penalised:
            if counts is None:
                raise InvalidArgument("penalties need the tokens so far", field="counts")
            _penalise(scores, params, counts)
        return scores


def _penalise(scores: _F64, params: SamplingParams, counts: TokenCounts) -> None:
    ids, times = counts.ids, counts.generated
    had = scores[ids]
    if params.repetition_penalty != 1.0:
        with np.errstate(over="ignore"):
            had = np.where(had > 0.0, had / params.repetition_penalty, had * params.repetition_penalty)
        had = np.minimum(had, SCORE_MAX)
    had -= params.frequency_penalty * times
    had -= params.presence_penalty * (times > 0)
    scores[ids] = had


def _draw(scores: _F32 | _F64, params: SamplingParams, u: float) -> int:
    scaled = scores.astype(np.float64)
    scaled -= scaled.max()
    # A tiny temperature sends all but the best score to -inf, which exp makes an exact zero.
    with np.errstate(over="ignore", under="ignore"):
        scaled /= params.temperature
        # The likeliest token has weight 1: min_p is a share of it.
        likely = np.flatnonzero(np.exp(scaled) >= params.min_p) if params.min_p > 0.0 else None
        order = by_falling_score(scaled if likely is None else scaled[likely], params.top_k)
        if likely is not None:
            order = likely[order]
        weights = np.exp(scaled[order])
    cumulative = np.cumsum(weights)
    if params.top_p < 1.0:
        # The smallest set whose probability reaches top_p; it is never empty.
        keep = int(np.searchsorted(cumulative, params.top_p * cumulative[-1], side="left")) + 1
        cumulative = cumulative[:keep]
    # As u < 1, the product can equal the total by rounding only: then the last candidate with weight is meant.
    at = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return int(order[min(at, int(np.searchsorted(cumulative, cumulative[-1], side="left")))])


def by_falling_score(scores: _F32 | _F64, top_k: int) -> _I64:
    """Returns ids by falling score, ties by rising id; only the first ``top_k``, if that is positive."""
    size = scores.shape[0]
    if 0 < top_k < size:
        # All ids from the k-th score up, so that ties are cut by id and not at partition's discretion.
        kth = np.partition(scores, size - top_k)[size - top_k]
        ids = np.flatnonzero(scores >= kth)
        return ids[np.argsort(-scores[ids], kind="stable")][:top_k]
    return np.argsort(-scores, kind="stable")


def token_logprob(logits: _F32, token: int, top: int) -> TokenLogprob:
    """Returns those of ``token`` and of the ``top`` likeliest tokens; ``logits`` is ``(vocab_size,)``, finite."""
    own, ids, likeliest = _row(logits, token, top)
    return TokenLogprob(own, tuple(zip(ids.tolist(), likeliest.tolist(), strict=True)))


def logprob_rows(logits: _F32, tokens: npt.NDArray[np.uint32], top: int) -> LogprobRows:
    """Returns those of each token by its row, for ``logits`` ``(n, vocab_size)`` and ``tokens`` ``(n,)``.

    Raises :class:`Internal` if a logit is not finite."""
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
    """Computes a row's log-softmax in float64, by itself: other rows change none of its bits."""
    scores = logits.astype(np.float64)
    scores -= scores.max()
    total = np.log(np.exp(scores).sum())
    ids = by_falling_score(logits, top) if top else np.empty(0, np.int64)
    return float(scores[token] - total), ids, scores[ids] - total
