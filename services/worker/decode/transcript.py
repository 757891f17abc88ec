"""A request's tokens as text, and when they end it."""

from __future__ import annotations

from pinyon.core.request import FinishReason, SamplingParams
from pinyon.model import IncrementalDetokenizer, ModelCard, StopMatcher

__all__ = ["Transcript"]


class Transcript:
    """Takes generated tokens one by one. ``count`` of them so far; ``finish`` is set by the one that ends it."""

    def __init__(self, card: ModelCard, sampling: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(card.tokenizer)
        self._stop = StopMatcher(sampling.stop) if sampling.stop else None
        self._eos = () if sampling.ignore_eos else card.config.eos_token_ids
        self._max_tokens = sampling.max_tokens
        self.count = 0
        self.finish: FinishReason | None = None

    def push(self, token: int) -> str:
        """The text that became certain."""
        self.count += 1
        text = self._detokenizer.push((token,))
        if self._stop is not None and text:
            text, matched = self._stop.push(text)
            if matched:
                self.finish = FinishReason.STOP
                return text
        if token in self._eos:
            self.finish = FinishReason.STOP
        elif self.count >= self._max_tokens:
            self.finish = FinishReason.LENGTH
        else:
            return text
        return text + self._rest()

    def _rest(self) -> str:
        """What was held back until the end; a stop string may still show up in it."""
        text = self._detokenizer.flush()
        if self._stop is None:
            return text
        text, matched = self._stop.push(text)
        if matched:
            self.finish = FinishReason.STOP
            return text
        return text + self._stop.flush()
