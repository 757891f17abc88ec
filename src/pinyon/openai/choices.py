"""Choices with echoed prompts, log-probabilities or token ids, or several choices, as OpenAI and vLLM write them.

:mod:`pinyon.openai.format` writes the objects around the choices, and plain answers with one choice."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from pinyon.core.logprobs import NO_LOGPROBS, Logprobs, TokenLogprob
from pinyon.core.request import Usage
from pinyon.model import IncrementalDetokenizer, Tokenizer
from pinyon.openai.format import AnswerFormat, ChatFormat, CompletionFormat, Facts, counts_json, facts_json
from pinyon.openai.parse import Call
from pinyon.openai.token_texts import TokenTexts

LOGPROB_MIN = -9999.0
"""The value written for any lower log-probability, since JSON has no minus infinity."""
PIECE_ENTRIES = 4096
"""The number of log-probabilities or token ids encoded as JSON at once; this holds the GIL for about 5 ms."""


_encode = json.JSONEncoder(separators=(",", ":")).encode


class Written(str):
    """Text that is JSON already."""

    __slots__ = ()


@dataclass(slots=True)
class Choice:
    """The state of one choice, and what is new since the last event: ``text``, ``tokens`` and ``logprobs``."""

    index: int
    prompt_tokens: Sequence[int]
    prompt_text: str = ""
    """The prompt's text if it is to be echoed."""
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: Logprobs = NO_LOGPROBS
    prompt_logprobs: Logprobs = NO_LOGPROBS
    reason: str | None = None
    completion_tokens: int = 0
    """The number of generated tokens so far, as shown to the client."""
    begun: bool = False
    """True once part of the choice has been written."""
    offsets: IncrementalDetokenizer | None = None
    offset: int = 0
    """The number of characters of the choice's text before the next token."""


class Choices:
    """The answer to one call; ``event`` and ``whole`` write what is new in a choice."""

    make_format: type[AnswerFormat] = AnswerFormat

    def __init__(self, request_id: str, created_s: int, call: Call, tokenizer: Tokenizer, texts: TokenTexts) -> None:
        self._call = call
        self._tokenizer = tokenizer
        self._texts = texts
        self._format = self.make_format(request_id, call.model, created_s, call.include_usage)

    def entries(self, choice: Choice) -> int:
        """Returns the number of log-probabilities and token ids to be written, as a measure of the time that takes."""
        call, count = self._call, 0
        if call.return_token_ids:
            count += len(choice.tokens) + (0 if choice.begun else len(choice.prompt_tokens))
        if call.sampling.logprobs >= 0:
            told = len(choice.logprobs) + (0 if choice.begun else len(choice.prompt_logprobs))
            count += told * max(1, call.sampling.logprobs)
        return count

    # -- streams

    def event(self, choice: Choice) -> bytes:
        """Returns one event with the choice's new tokens or its end."""
        event = self._event(choice, self._part(choice), choice.completion_tokens, self._prompt_ids(choice))
        choice.begun, choice.text = True, ""
        choice.tokens, choice.logprobs = [], NO_LOGPROBS
        return event

    def _event(self, choice: Choice, part: Written, completion_tokens: int, others: str = "") -> bytes:
        """Returns an event, with the usage so far if the client wants it in each event."""
        usage = self._format.no_usage
        if self._call.continuous_usage:  # the number of cached tokens is known only at the end
            usage = f',"usage":{{{counts_json(len(choice.prompt_tokens), completion_tokens)}}}'
        return self._format.event(part, usage + others).encode("ascii")

    def begin(self, choice: Choice) -> bytes:
        """Returns the event that precedes a choice's first one, if the format has such an event."""
        return b""

    def usage(self, usage: Usage, facts: Facts | None) -> bytes:
        """Returns the last event, or nothing if neither usage nor facts were requested."""
        if self._call.include_usage:
            return self._format.usage(usage, facts).encode("ascii")
        return b"" if facts is None else self._format.event("", facts_json(facts)).encode("ascii")

    # -- whole answers

    def whole(self, choices: Sequence[Choice], usage: Usage, facts: Facts | None) -> bytes:
        parts = [self._whole(choice) for choice in choices]
        return self._format.body(",".join(parts), usage, self._prompt_ids(choices[0]) + facts_json(facts))

    # -- the parts

    def _part(self, choice: Choice) -> Written:
        raise NotImplementedError

    def _whole(self, choice: Choice) -> Written:
        raise NotImplementedError

    def _prompt_ids(self, choice: Choice) -> str:
        """Returns the prompt's token ids as a member of the answer's object; empty if they do not belong there."""
        return ""

    def _pieces(self, count: int) -> Iterator[tuple[int, int]]:
        """Yields the ranges of tokens whose log-probabilities are encoded at once."""
        return pairwise([*range(0, count, max(1, PIECE_ENTRIES // (1 + self._call.sampling.logprobs))), count])

    def _token(self, token: int) -> str:
        return f"token_id:{token}" if self._call.return_tokens_as_token_ids else self._texts.text(token)


class CompletionChoices(Choices):
    make_format = CompletionFormat

    def _part(self, choice: Choice) -> Written:
        echo = self._call.echo and not choice.begun
        part: dict[str, Any] = {
            "index": choice.index,
            "text": choice.prompt_text + choice.text if echo else choice.text,
            "logprobs": self._logprobs(choice, echo=echo) if self._call.sampling.logprobs >= 0 else None,
            "finish_reason": choice.reason,
        }
        if self._call.return_token_ids:
            if not choice.begun:
                part["prompt_token_ids"] = _ids(choice.prompt_tokens)
            part["token_ids"] = _ids(choice.tokens)
        return _object(part)

    _whole = _part

    def _logprobs(self, choice: Choice, *, echo: bool) -> Written:
        columns: dict[str, list[str]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if echo:
            # No token precedes the first one, so it has no log-probability.
            first, others = choice.prompt_tokens[:1], choice.prompt_tokens[1:]
            detokenizer, text = IncrementalDetokenizer(self._tokenizer), choice.prompt_text
            offset = self._append(columns, first, [None], detokenizer, 0, text)
            for start, end in self._pieces(len(others)):
                told = choice.prompt_logprobs.between(start, end)
                offset = self._append(columns, others[start:end], told, detokenizer, offset, text)
            choice.offset = len(text)
        if choice.offsets is None:
            choice.offsets = IncrementalDetokenizer(self._tokenizer)
        for start, end in self._pieces(len(choice.tokens)):
            told = choice.logprobs.between(start, end)
            choice.offset = self._append(columns, choice.tokens[start:end], told, choice.offsets, choice.offset)
        return _object({name: _array(pieces) for name, pieces in columns.items()})

    def _append(
        self,
        columns: dict[str, list[str]],
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob | None],
        detokenizer: IncrementalDetokenizer,
        offset: int,
        text: str = "",
    ) -> int:
        """Appends to the columns and returns the next offset. A special token has length 0 unless ``text`` shows it."""
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(detokenizer.push((token,)))
            if text and not self._texts.data(token) and text.startswith(marker := self._texts.text(token), offset):
                offset += len(marker)
        pairs = list(zip(tokens, logprobs, strict=True))
        columns["tokens"].append(_items(list(map(self._token, tokens))))
        columns["token_logprobs"].append(
            _items([None if one is None else max(one.logprob, LOGPROB_MIN) for one in logprobs])
        )
        columns["top_logprobs"].append(_items([None if one is None else self._top(token, one) for token, one in pairs]))
        columns["text_offset"].append(_items(offsets))
        return offset

    def _top(self, token: int, one: TokenLogprob) -> dict[str, float]:
        """Returns log-probabilities by text, with the token itself; of two tokens with one text, the likelier
        counts."""
        top: dict[str, float] = {}
        for each, logprob in (*one.top, (token, one.logprob)):
            text = self._token(each)
            top[text] = max(logprob, top.get(text, LOGPROB_MIN))
        return top


class ChatChoices(Choices):
    make_format = ChatFormat

    def begin(self, choice: Choice) -> bytes:
        delta = {"role": "assistant", "content": ""}
        part = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._event(choice, _object(part), 0)

    def _part(self, choice: Choice) -> Written:
        return self._choice(choice, "delta", {"content": choice.text} if choice.text or choice.tokens else {})

    def _whole(self, choice: Choice) -> Written:
        return self._choice(choice, "message", {"role": "assistant", "content": choice.text, "refusal": None})

    def _choice(self, choice: Choice, name: str, message: dict[str, Any]) -> Written:
        part = {"index": choice.index, name: message, "logprobs": None, "finish_reason": choice.reason}
        if self._call.sampling.logprobs >= 0:
            told = [self._several(choice, start, end) for start, end in self._pieces(len(choice.tokens))]
            part["logprobs"] = _object({"content": _array(told)})
        if self._call.return_token_ids:
            part["token_ids"] = _ids(choice.tokens)
        return _object(part)

    def _prompt_ids(self, choice: Choice) -> str:
        shown = self._call.return_token_ids and not choice.begun
        return f',"prompt_token_ids":{_ids(choice.prompt_tokens)}' if shown else ""

    def _several(self, choice: Choice, start: int, end: int) -> str:
        items = []
        for token, one in zip(choice.tokens[start:end], choice.logprobs.between(start, end), strict=True):
            top = [self._entry(each, logprob) for each, logprob in one.top]
            items.append(self._entry(token, one.logprob) | {"top_logprobs": top})
        return _items(items)

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._token(token), "logprob": max(logprob, LOGPROB_MIN), "bytes": self._texts.data(token)}


def _json(value: Any) -> str:
    return value if type(value) is Written else _encode(value)


def _object(values: Mapping[str, Any]) -> Written:
    return Written("{" + ",".join([f"{_json(name)}:{_json(value)}" for name, value in values.items()]) + "}")


def _array(parts: Sequence[str]) -> Written:
    """Returns a JSON array of single values or of texts that :func:`_items` made."""
    return Written("[" + ",".join(parts) + "]")


def _items(values: list[Any]) -> str:
    """Returns the items of a list, which must not be empty, as JSON without the brackets."""
    return _json(values)[1:-1]


def _ids(tokens: Sequence[int]) -> Written:
    pieces = [tokens[start : start + PIECE_ENTRIES] for start in range(0, len(tokens), PIECE_ENTRIES)]
    return _array([",".join(map(str, piece)) for piece in pieces])
