"""Answers as OpenAI writes them: whole objects, server-sent events, error objects.

Written from templates: all of an event but its text is the same for one request, and made once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from json.encoder import encode_basestring_ascii as quote

from pinyon.core.errors import InvalidArgument, NotFound, PinyonError, Unauthenticated
from pinyon.core.request import Usage

__all__ = [
    "DONE",
    "ChatFormat",
    "CompletionFormat",
    "ContextExceeded",
    "Format",
    "error_body",
    "error_event",
    "model_object",
    "usage_json",
]

DONE = b"data: [DONE]\n\n"

Facts = Mapping[str, object]


def usage_json(usage: Usage) -> str:
    return (
        f'{{"prompt_tokens":{usage.prompt_tokens},"completion_tokens":{usage.completion_tokens},'
        f'"total_tokens":{usage.prompt_tokens + usage.completion_tokens},'
        f'"prompt_tokens_details":{{"cached_tokens":{usage.cached_tokens}}}}}'
    )


class ContextExceeded(InvalidArgument):
    """Prompt, or prompt and generation together, are longer than the model takes."""


class CompletionFormat:
    """``text_completion`` objects of one request."""

    id_prefix = "cmpl-"
    first = ""
    """What comes before the first text of a stream."""

    def __init__(self, request_id: str, model: str, created_s: int, include_usage: bool = False) -> None:
        self._head = (
            f'{{"id":"{self.id_prefix}{request_id}","object":"text_completion","created":{created_s},'
            f'"model":{quote(model)},"choices":['
        )
        self._usage = ',"usage":null' if include_usage else ""
        self._before = f'data: {self._head}{{"index":0,"text":'
        self._after = f',"logprobs":null,"finish_reason":null}}]{self._usage}}}\n\n'

    def text(self, text: str) -> str:
        """One event with new text."""
        return f"{self._before}{quote(text)}{self._after}"

    def finish(self, text: str, reason: str, facts: Facts | None = None) -> str:
        """The last event with a choice."""
        return (
            f'{self._before}{quote(text)},"logprobs":null,"finish_reason":"{reason}"}}]'
            f"{self._usage}{_facts(facts)}}}\n\n"
        )

    def usage(self, usage: Usage, facts: Facts | None = None) -> str:
        """The event that ``stream_options.include_usage`` asks for."""
        return f'data: {self._head}],"usage":{usage_json(usage)}{_facts(facts)}}}\n\n'

    def whole(self, text: str, reason: str, usage: Usage, facts: Facts | None = None) -> bytes:
        """The body of an answer that is not streamed."""
        return (
            f'{self._head}{{"index":0,"text":{quote(text)},"logprobs":null,"finish_reason":"{reason}"}}],'
            f'"usage":{usage_json(usage)}{_facts(facts)}}}'
        ).encode("ascii")


class ChatFormat:
    """``chat.completion`` and ``chat.completion.chunk`` objects of one request."""

    id_prefix = "chatcmpl-"

    def __init__(self, request_id: str, model: str, created_s: int, include_usage: bool = False) -> None:
        head = f'{{"id":"{self.id_prefix}{request_id}","object":"chat.completion'
        rest = f'","created":{created_s},"model":{quote(model)},"choices":['
        self._whole_head = head + rest
        self._head = head + ".chunk" + rest
        self._usage = ',"usage":null' if include_usage else ""
        self._before = f'data: {self._head}{{"index":0,"delta":{{"content":'
        self._after = f'}},"logprobs":null,"finish_reason":null}}]{self._usage}}}\n\n'
        self.first = f'data: {self._head}{{"index":0,"delta":{{"role":"assistant","content":""{self._after}'

    def text(self, text: str) -> str:
        """One event with new text."""
        return f"{self._before}{quote(text)}{self._after}"

    def finish(self, text: str, reason: str, facts: Facts | None = None) -> str:
        """The last event with a choice, and one with the last text before it."""
        return (
            f"{self.text(text) if text else ''}"
            f'data: {self._head}{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"{reason}"}}]'
            f"{self._usage}{_facts(facts)}}}\n\n"
        )

    def usage(self, usage: Usage, facts: Facts | None = None) -> str:
        """The event that ``stream_options.include_usage`` asks for."""
        return f'data: {self._head}],"usage":{usage_json(usage)}{_facts(facts)}}}\n\n'

    def whole(self, text: str, reason: str, usage: Usage, facts: Facts | None = None) -> bytes:
        """The body of an answer that is not streamed."""
        return (
            f'{self._whole_head}{{"index":0,"message":{{"role":"assistant","content":{quote(text)},"refusal":null}},'
            f'"logprobs":null,"finish_reason":"{reason}"}}],"usage":{usage_json(usage)}{_facts(facts)}}}'
        ).encode("ascii")


Format = CompletionFormat | ChatFormat


def _facts(facts: Facts | None) -> str:
    return "" if facts is None else f',"pinyon":{json.dumps(facts)}'


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
    """OpenAI's error object; ``status`` is the HTTP status it goes with."""
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
    """An error in a stream that has begun: its status line is gone already."""
    return b"data: " + error_body(error) + b"\n\n"
