"""The text of a request's tokens, and the rules by which it ends."""

from __future__ import annotations

from pinyon.core.request import FinishReason, SamplingParams
from pinyon.model import IncrementalDetokenizer, ModelCard, StopMatcher


class Transcript:
    """The text of one request, fed token by token; ``count`` tokens so far. ``finish`` is set by the last one.

    As in vLLM, a token that ends the text has no text itself, and the first ``min_tokens`` tokens never end it."""

    def __init__(self, card: ModelCard, sampling: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(card.tokenizer)
        self._stop = StopMatcher(sampling.stop) if sampling.stop else None
        eos = () if sampling.ignore_eos else card.config.eos_token_ids
        self._ends = frozenset((*eos, *sampling.stop_token_ids))
        self._min_tokens = sampling.min_tokens
        self._max_tokens = sampling.max_tokens
        self.count = 0
        self.finish: FinishReason | None = None

    def push(self, token: int) -> str:
        """Takes a token and returns the text that became certain."""
        self.count += 1
        if token in self._ends and self.count > self._min_tokens:
            self.finish = FinishReason.STOP
            return self._rest()
        text = self._unstopped(self._detokenizer.push((token,)))
        if self.finish is not None or self.count < self._max_tokens:
            return text
        self.finish = FinishReason.LENGTH
        return text + self._rest()

    def _rest(self) -> str:
        """Returns the text that was held back until the end; a stop string may still show up in it."""
        text = self._unstopped(self._detokenizer.flush())
        return text if self._stop is None else text + self._stop.flush()

    def _unstopped(self, text: str) -> str:
        """Returns the text up to a stop string, less what may be the beginning of one."""
        if self._stop is not None and text:
            text, matched = self._stop.push(text, ends=self.count > self._min_tokens)
            if matched:
                self.finish = FinishReason.STOP
        return text
