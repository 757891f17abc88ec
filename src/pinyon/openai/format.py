"""Answers as OpenAI writes them: whole objects, server-sent events and error objects.

Answers are written from templates: all of an event except its text is the same within a request, and made once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from json.encoder import encode_basestring_ascii as quote

from pinyon.core.errors import InvalidArgument, NotFound, PinyonError, Unauthenticated
from pinyon.core.request import Usage

DONE = b"data: [DONE]\n\n"

Facts = Mapping[str, object]


def counts_json(prompt_tokens: int, completion_tokens: int) -> str:
    """Returns the token counts as members of a usage object."""
    return (
        f'"prompt_tokens":{prompt_tokens},"completion_tokens":{completion_tokens},'
        f'"total_tokens":{prompt_tokens + completion_tokens}'
    )


def facts_json(facts: Facts | None) -> str:
    """Returns the facts as a member of an answer's object; empty if the client did not ask for them."""
    return "" if facts is None else f',"pinyon":{json.dumps(facts)}'


def _usage_json(usage: Usage) -> str:
    counts = counts_json(usage.prompt_tokens, usage.completion_tokens)
    return f',"usage":{{{counts},"prompt_tokens_details":{{"cached_tokens":{usage.cached_tokens}}}}}'


class ContextExceeded(InvalidArgument):
    """The prompt, or the prompt and the generation together, is longer than the model's context."""


class AnswerFormat:
    """The answer objects of one request. Arguments that are JSON already (choices, other members) are not changed."""

    id_prefix = ""
    whole_object = ""
    stream_object = ""
    around_text = ("", "")
    """The JSON before and after the text in a choice of a whole answer."""
    around_new = ("", "")
    """The JSON before and after the text in a choice of an event."""
    first = ""
    """The event that precedes the first text of a stream."""

    def __init__(self, request_id: str, model: str, created_s: int, include_usage: bool = False) -> None:
        head = f'{{"id":"{self.id_prefix}{request_id}","object":"'
        rest = f'","created":{created_s},"model":{quote(model)},"choices":['
        self._whole_head = f"{head}{self.whole_object}{rest}"
        self._event_head = f"data: {head}{self.stream_object}{rest}"
        self.no_usage = ',"usage":null' if include_usage else ""
        """The usage member of each event but the last."""
        before, after = self.around_new
        self._before = f'{self._event_head}{{"index":0,{before}'
        self._after = f'{after},"logprobs":null,"finish_reason":null}}]{self.no_usage}}}\n\n'

    def text(self, text: str) -> str:
        """Returns one event with new text."""
        return f"{self._before}{quote(text)}{self._after}"

    def finish(self, text: str, reason: str, facts: Facts | None = None) -> str:
        """Returns the last event that has a choice."""
        return self.event(self._choice(text, reason), f"{self.no_usage}{facts_json(facts)}")

    def usage(self, usage: Usage, facts: Facts | None = None) -> str:
        """Returns the event that ``stream_options.include_usage`` asks for."""
        return self.event("", f"{_usage_json(usage)}{facts_json(facts)}")

    def event(self, choices: str, others: str) -> str:
        return f"{self._event_head}{choices}]{others}}}\n\n"

    def whole(self, text: str, reason: str, usage: Usage, facts: Facts | None = None) -> bytes:
        """Returns the body of an answer that is not streamed."""
        return self.body(self._choice(text, reason), usage, facts_json(facts))

    def body(self, choices: str, usage: Usage, others: str) -> bytes:
        return f"{self._whole_head}{choices}]{_usage_json(usage)}{others}}}".encode("ascii")

    def _choice(self, text: str, reason: str) -> str:
        """Returns a finished choice with all its text."""
        before, after = self.around_text
        return f'{{"index":0,{before}{quote(text)}{after},"logprobs":null,"finish_reason":"{reason}"}}'


class CompletionFormat(AnswerFormat):
    """``text_completion`` objects."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    stream_object = "text_completion"
    around_text = ('"text":', "")
    around_new = ('"text":', "")


class ChatFormat(AnswerFormat):
    """``chat.completion`` and ``chat.completion.chunk`` objects."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    stream_object = "chat.completion.chunk"
    around_text = ('"message":{"role":"assistant","content":', ',"refusal":null}')
    around_new = ('"delta":{"content":', "}")

    def __init__(self, request_id: str, model: str, created_s: int, include_usage: bool = False) -> None:
        super().__init__(request_id, model, created_s, include_usage)
        self.first = f'{self._event_head}{{"index":0,"delta":{{"role":"assistant","content":""{self._after}'

    def finish(self, text: str, reason: str, facts: Facts | None = None) -> str:
        """Returns an event with the last text, if any, and the last event that has a choice."""
        ended = f'{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"{reason}"}}'
        return f"{self.text(text) if text else ''}{self.event(ended, f'{self.no_usage}{facts_json(facts)}')}"


def model_object(name: str, created_s: int, max_context: int) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "pinyon",
        "root": name,
        "parent": None,
        "max_model_len": max_context,
        "permission": [],
    }


_TYPES = {401: "invalid_request_error", 429: "rate_limit_error"}
_CODES = {408: "request_timeout", 413: "request_too_large", 429: "rate_limit_exceeded", 503: "unavailable"}
_CODES |= {504: "timeout", 500: "internal_error", 502: "bad_gateway"}


def error_object(error: PinyonError, status: int) -> dict[str, object]:
    """Returns OpenAI's error object; ``status`` is the HTTP status that accompanies it."""
    kind = _TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    code = _CODES.get(status)
    if isinstance(error, NotFound) and error.field == "model":
        code = "model_not_found"
    elif isinstance(error, Unauthenticated):
        code = "invalid_api_key"
    elif isinstance(error, ContextExceeded):
        code = "context_length_exceeded"
    return {"error": {"message": error.message, "type": kind, "param": error.field, "code": code}}


def error_body(error: PinyonError, status: int | None = None) -> bytes:
    return json.dumps(error_object(error, status or error.http_status)).encode("ascii")


def error_event(error: PinyonError) -> bytes:
    """Returns the event for an error in a stream that has begun, when the status line has already been sent."""
    return b"data: " + error_body(error) + b"\n\n"
