"""An engine whose steps take as long as a profile says, and that computes nothing: it sleeps.

It serves to try scheduling live: many instances share two cores, and yet each is as busy or idle as the machine it
stands for. Tokens are printable by the built-in byte tokenizer. They are a pure function of the request's seed and the
token's place, so they do not depend on where and how a request runs. KV has no content, but one number per token and
plane. So the bookkeeping of blocks, leases, fetches and pushes is real and the bytes are few; KV's time on a network is
not paced."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pinyon.batching import DecodeSlot, PrefillChunk
from pinyon.core.clock import Clock
from pinyon.core.layout import KvLayout
from pinyon.core.request import SamplingParams
from pinyon.model.config import ModelConfig
from pinyon.profiles.engine_profile import EngineProfile
from services.worker.engines.checks import Hollow
from services.worker.engines.protocol import StepResult
from services.worker.engines.uniform import uniform

CATCH_UP_S = 0.005
"""The time in s after the last step's end within which a step counts as following it directly.

Otherwise the excess of sleeps and the engine loop's time between steps would add up over many steps."""


class PacedEngine(Hollow):
    """An engine that sleeps; ``clock`` and ``sleep`` are in seconds, and ``sleep`` may overshoot."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_tokens: int,
        profile: EngineProfile,
        *,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        layout = KvLayout(config.num_layers, kv_heads=1, head_dim=1, block_tokens=block_tokens)
        super().__init__(config, layout, num_blocks)
        self._profile = profile
        self._clock = clock
        self._sleep = sleep
        self._ended_s = 0.0

    def step(self, prefills: Sequence[PrefillChunk], decodes: Sequence[DecodeSlot]) -> StepResult:
        self.check(prefills, decodes)
        chunks = [(chunk.start, chunk.start + len(chunk.tokens)) for chunk in prefills]
        count = len(decodes)
        kv_tokens = sum([slot.position for slot in decodes]) + count
        seconds = self._profile.seconds(chunks, count, kv_tokens)
        share = self._profile.seconds((), count, kv_tokens) / seconds if chunks and decodes and seconds else 0.0
        now_s = self._clock()
        end_s = (self._ended_s if now_s - self._ended_s < CATCH_UP_S else now_s) + seconds
        hooked = [chunk for chunk in prefills if chunk.wait_layer is not None or chunk.on_layer is not None]
        layers = self.layout.layers
        for layer in range(layers) if hooked else ():
            self._sleep_until(end_s - seconds * (1 - layer / layers))
            for chunk in hooked:
                if chunk.wait_layer is not None:
                    waiting_s = self._clock()
                    chunk.wait_layer(layer)
                    end_s += self._clock() - waiting_s  # a GPU would wait, too
                if chunk.on_layer is not None:
                    chunk.on_layer(layer)
        self._sleep_until(end_s)
        self._ended_s = end_s
        return StepResult(
            [
                None
                if chunk.sampling is None
                else self._token(chunk.sampling, chunk.sample_index, chunk.start + len(chunk.tokens) - 1)
                for chunk in prefills
            ],
            [self._token(slot.sampling, slot.sample_index, slot.position) for slot in decodes],
            kv_tokens_read=kv_tokens,
            decode_share=share,
        )

    def _sleep_until(self, instant_s: float) -> None:
        left_s = instant_s - self._clock()
        if left_s > 0:
            self._sleep(left_s)

    def _token(self, sampling: SamplingParams, index: int, position: int) -> int:
        """Returns a letter; the token before it stands at ``position``."""
        letter = int(26 * uniform(sampling.seed, (index << 32) + position))
        return (ord("a") + letter) % self.config.vocab_size
