"""The input of an engine for one step: prompt chunks and single decoded tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pinyon.batching.token_counts import TokenCounts
from pinyon.core.request import SamplingParams

LayerHook = Callable[[int], None]

GROUPED = "grouped"
"""The kernel of decode attention that reads once what each group of a batch shares."""
WHOLE = "whole"
"""The kernel that reads once what all of a batch share."""


@dataclass(slots=True)  # not frozen: each step makes some, and frozen ones take three times as long
class PrefillChunk:
    """Prompt tokens at positions ``[start, start + len(tokens))``.

    The KV of ``[0, start)`` is in the pool, or arrives layer by layer while the step runs.

    ``block_table``: pool block ids that cover ``[0, start + len(tokens))``, in token order.
    ``sampling``: set on a prompt's last chunk only; then one token is sampled after its last token.
    ``sample_index``: index of that generated token, the counter of the counter-based generator.
    ``counts``: counts of all tokens before that one; set with ``sampling`` if that is penalised.
    ``next_tokens``: set if the prompt's log-probabilities are told. The token that follows each of ``tokens`` (none
    follows a prompt's last one), with ``next_top`` likeliest ones beside it.
    ``wait_layer(layer)``: called once per layer before any block's KV of that layer is touched for these tokens. May
    block until reused KV has arrived, and what was there before has been copied away.
    ``on_layer(layer)``: called right after that layer's K and V of these tokens are in the pool.
    A hook that raises aborts the step: the exception passes through, and no request of the step has advanced."""

    tokens: npt.NDArray[np.uint32]
    start: int
    block_table: Sequence[int]
    sampling: SamplingParams | None = None
    sample_index: int = 0
    counts: TokenCounts | None = None
    next_tokens: npt.NDArray[np.uint32] | None = None
    next_top: int = 0
    wait_layer: LayerHook | None = None
    on_layer: LayerHook | None = None


@dataclass(slots=True)  # not frozen: a worker keeps one per request and changes it after each step
class DecodeSlot:
    """One generated (or last prompt) ``token`` at ``position``; its KV is written there, then the next one is sampled.

    ``block_table`` covers ``[0, position]``. ``sample_index`` is the index of the token that is sampled now.
    ``counts`` has all tokens before that one, ``token`` included, if ``sampling`` is penalised."""

    token: int
    position: int
    block_table: Sequence[int]
    sampling: SamplingParams
    sample_index: int
    counts: TokenCounts | None = None
