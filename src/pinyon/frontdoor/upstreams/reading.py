"""The parts that are read of a request which goes on unchanged: its model and user, and what routing depends on."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

from pydantic_core import from_json

from pinyon.core.errors import InvalidArgument
from pinyon.core.request import PRIORITY_MAX
from pinyon.openai.large import read_large
from pinyon.routing.prompt_text import prompt_text
from pinyon.routing.routing_keys import byte_keys, routing_root

MODEL_CHARS_MAX: Final = 256
USER_CHARS_MAX: Final = 512
TOKENS_MAX: Final = 1 << 20
CHARS_PER_TOKEN: Final = 4
"""The approximate average in English, as the tokenizer is unknown here."""
FORM_BYTES: Final = 64 << 10
"""The bytes at both ends of a form that are searched for the model's name."""

PROMPTS = frozenset(("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"))
"""The routes for whose prompts servers keep KV."""
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_USERS = ("user", "safety_identifier", "prompt_cache_key")
_FORM_MODEL: Final = b'name="model"\r\n'


class Asked(NamedTuple):
    """The parts read of a request. The ``model`` is empty if none is named. The ``keys`` are the prompt's routing keys,
    on routes that have a prompt. Two are estimates: ``tokens`` of prompt and generation, ``prompt_tokens`` of the
    prompt."""

    model: str = ""
    stream: bool = False
    keys: bytes = b""
    user: str = ""
    priority: int | None = None
    prompt_tokens: int = 0
    tokens: int = 1


def read_asked(
    path: str, content_type: bytes, body: bytes | bytearray, secret: bytes, default_tokens: int, *, large: bool = False
) -> Asked:
    """Reads a request. Routing keys start from ``secret``; ``default_tokens`` count as generated if the client sets no
    limit; ``large`` if the body :func:`is_large`. Raises :class:`InvalidArgument`."""
    return read_with_values(path, content_type, body, secret, default_tokens, large=large)[0]


def read_with_values(
    path: str,
    content_type: bytes,
    body: bytes | bytearray,
    secret: bytes,
    default_tokens: int,
    tenant: str = "",
    *,
    large: bool = False,
) -> tuple[Asked, dict[str, Any] | None]:
    """Reads a request as :func:`read_asked` does; returns the body's values too, None for a form. The keys are of the
    ``tenant``, if servers keep tenants apart."""
    if content_type[:10].lower() == b"multipart/":
        return Asked(_model_of_form(body), tokens=max(1, len(body) // CHARS_PER_TOKEN)), None
    try:
        values = read_large(body) if large else from_json(body, cache_strings="none")
    except ValueError:
        raise InvalidArgument("The request's body is not valid JSON.") from None
    if type(values) is not dict:
        raise InvalidArgument("The request's body must be a JSON object.")
    return _asked(path, len(body), values, secret, default_tokens, tenant), values


def _asked(path: str, size: int, values: Mapping[str, Any], secret: bytes, default_tokens: int, tenant: str) -> Asked:
    model = values.get("model")
    if model is None:
        model = ""
    elif type(model) is not str or len(model) > MODEL_CHARS_MAX:
        raise InvalidArgument(f"model must be a string of at most {MODEL_CHARS_MAX} characters.", field="model")
    stream, user = values.get("stream") is True, _user(values)
    if path not in PROMPTS:
        return Asked(model, stream, b"", user, tokens=_guess(size))
    text = prompt_text(values)
    salt = values.get("cache_salt")
    # Other people's servers have one cache for all tenants, so one's requests tell where another's prompt is reused.
    root = routing_root(model, tenant, secret, salt) if type(salt) is str else _unsalted_root(model, tenant, secret)
    prompt_tokens = _guess(len(text))
    tokens = prompt_tokens + _limit(values, default_tokens)
    return Asked(model, stream, byte_keys(root, text), user, _priority(values), prompt_tokens, tokens)


@lru_cache(maxsize=256)
def _unsalted_root(model: str, tenant: str, secret: bytes) -> bytes:
    return routing_root(model, tenant, secret)


def _guess(size: int) -> int:
    return max(1, size // CHARS_PER_TOKEN)


def _limit(values: Mapping[str, Any], default: int) -> int:
    for name in _LIMITS:
        limit = values.get(name)
        if type(limit) is int:
            return min(TOKENS_MAX, max(0, limit))
    return default


def _user(values: Mapping[str, Any]) -> str:
    """Returns the user of a request, for which servers have several names."""
    for name in _USERS:
        user = values.get(name)
        if type(user) is str and user:
            return user[:USER_CHARS_MAX]
    metadata = values.get("metadata")
    user = metadata.get("user_id") if type(metadata) is dict else None
    return user[:USER_CHARS_MAX] if type(user) is str else ""


def _priority(values: Mapping[str, Any]) -> int | None:
    """Returns vLLM's priority (lower is more urgent); None for values that the server may refuse."""
    priority = values.get("priority")
    return priority if type(priority) is int and -PRIORITY_MAX <= priority <= PRIORITY_MAX else None


def _model_of_form(body: bytes | bytearray) -> str:
    """Returns the model of ``multipart/form-data``, such as a recording to be transcribed."""
    for start in {0, max(0, len(body) - FORM_BYTES)}:
        if (name := _model_within(body[start : start + FORM_BYTES])) is not None:
            return name
    return ""


def _model_within(form: bytes | bytearray) -> str | None:
    """Returns the first part named so that has a value of one line; looks at each byte once."""
    at = 0
    while (at := form.find(_FORM_MODEL, at)) >= 0:
        head_end = form.find(b"\r\n\r\n", at + len(_FORM_MODEL) - 2)
        if head_end < 0:
            return None
        at = head_end + 4
        value = form[at : at + MODEL_CHARS_MAX + 2].partition(b"\r\n")
        if value[0] and value[1] and b"\n" not in value[0] and b"\r" not in value[0]:
            return value[0].decode("utf-8", "replace")
    return None
