"""What the engine computes next, and what its results mean. No I/O, no clock: the engine loop calls it.

``decide`` makes a plan of all running decodes plus prompt chunks under a token budget; ``fold`` gives each member its
result. Between the two, members may be removed: their result is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pinyon.batching import BatchingPolicy, BatchRequest, plan_chunks
from pinyon.core.request import SamplingParams

__all__ = [
    "DecodeSlot",
    "DecodeWork",
    "LayerHook",
    "PrefillChunk",
    "PrefillWork",
    "StepLimits",
    "StepOutcome",
    "StepPlan",
    "StepScheduler",
]

LayerHook = Callable[[int], None]

ChunkHooks = Callable[[int, int], tuple[LayerHook | None, LayerHook | None]]
"""``(start, end)`` of a chunk to its ``(wait_layer, on_layer)``."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Prompt tokens at positions ``[start, start + len(tokens))``; the KV of ``[0, start)`` is in the pool, or arrives
    layer by layer while the step runs.

    ``block_table``: pool block ids that cover ``[0, start + len(tokens))``, in token order.
    ``sampling``: set on a prompt's last chunk only; then one token is sampled after its last token.
    ``sample_index``: index of that generated token, the counter of the counter-based generator.
    ``wait_layer(layer)``: called once per layer before that layer's reused KV is read; may block until it has arrived.
    ``on_layer(layer)``: called right after that layer's K and V of these tokens are in the pool.
    A hook that raises aborts the step: the exception passes through, and no request of the step has advanced.
    """

    tokens: npt.NDArray[np.uint32]
    start: int
    block_table: Sequence[int]
    sampling: SamplingParams | None = None
    sample_index: int = 0
    wait_layer: LayerHook | None = None
    on_layer: LayerHook | None = None


@dataclass(frozen=True, slots=True)
class DecodeSlot:
    """One generated (or last prompt) ``token`` at ``position``; its KV is written there, then the next one is sampled.

    ``block_table`` covers ``[0, position]``. ``sample_index`` is the index of the token that is sampled now.
    """

    token: int
    position: int
    block_table: Sequence[int]
    sampling: SamplingParams
    sample_index: int


@dataclass(eq=False, slots=True)
class PrefillWork:
    """A prompt being computed. ``position``: tokens whose KV is in the pool (or arrives through ``wait_layer``)."""

    tokens: npt.NDArray[np.uint32]
    position: int
    table: list[int]
    sampling: SamplingParams
    sample_index: int
    advanced: Callable[[int, int, int | None, float], None]
    """``(start, end, token, seconds)``; the token comes with the last chunk; the seconds are its share of the step."""
    failed: Callable[[Exception], None]
    hooks: ChunkHooks | None = None
    alive: bool = True


@dataclass(eq=False, slots=True)
class DecodeWork:
    """A request in (or waiting for) the batch: ``token`` at ``position`` is fed next."""

    request: BatchRequest
    token: int
    position: int
    table: list[int]
    sampling: SamplingParams
    sample_index: int
    advanced: Callable[[int], bool]
    """Takes the new token; False when the request is finished."""
    failed: Callable[[Exception], None]
    alive: bool = True


@dataclass(frozen=True, slots=True)
class StepLimits:
    """All in tokens, except ``max_batch`` (requests)."""

    max_batch: int
    step_tokens: int
    chunk_tokens: int
    block_tokens: int


@dataclass(slots=True)
class StepPlan:
    """One engine step: members and what the engine is given for each, in the same order."""

    prefills: list[PrefillWork]
    chunks: list[PrefillChunk]
    decodes: list[DecodeWork]
    slots: list[DecodeSlot]

    @property
    def tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks) + len(self.slots)


@dataclass(slots=True)
class StepOutcome:
    """Per member: what the engine sampled, or why it failed."""

    prefills: Sequence[int | Exception | None]
    decodes: Sequence[int | Exception]
    elapsed_s: float


class StepScheduler:
    """Owned by the event loop's thread."""

    def __init__(self, policy: BatchingPolicy, limits: StepLimits) -> None:
        self._policy = policy
        self._limits = limits
        self._prefills: dict[PrefillWork, None] = {}
        self._waiting: dict[int, DecodeWork] = {}
        self._running: dict[int, DecodeWork] = {}

    @property
    def waiting(self) -> int:
        """Requests whose KV is in place and that wait for a place in the batch."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def prefilling(self) -> int:
        return len(self._prefills)

    def add_prefill(self, work: PrefillWork) -> None:
        self._prefills[work] = None

    def remove_prefill(self, work: PrefillWork) -> None:
        work.alive = False
        self._prefills.pop(work, None)

    def add_decode(self, work: DecodeWork) -> None:
        number = work.request.number
        self._policy.enqueue(work.request)
        self._waiting[number] = work

    def remove_decode(self, work: DecodeWork) -> None:
        work.alive = False
        number = work.request.number
        if self._waiting.pop(number, None) or self._running.pop(number, None):
            self._policy.remove(number)

    def decide(self, now_s: float) -> StepPlan | None:
        """The next step, or None when there is nothing to do."""
        limits = self._limits
        if self._waiting:
            for number in self._policy.admit(limits.max_batch - len(self._running), now_s):
                self._running[number] = self._waiting.pop(number)
        if not self._running and not self._prefills:
            return None
        decodes = list(self._running.values())
        slots = [
            DecodeSlot(work.token, work.position, work.table, work.sampling, work.sample_index) for work in decodes
        ]
        prefills: list[PrefillWork] = []
        chunks: list[PrefillChunk] = []
        if self._prefills:
            candidates = list(self._prefills)
            # Prompts always advance: a full batch must not starve them.
            budget = max(limits.step_tokens - len(decodes), min(limits.block_tokens, limits.chunk_tokens))
            takes = plan_chunks(
                [(work.position, len(work.tokens)) for work in candidates],
                budget_tokens=budget,
                chunk_tokens=limits.chunk_tokens,
                block_tokens=limits.block_tokens,
            )
            for work, take in zip(candidates, takes, strict=False):
                prefills.append(work)
                chunks.append(_chunk(work, take))
        return StepPlan(prefills, chunks, decodes, slots)

    def fold(self, plan: StepPlan, outcome: StepOutcome) -> int:
        """Give every member that is still there its result. Returns the number of tokens sampled."""
        sampled = 0
        share_s = outcome.elapsed_s / max(1, plan.tokens)
        for prefill, chunk, result in zip(plan.prefills, plan.chunks, outcome.prefills, strict=True):
            if not prefill.alive:
                continue
            if isinstance(result, Exception):
                self.remove_prefill(prefill)
                prefill.failed(result)
                continue
            start, end = chunk.start, chunk.start + len(chunk.tokens)
            prefill.position = end
            if end == len(prefill.tokens):
                self.remove_prefill(prefill)
                sampled += 1
            try:
                prefill.advanced(start, end, result, share_s * (end - start))
            except Exception as error:  # a defect in one member must not cost the others their tokens
                self.remove_prefill(prefill)
                prefill.failed(error)
        for decode, token in zip(plan.decodes, outcome.decodes, strict=True):
            if not decode.alive:
                continue
            if isinstance(token, Exception):
                self.remove_decode(decode)
                decode.failed(token)
                continue
            sampled += 1
            decode.token = token
            decode.position += 1
            decode.sample_index += 1
            try:
                if not decode.advanced(token):
                    self.remove_decode(decode)
            except Exception as error:
                self.remove_decode(decode)
                decode.failed(error)
        return sampled


def _chunk(work: PrefillWork, take: int) -> PrefillChunk:
    start, end = work.position, work.position + take
    wait_layer, on_layer = work.hooks(start, end) if work.hooks is not None else (None, None)
    return PrefillChunk(
        tokens=work.tokens[start:end],
        start=start,
        block_table=work.table,
        sampling=work.sampling if end == len(work.tokens) else None,
        sample_index=work.sample_index,
        wait_layer=wait_layer,
        on_layer=on_layer,
    )
