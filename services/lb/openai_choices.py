"""Answers with several choices, echoed prompts or log-probabilities, as OpenAI and vLLM write them.

Plain answers of one choice are written by :mod:`services.lb.openai_format`, from templates.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pinyon.core.logprobs import TokenLogprob
from pinyon.core.request import Usage
from pinyon.model import IncrementalDetokenizer, Tokenizer
from services.lb.openai_format import Facts
from services.lb.openai_parse import Call
from services.lb.token_texts import TokenTexts

__all__ = ["ChatChoices", "Choice", "Choices", "CompletionChoices", "usage_object"]

LOGPROB_MIN = -9999.0
"""Written for what is less: JSON has no minus infinity."""


@dataclass(slots=True)
class Choice:
    """What has become of one choice, and what is new of it: ``text``, ``tokens``, ``logprobs``."""

    index: int
    prompt_tokens: Sequence[int]
    prompt_text: str = ""
    """To be echoed."""
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprob] = ()
    reason: str | None = None
    completion_tokens: int = 0
    """In all, as far as they are shown."""
    begun: bool = False
    """Something of it was written."""
    offsets: IncrementalDetokenizer | None = None
    offset: int = 0
    """Characters of its text up to the next token."""

    def written(self) -> None:
        self.begun = True
        self.text = ""
        self.tokens, self.logprobs = [], []


class Choices:
    """One call's answer. ``event`` and ``whole`` take what is new of a choice."""

    id_prefix = ""
    object = ""
    stream_object = ""

    def __init__(self, request_id: str, created_s: int, call: Call, tokenizer: Tokenizer, texts: TokenTexts) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._texts = texts
        self._head = {"id": f"{self.id_prefix}{request_id}", "object": "", "created": created_s, "model": call.model}

    # -- streams

    def event(self, choice: Choice) -> bytes:
        """One event with what is new, or that it has ended."""
        chunk = self._chunk(choice, self._part(choice), choice.completion_tokens) | self._top_level(choice)
        choice.written()
        return _event(chunk)

    def _chunk(self, choice: Choice, part: dict[str, Any], completion_tokens: int) -> dict[str, Any]:
        """One event's object, with the usage so far if that is told with each."""
        chunk: dict[str, Any] = {**self._head, "object": self.stream_object, "choices": [part]}
        if self._call.continuous_usage:
            chunk["usage"] = usage_object(Usage(len(choice.prompt_tokens), completion_tokens, 0))
            del chunk["usage"]["prompt_tokens_details"]  # known at the end
        elif self._call.include_usage:
            chunk["usage"] = None
        return chunk

    def begin(self, choice: Choice) -> bytes:
        """What comes before a choice's first event."""
        return b""

    def usage(self, usage: Usage, facts: Facts | None) -> bytes:
        """The last event, if there is anything to say."""
        if not self._call.include_usage and facts is None:
            return b""
        chunk: dict[str, Any] = {**self._head, "object": self.stream_object, "choices": []}
        if self._call.include_usage:
            chunk["usage"] = usage_object(usage)
        return _event(chunk | ({} if facts is None else {"pinyon": facts}))

    # -- whole answers

    def whole(self, choices: Sequence[Choice], usage: Usage, facts: Facts | None) -> bytes:
        body: dict[str, Any] = {**self._head, "object": self.object}
        body["choices"] = [self._whole(choice) for choice in choices]
        body["usage"] = usage_object(usage)
        body |= self._top_level(choices[0])
        return json.dumps(body if facts is None else body | {"pinyon": facts}, separators=(",", ":")).encode("ascii")

    # -- the parts

    def _part(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _whole(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _top_level(self, choice: Choice) -> dict[str, Any]:
        return {}

    def _token(self, token: int) -> str:
        return f"token_id:{token}" if self._call.return_tokens_as_token_ids else self._texts.text(token)


class CompletionChoices(Choices):
    id_prefix = "cmpl-"
    object = "text_completion"
    stream_object = "text_completion"

    def _part(self, choice: Choice) -> dict[str, Any]:
        echo = self._call.echo and not choice.begun
        part: dict[str, Any] = {
            "index": choice.index,
            "text": choice.prompt_text + choice.text if echo else choice.text,
            "logprobs": self._logprobs(choice, echo=echo) if self._call.logprobs >= 0 else None,
            "finish_reason": choice.reason,
        }
        if self._call.return_token_ids:
            if not choice.begun:
                part["prompt_token_ids"] = list(choice.prompt_tokens)
            part["token_ids"] = choice.tokens
        return part

    _whole = _part

    def _logprobs(self, choice: Choice, *, echo: bool) -> dict[str, list[Any]]:
        tokens, logprobs = choice.tokens, choice.logprobs
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if echo:
            # Nothing is before the first token, so nothing says how likely it was.
            offsets = self._offsets(choice.prompt_tokens, choice.prompt_text)
            self._append(found, offsets, choice.prompt_tokens, choice.prompt_logprobs, 1)
            choice.offset = len(choice.prompt_text)
        if choice.offsets is None:
            choice.offsets = IncrementalDetokenizer(self._tokenizer)
        offsets = []
        for token in tokens:
            offsets.append(choice.offset)
            choice.offset += len(choice.offsets.push((token,)))
        self._append(found, offsets, tokens, logprobs, 0)
        return found

    def _offsets(self, tokens: Sequence[int], text: str) -> list[int]:
        """Where in ``text`` its tokens begin. A special token has no place in it, unless it was written there."""
        detokenizer, offset, offsets = IncrementalDetokenizer(self._tokenizer), 0, []
        for token in tokens:
            offsets.append(offset)
            offset += len(detokenizer.push((token,)))
            if not self._texts.data(token) and text.startswith(marker := self._texts.text(token), offset):
                offset += len(marker)
        return offsets

    def _append(
        self,
        found: dict[str, list[Any]],
        offsets: Sequence[int],
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob],
        unknown: int,
    ) -> None:
        found["tokens"] += map(self._token, tokens)
        found["text_offset"] += offsets
        found["token_logprobs"] += [None] * unknown
        found["top_logprobs"] += [None] * unknown
        for token, one in zip(tokens[unknown:], logprobs, strict=True):
            found["token_logprobs"].append(max(one.logprob, LOGPROB_MIN))
            found["top_logprobs"].append(self._top(token, one))

    def _top(self, token: int, one: TokenLogprob) -> dict[str, float]:
        """By text: of two tokens with one text, the likelier. The token itself is always among them."""
        top: dict[str, float] = {}
        for each, logprob in (*one.top, (token, one.logprob)):
            text = self._token(each)
            top[text] = max(logprob, top.get(text, LOGPROB_MIN))
        return top


class ChatChoices(Choices):
    id_prefix = "chatcmpl-"
    object = "chat.completion"
    stream_object = "chat.completion.chunk"

    def begin(self, choice: Choice) -> bytes:
        delta = {"role": "assistant", "content": ""}
        part = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return _event(self._chunk(choice, part, 0))

    def _part(self, choice: Choice) -> dict[str, Any]:
        return self._choice(choice, "delta", {"content": choice.text} if choice.text or choice.tokens else {})

    def _whole(self, choice: Choice) -> dict[str, Any]:
        return self._choice(choice, "message", {"role": "assistant", "content": choice.text, "refusal": None})

    def _choice(self, choice: Choice, name: str, message: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if self._call.logprobs >= 0:
            logprobs = {"content": [self._one(*each) for each in zip(choice.tokens, choice.logprobs, strict=True)]}
        part = {"index": choice.index, name: message, "logprobs": logprobs, "finish_reason": choice.reason}
        return part | ({"token_ids": choice.tokens} if self._call.return_token_ids else {})

    def _top_level(self, choice: Choice) -> dict[str, Any]:
        shown = self._call.return_token_ids and not choice.begun
        return {"prompt_token_ids": list(choice.prompt_tokens)} if shown else {}

    def _one(self, token: int, one: TokenLogprob) -> dict[str, Any]:
        top = [self._entry(each, logprob) for each, logprob in one.top]
        return self._entry(token, one.logprob) | {"top_logprobs": top}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._token(token), "logprob": max(logprob, LOGPROB_MIN), "bytes": self._texts.data(token)}


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode("ascii") + b"\n\n"
