"""Bodies of ``/v1/completions`` and ``/v1/chat/completions``: bytes from outside in, checked values out.

Every field of OpenAI's interface is known here. What cannot be honoured is refused by name unless it has its neutral
value, and a field nobody knows is refused too: silently ignoring either would give an answer to another question.
Fields of our own: ``top_k``, ``ignore_eos``, ``priority`` (they are vLLM's).

The JSON reader is pydantic-core's (jiter: 1 µs for 8 KB, a seventh of ``json``); checks are one dict lookup per field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic_core import from_json

from pinyon.core.errors import InvalidArgument
from pinyon.core.request import MAX_STOP_BYTES, MAX_STOP_STRINGS, PRIORITY_MAX, check_label
from services.lb.openai_large import is_large, read_large

__all__ = ["Call", "Messages", "PromptInput", "parse_chat", "parse_completion"]

Messages = list[dict[str, Any]]
PromptInput = str | bytes | Messages
"""Text, tokens as little-endian u32, or a conversation."""

FIELDS_MAX = 64
FIELD_SHOWN_CHARS = 64


@dataclass(slots=True)
class Call:
    """One call's body. ``max_tokens`` 0, ``seed`` None, ``priority`` None, ``user`` empty: not named."""

    model: str
    prompt: PromptInput
    prompt_field: str
    max_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    user: str = ""
    priority: int | None = None
    add_special_tokens: bool | None = None
    """None: of a text, not of a conversation."""
    chat_template_kwargs: dict[str, Any] | None = None


def parse_completion(body: bytes | bytearray) -> Call:
    """Raises :class:`InvalidArgument` naming the field (None if the body as a whole is wrong)."""
    values = _read(body, _COMPLETION)
    call = _call(values, "prompt")
    call.prompt = _prompt(values["prompt"])
    return call


def parse_chat(body: bytes | bytearray) -> Call:
    """Raises :class:`InvalidArgument` naming the field (None if the body as a whole is wrong)."""
    values = _read(body, _CHAT)
    call = _call(values, "messages")
    newer = values.get("max_completion_tokens")
    if newer is not None:
        if call.max_tokens and call.max_tokens != newer:
            raise InvalidArgument("max_tokens and max_completion_tokens differ.", field="max_completion_tokens")
        call.max_tokens = newer
    return call


def _read(body: bytes | bytearray, known: Mapping[str, Callable[[str, Any], Any]]) -> dict[str, Any]:
    try:
        if is_large(body):
            values = read_large(body)
        else:
            values = from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise InvalidArgument(f"We could not parse the JSON body of your request: {_brief(error)}.") from None
    if type(values) is not dict:
        raise InvalidArgument("The body must be a JSON object.")
    if len(values) > FIELDS_MAX:
        raise InvalidArgument(f"The body has {len(values)} fields, at most {FIELDS_MAX} are allowed.")
    for name, value in values.items():
        check = known.get(name)
        if check is None:
            shown = name[:FIELD_SHOWN_CHARS]
            raise InvalidArgument(f"Unrecognized request argument supplied: {shown}", field=shown)
        if value is not None:
            check(name, value)
    return values


def _brief(error: ValueError) -> str:
    # jiter's messages are short and hold no input; anything else is cut
    return str(error)[:120]


def _call(values: dict[str, Any], prompt_field: str) -> Call:
    get = values.get
    model, prompt = get("model"), get(prompt_field)
    if model is None:
        raise InvalidArgument("You must provide a model parameter.", field="model")
    if prompt is None:
        raise InvalidArgument(f"You must provide a {prompt_field} parameter.", field=prompt_field)
    call = Call(model, prompt, prompt_field)
    if (value := get("max_tokens")) is not None:
        call.max_tokens = value
    if (value := get("temperature")) is not None:
        call.temperature = float(value)
    if (value := get("top_p")) is not None:
        call.top_p = float(value)
    if (value := get("top_k")) is not None:
        call.top_k = value
    if (value := get("seed")) is not None:
        call.seed = value & 0xFFFF_FFFF_FFFF_FFFF  # OpenAI's is signed
    if (value := get("stop")) is not None:
        call.stop = (value,) if type(value) is str else tuple(value)
    call.user = get("user") or get("safety_identifier") or ""
    call.priority = get("priority")
    if get("ignore_eos"):
        call.ignore_eos = True
    if get("stream"):
        call.stream = True
    if (options := get("stream_options")) is not None:
        if not call.stream:
            raise InvalidArgument("stream_options is only allowed when stream is true.", field="stream_options")
        call.include_usage = bool(options.get("include_usage"))
    return call


def _prompt(value: Any) -> PromptInput:
    """A string, ``[string]``, ``[token, …]`` or ``[[token, …]]``: one prompt per request."""
    if type(value) is bytes:  # token ids, read already
        return value
    if type(value) is str:
        if not value:
            raise InvalidArgument("prompt must not be empty.", field="prompt")
        return value
    if type(value) is not list or not value:
        raise InvalidArgument("prompt must be a string or a list of token ids, and not empty.", field="prompt")
    first = value[0]
    if type(first) is int:
        return _tokens(value)
    if len(value) == 1 and type(first) in (str, list):
        return _prompt(first) if type(first) is str else _tokens(first)
    if type(first) in (str, list):
        raise InvalidArgument("Only one prompt per request is supported.", field="prompt")
    raise InvalidArgument("prompt must be a string or a list of token ids.", field="prompt")


def _tokens(value: list[Any]) -> bytes:
    if not value:
        raise InvalidArgument("prompt must not be empty.", field="prompt")
    if any(type(token) is not int for token in value):
        raise InvalidArgument("prompt must be a string or a list of token ids.", field="prompt")
    if not 0 <= min(value) <= max(value) < 1 << 32:
        raise InvalidArgument("prompt holds a token id outside the vocabulary.", field="prompt")
    return np.array(value, dtype="<u4").tobytes()


# ---------------------------------------------------------------- checks, one per kind of field; None never gets here


def _wrong(name: str, wanted: str) -> InvalidArgument:
    return InvalidArgument(f"Invalid value for '{name}': expected {wanted}.", field=name)


def _string(name: str, value: Any) -> None:
    if type(value) is not str:
        raise _wrong(name, "a string")


def _label(name: str, value: Any) -> None:
    _string(name, value)
    check_label(value, name)


def _boolean(name: str, value: Any) -> None:
    if type(value) is not bool:
        raise _wrong(name, "a boolean")


def _integer(low: int, high: int) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if type(value) is not int or not low <= value <= high:
            raise _wrong(name, f"an integer, at least {low}" if type(value) is not int or value < low
                         else f"an integer, at most {high}")  # fmt: skip

    return check


def _number(low: float, high: float, *, above: bool = False) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        if type(value) not in (int, float) or not low <= value <= high or (above and value == low):
            raise _wrong(name, f"a number {'above' if above else 'from'} {low:g} {'up ' if above else ''}to {high:g}")

    return check


def _stop(name: str, value: Any) -> None:
    texts = value if type(value) is list else [value]
    if len(texts) > MAX_STOP_STRINGS:
        raise _wrong(name, f"at most {MAX_STOP_STRINGS} strings")
    for text in texts:
        if type(text) is not str or not 0 < len(text.encode("utf-8", "surrogatepass")) <= MAX_STOP_BYTES:
            raise _wrong(name, f"a string or a list of strings of 1 to {MAX_STOP_BYTES} bytes")


def _stream_options(name: str, value: Any) -> None:
    if type(value) is not dict:
        raise _wrong(name, "an object")
    for key, option in value.items():
        if key not in ("include_usage", "include_obfuscation"):
            raise InvalidArgument(
                f"Unrecognized request argument supplied: {name}.{key[:FIELD_SHOWN_CHARS]}", field=name
            )
        if option is not None and type(option) is not bool:
            raise _wrong(f"{name}.{key}", "a boolean")
    if value.get("include_obfuscation"):
        raise InvalidArgument("stream_options.include_obfuscation is not supported.", field=name)


def _messages(name: str, value: Any) -> None:
    # The chat template checks roles and texts; here is what it does not look at.
    if type(value) is not list or not value:
        raise _wrong(name, "a list of messages, not empty")
    for index, message in enumerate(value):
        if type(message) is not dict:
            raise _wrong(f"{name}[{index}]", "an object")
        for key, part in message.items():
            if key in ("role", "content", "name") or part is None or part == []:
                continue
            shown = key[:FIELD_SHOWN_CHARS]
            raise InvalidArgument(f"messages[{index}].{shown} is not supported.", field=name)
        if message.get("name") is not None and type(message["name"]) is not str:
            raise _wrong(f"{name}[{index}].name", "a string")


def _object(name: str, value: Any) -> None:
    if type(value) is not dict:
        raise _wrong(name, "an object")


def _only(*neutral: Any) -> Callable[[str, Any], None]:
    """A feature that does not exist here: accepted at the values that ask for nothing."""

    def check(name: str, value: Any) -> None:
        for each in neutral:
            # 0 == False and 1 == True in Python, not in JSON
            if value == each and (type(value) is bool) == (type(each) is bool):
                return
        raise InvalidArgument(f"'{name}' is not supported with this value.", field=name)

    return check


_COMMON: dict[str, Callable[[str, Any], None]] = {
    "model": _string,
    "max_tokens": _integer(1, (1 << 31) - 1),
    "temperature": _number(0, 2),
    "top_p": _number(0, 1, above=True),
    "top_k": _integer(0, (1 << 31) - 1),
    "seed": _integer(-(1 << 63), (1 << 64) - 1),
    "stop": _stop,
    "stream": _boolean,
    "stream_options": _stream_options,
    "ignore_eos": _boolean,
    "user": _label,
    "priority": _integer(-PRIORITY_MAX, PRIORITY_MAX),
    "n": _only(1),
    "logit_bias": _only({}),
    "presence_penalty": _only(0),
    "frequency_penalty": _only(0),
}

_COMPLETION = {
    **_COMMON,
    "prompt": lambda name, value: None,  # _prompt
    "best_of": _only(1),
    "echo": _only(False),
    "logprobs": _only(),
    "suffix": _only(""),
}

_CHAT = {
    **_COMMON,
    "messages": _messages,
    "max_completion_tokens": _integer(1, (1 << 31) - 1),
    "metadata": _object,
    "prompt_cache_key": _string,
    "safety_identifier": _label,
    "parallel_tool_calls": _boolean,
    "service_tier": _only("auto", "default"),
    "store": _only(False),
    "logprobs": _only(False),
    "top_logprobs": _only(0),
    "response_format": _only({"type": "text"}),
    "modalities": _only(["text"]),
    "tools": _only([]),
    "tool_choice": _only("none", "auto"),
    "functions": _only([]),
    "function_call": _only("none", "auto"),
    "audio": _only(),
    "prediction": _only(),
    "reasoning_effort": _only("none"),
    "verbosity": _only("medium"),
    "web_search_options": _only(),
}
