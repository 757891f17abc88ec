"""The OpenAPI document of the HTTP interface, made from what the parser accepts."""

from __future__ import annotations

import json
from functools import cache

from pinyon import __version__
from pinyon.openai.fields import CHAT, COMPLETION, DETOKENIZE, TOKENIZE, Fields, Schema


@cache
def openapi_document() -> bytes:
    """Returns the OpenAPI 3.1 document as JSON; it is always the same."""
    return json.dumps(_document(), separators=(",", ":")).encode("ascii")


def _document() -> Schema:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "pinyon",
            "version": __version__,
            "description": "OpenAI's HTTP interface, with fields and routes of vLLM. A field with an enum that ends in "
            "null is there for compatibility only. Any other field or route is answered with 400.",
        },
        "paths": {
            "/v1/completions": {"post": _generation("Complete prompts", "CompletionRequest", "Completion")},
            "/v1/chat/completions": {"post": _generation("Answer a conversation", "ChatRequest", "ChatCompletion")},
            "/tokenize": {"post": _post("Tokens of a text or a conversation", "TokenizeRequest", "Tokens")},
            "/detokenize": {"post": _post("Text of tokens", "DetokenizeRequest", "Text")},
            "/v1/models": {"get": _get("The served models", "Models")},
            "/v1/models/{id}": {
                "get": _get("One model", "Model")
                | {"parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]}
            },
            "/version": {"get": _get("The version that runs, and how", "Version", guarded=False)},
            "/openapi.json": {"get": _get("This document", "Document", guarded=False)},
            "/health": {"get": _get("The process lives", "Health", guarded=False)},
            "/health/live": {"get": _get("The process lives", "Health", guarded=False)},
            "/health/ready": {"get": _get("A request could be placed", "Ready", guarded=False)},
            "/metrics": {
                "get": {
                    "summary": "Metrics for Prometheus",
                    "security": [{}],
                    "responses": {"200": {"description": "OK", "content": {"text/plain": {}}}},
                }
            },
        },
        "components": {
            "schemas": {
                "CompletionRequest": _request(COMPLETION, ["model", "prompt"]),
                "ChatRequest": _request(CHAT, ["model", "messages"]),
                "TokenizeRequest": _request(TOKENIZE, []),
                "DetokenizeRequest": _request(DETOKENIZE, ["tokens"]),
                **_ANSWERS,
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _request(fields: Fields, required: list[str]) -> Schema:
    """Returns a request's schema. Null is the same as a missing field, except for required fields."""
    properties = {
        name: field.schema
        if name in required or "enum" in field.schema
        else {"anyOf": [field.schema, {"type": "null"}]}
        for name, field in fields.items()
    }
    found: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return found | ({"required": required} if required else {})


def _generation(summary: str, request: str, answer: str) -> Schema:
    found = _post(summary, request, answer)
    found["responses"]["200"]["content"]["text/event-stream"] = {"schema": _ref(f"{answer}Chunk")}
    return found


def _post(summary: str, request: str, answer: str) -> Schema:
    body = {"required": True, "content": {"application/json": {"schema": _ref(request)}}}
    return _get(summary, answer) | {"requestBody": body}


def _get(summary: str, answer: str, *, guarded: bool = True) -> Schema:
    responses = {
        "200": {"description": "OK", "content": {"application/json": {"schema": _ref(answer)}}},
        "default": {"description": "An error", "content": {"application/json": {"schema": _ref("Error")}}},
    }
    return {"summary": summary, "security": [{"key": []}, {}] if guarded else [{}], "responses": responses}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(required: Schema, **optional: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {**required, **optional},
        "required": list(required),
        "additionalProperties": False,
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_LOGPROB: Schema = {"type": "number", "maximum": 0}
_TOKENS = _list(_COUNT)
_REASON: Schema = {"enum": ["stop", "length"]}
_TOP = _object({"token": _TEXT, "logprob": _LOGPROB, "bytes": _TOKENS})
_CHAT_LOGPROBS = _object(
    {"content": _list(_object({"token": _TEXT, "logprob": _LOGPROB, "bytes": _TOKENS, "top_logprobs": _list(_TOP)}))}
)
_COMPLETION_LOGPROBS = _object(
    {
        "tokens": _list(_TEXT),
        "token_logprobs": _list(_or_null(_LOGPROB)),
        "top_logprobs": _list(_or_null({"type": "object", "additionalProperties": _LOGPROB})),
        "text_offset": _TOKENS,
    }
)
_USAGE = _object(
    {"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT},
    prompt_tokens_details=_object({"cached_tokens": _COUNT}),
)


def _answer(name: str, choice: Schema, *, chunk: bool = False) -> Schema:
    head = {"id": _TEXT, "object": {"const": name}, "created": _COUNT, "model": _TEXT, "choices": _list(choice)}
    required, optional = (head, {"usage": _or_null(_USAGE)}) if chunk else (head | {"usage": _USAGE}, {})
    return _object(required, **optional, prompt_token_ids=_TOKENS, pinyon={"type": "object"})


def _completion_choice(reason: Schema) -> Schema:
    return _object(
        {"index": _COUNT, "text": _TEXT, "logprobs": _or_null(_COMPLETION_LOGPROBS), "finish_reason": reason},
        token_ids=_TOKENS,
        prompt_token_ids=_TOKENS,
    )


def _chat_choice(name: str, message: Schema, reason: Schema) -> Schema:
    return _object(
        {"index": _COUNT, name: message, "logprobs": _or_null(_CHAT_LOGPROBS), "finish_reason": reason},
        token_ids=_TOKENS,
    )


_MODEL = _object(
    {
        "id": _TEXT,
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": _TEXT,
        "root": _TEXT,
        "parent": {"type": "null"},
        "max_model_len": _COUNT,
        "permission": _list({"type": "object"}),
    }
)
_MESSAGE = _object({"role": {"const": "assistant"}, "content": _TEXT, "refusal": {"type": "null"}})
_DELTA = _object({}, role={"const": "assistant"}, content=_TEXT)
_ANSWERS: Schema = {
    "Completion": _answer("text_completion", _completion_choice(_REASON)),
    "CompletionChunk": _answer("text_completion", _completion_choice(_or_null(_REASON)), chunk=True),
    "ChatCompletion": _answer("chat.completion", _chat_choice("message", _MESSAGE, _REASON)),
    "ChatCompletionChunk": _answer(
        "chat.completion.chunk", _chat_choice("delta", _DELTA, _or_null(_REASON)), chunk=True
    ),
    "Tokens": _object(
        {"count": _COUNT, "max_model_len": _COUNT, "tokens": _TOKENS, "token_strs": _or_null(_list(_TEXT))}
    ),
    "Text": _object({"prompt": _TEXT}),
    "Model": _MODEL,
    "Models": _object({"object": {"const": "list"}, "data": _list(_MODEL)}),
    "Version": _object({"version": _TEXT, "compiled": _FLAG, "python": _TEXT}),
    "Health": _object({"status": _TEXT}),
    "Ready": _object({"status": _TEXT}, lacks={"type": "object", "additionalProperties": _TEXT}),
    "Document": {"type": "object"},
    "Error": _object(
        {"error": _object({"message": _TEXT, "type": _TEXT, "param": _or_null(_TEXT), "code": _or_null(_TEXT)})}
    ),
}
