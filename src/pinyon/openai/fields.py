"""The fields of ``/v1/completions`` and ``/v1/chat/completions``, and the values that each accepts.

The fields that control sampling are in the table of :class:`pinyon.core.request.SamplingParams`; this module says how
each kind of value looks in JSON, and where OpenAI's or vLLM's form differs.

The module knows every field of OpenAI's and vLLM's interfaces. A field that the server cannot honour is refused with
its name and value, unless the value asks for nothing: ignoring it silently would answer another question."""

from __future__ import annotations

from collections.abc import Callable
from json import JSONEncoder
from typing import Any, NamedTuple

from pinyon.core.errors import InvalidArgument
from pinyon.core.field_kinds import FieldKind, Number, Switch, Texts, TokenBiases, TokenIds, Whole
from pinyon.core.request import LOGPROBS_MAX, PRIORITY_MAX, SAMPLING_FIELDS, check_label

N_MAX = 16
"""The maximum number of choices for one prompt."""
PROMPTS_MAX = 256
CHOICES_MAX = 1024
"""The maximum number of choices of one call: prompts times ``n``."""
FIELD_SHOWN_CHARS = 64
VALUE_SHOWN_CHARS = 100
VARIABLES_MAX = 64
TOKEN_IDS = (1 << 32) - 1
INT_MAX = (1 << 31) - 1

STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")

Check = Callable[[str, Any], None]
Schema = dict[str, Any]
Convert = Callable[[Any], Any]


class Field(NamedTuple):
    """The check, JSON Schema and conversion of one field.

    ``check`` raises :class:`InvalidArgument`; it is never called with null, which every field accepts. ``sampled``
    makes the value of :class:`pinyon.core.request.SamplingParams`, or is None for other fields."""

    check: Check
    schema: Schema
    sampled: Convert | None = None


Fields = dict[str, Field]

_encoder = JSONEncoder()


def shown(value: Any) -> str:
    """Returns the beginning of ``value`` as JSON, however large the value is."""
    if type(value) is str:
        value = value[: VALUE_SHOWN_CHARS + 1]
    text = ""
    for part in _encoder.iterencode(value):
        text += part[: VALUE_SHOWN_CHARS + 1]
        if len(text) > VALUE_SHOWN_CHARS:
            return text[:VALUE_SHOWN_CHARS] + "…"
    return text


def wrong(name: str, wanted: str, value: Any, field: str = "") -> InvalidArgument:
    message = f"Invalid value for '{name}': expected {wanted}, got {shown(value)}."
    return InvalidArgument(message, field=field or name)


# ---------------------------------------------------------------- kinds of fields


def _typed(kind: type, wanted: str) -> Check:
    """Returns the check that a value is of that type."""

    def check(name: str, value: Any) -> None:
        if type(value) is not kind:
            raise wrong(name, wanted, value)

    return check


_string = _typed(str, "a string")
_boolean = _typed(bool, "a boolean")
_object = _typed(dict, "an object")


def _label(name: str, value: Any) -> None:
    _string(name, value)
    check_label(value, name)


def _variables(name: str, value: Any) -> None:
    _object(name, value)
    if len(value) > VARIABLES_MAX:
        raise InvalidArgument(f"'{name}' has {len(value)} entries, at most {VARIABLES_MAX} are allowed.", field=name)


def _integer(low: int, high: int, sampled: Convert | None = None) -> Field:
    def check(name: str, value: Any) -> None:
        if type(value) is not int or not low <= value <= high:
            limit = f"at least {low}" if type(value) is not int or value < low else f"at most {high}"
            raise wrong(name, f"an integer, {limit}", value)

    return Field(check, {"type": "integer", "minimum": low, "maximum": high}, sampled)


def _number(kind: Number) -> Field:
    low, high, above = kind.low, kind.high, kind.above

    def check(name: str, value: Any) -> None:
        if type(value) not in (int, float) or not low <= value <= high or (above and value == low):
            wanted = f"a number {'above' if above else 'from'} {low:g} {'up ' if above else ''}to {high:g}"
            raise wrong(name, wanted, value)

    return Field(check, {"type": "number", "exclusiveMinimum" if above else "minimum": low, "maximum": high}, float)


def _sampled(kind: FieldKind) -> Field:
    """Returns the field for sampling values of this kind."""
    if isinstance(kind, Switch):
        return _BOOLEAN._replace(sampled=bool)
    if isinstance(kind, Whole):
        return _integer(kind.low, INT_MAX if kind.high is None else min(kind.high, INT_MAX), int)
    make: dict[type, Callable[[Any], Field]]
    make = {Number: _number, Texts: _texts, TokenIds: _token_ids, TokenBiases: _token_biases}
    return make[type(kind)](kind)


_GUIDED = ("guided_choice", "guided_decoding_backend", "guided_grammar", "guided_json", "guided_regex",
           "guided_whitespace_pattern")  # fmt: skip
_LACKS = {
    name: what
    for what, names in {
        "A chat template of the request's own": ("chat_template",),
        "A prompt of embeddings": ("prompt_embeds",),
        "Audio": ("audio",),
        "Beam search": ("length_penalty", "use_beam_search"),
        "Filling in before a suffix": ("suffix",),
        "Input other than text": ("media_io_kwargs", "mm_processor_kwargs"),
        "Output other than text": ("modalities",),
        "Predicted output": ("prediction",),
        "Retrieval from documents": ("documents",),
        "Storing completions": ("store",),
        "Structured output": (*_GUIDED, "response_format", "structural_tag", "structured_outputs"),
        "Tool calling": ("function_call", "functions", "tool_call_id", "tool_calls", "tool_choice", "tools"),
        "Web search": ("web_search_options",),
    }.items()
    for name in names
}
"""The feature that an unsupported field of a request or message asks for, where the field's name does not say it."""
_NOTHING: tuple[Any, ...] = (False, "", [], {})
"""Values that mean the same as leaving a field out."""


def _unsupported(name: str, value: Any, field: str, where: str = "", allowed: tuple[Any, ...] = ()) -> InvalidArgument:
    """Returns the error for ``name`` at ``where`` in the request's ``field``; ``allowed`` are valid values."""
    where, what = repr(where or name), _LACKS.get(name)
    good = [shown(each) for each in allowed if each not in _NOTHING]
    if not good:
        message = f"{what or where} is not supported by this server: leave {where if what else 'it'} out."
    else:
        lacks = f"{what} is not supported by this server: " if what else ""
        message = f"{lacks}{where} may be {' or '.join(good)} only."
    return InvalidArgument(f"{message} It was {shown(value)}.", field=field)


def _only(*neutral: Any) -> Field:
    """Returns the field of a feature that the server lacks: only values that ask for nothing are accepted."""

    def check(name: str, value: Any) -> None:
        for each in neutral:
            # 0 == False and 1 == True in Python, not in JSON
            if value == each and (type(value) is bool) == (type(each) is bool):
                return
        raise _unsupported(name, value, name, allowed=neutral)

    return Field(check, {"enum": [*neutral, None]})


def _texts(kind: Texts) -> Field:
    """Returns a field that accepts one string or a list of strings."""

    def check(name: str, value: Any) -> None:
        texts = value if type(value) is list else [value]
        if len(texts) > kind.count:
            raise wrong(name, f"at most {kind.count} strings", value)
        for text in texts:
            if type(text) is not str or not kind.fits(text):
                raise wrong(name, f"a string or a list of strings of 1 to {kind.size_bytes} bytes", value)

    several = {"type": "array", "items": {"type": "string"}, "maxItems": kind.count}
    return Field(
        check, {"anyOf": [{"type": "string"}, several]}, lambda one: (one,) if type(one) is str else tuple(one)
    )


def _token_ids(kind: TokenIds) -> Field:
    def check(name: str, value: Any) -> None:
        if type(value) is not list or len(value) > kind.count:
            raise wrong(name, f"a list of at most {kind.count} token ids", value)
        for token in value:
            if type(token) is not int or not 0 <= token <= TOKEN_IDS:
                raise wrong(name, "a list of token ids", value)

    return Field(check, {**_TOKEN_LIST, "maxItems": kind.count}, tuple)


def _token_biases(kind: TokenBiases) -> Field:
    """Returns a field that accepts an object whose keys are token ids."""

    def check(name: str, value: Any) -> None:
        if type(value) is not dict or len(value) > kind.count:
            raise wrong(name, f"an object of at most {kind.count} token ids", value)
        for key, bias in value.items():
            if not (key.isascii() and key.isdecimal() and len(key) <= 10 and str(int(key)) == key):
                raise wrong(name, "token ids as keys", value)
            if int(key) > TOKEN_IDS or type(bias) not in (int, float) or not -kind.most <= bias <= kind.most:
                raise wrong(name, f"numbers from {-kind.most:g} to {kind.most:g} by token id", {key: bias})

    number = {"type": "number", "minimum": -kind.most, "maximum": kind.most}
    schema: Schema = {"type": "object", "maxProperties": kind.count, "additionalProperties": number}
    return Field(check, schema, _pairs)


def _pairs(value: dict[str, float]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted((int(token), float(bias)) for token, bias in value.items() if bias))


def _stream_options(name: str, value: Any) -> None:
    _object(name, value)
    for key, option in value.items():
        if key not in STREAM_OPTIONS:
            raise InvalidArgument(
                f"Unrecognized request argument supplied: {name}.{key[:FIELD_SHOWN_CHARS]}", field=name
            )
        if option is not None and type(option) is not bool:
            raise wrong(f"{name}.{key}", "a boolean", option, name)
    if value.get("include_obfuscation"):
        raise InvalidArgument("'stream_options.include_obfuscation' is not supported with the value true.", field=name)


def _messages(name: str, value: Any) -> None:
    # The chat template checks roles and texts; this function checks the rest.
    if type(value) is not list or not value:
        raise wrong(name, "a list of messages, not empty", value)
    for index, message in enumerate(value):
        if type(message) is not dict:
            raise wrong(f"{name}[{index}]", "an object", message, name)
        _neutral_beside(message, ("role", "content", "name"), name, f"{name}[{index}]")
        content = message.get("content")
        for number, part in enumerate(content if type(content) is list else ()):
            if type(part) is dict and part.get("type") == "text":
                # a cache hint does not change the text
                _neutral_beside(part, ("text", "cache_control"), name, f"{name}[{index}].content[{number}]")
        if message.get("name") is not None and type(message["name"]) is not str:
            raise wrong(f"{name}[{index}].name", "a string", message["name"], name)


def _neutral_beside(value: dict[str, Any], known: tuple[str, ...], name: str, where: str) -> None:
    for key, part in value.items():
        if key in known or part is None or part == [] or (key == "type" and part == "text"):
            continue
        raise _unsupported(key, part, name, f"{where}.{key[:FIELD_SHOWN_CHARS]}")


_STRING = Field(_string, {"type": "string"})
_LABEL = Field(_label, {"type": "string", "maxLength": 256})
_BOOLEAN = Field(_boolean, {"type": "boolean"})
_MESSAGES = Field(
    _messages,
    {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "properties": {
                "role": {"type": "string"},
                "name": {"type": "string"},
                "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
            },
            "required": ["role", "content"],
        },
    },
)
_TOKEN_LIST: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": TOKEN_IDS}}
_VARIABLES = Field(_variables, {"type": "object", "maxProperties": VARIABLES_MAX})
_PROMPT: Schema = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {**_TOKEN_LIST, "minItems": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": PROMPTS_MAX},
        {"type": "array", "items": {**_TOKEN_LIST, "minItems": 1}, "minItems": 1, "maxItems": PROMPTS_MAX},
    ]
}

# ---------------------------------------------------------------- the fields

_COMMON: Fields = {
    "model": _STRING,
    "n": _integer(1, N_MAX),
    "best_of": _integer(1, N_MAX),
    "stream": _BOOLEAN,
    "stream_options": Field(
        _stream_options,
        {"type": "object", "properties": {
            "include_usage": {"type": "boolean"}, "continuous_usage_stats": {"type": "boolean"},
            "include_obfuscation": {"enum": [False, None]}},
         "additionalProperties": False},
    ),
    "user": _LABEL,
    "safety_identifier": _LABEL,
    "priority": _integer(-PRIORITY_MAX, PRIORITY_MAX),
    "return_token_ids": _BOOLEAN,
    "return_tokens_as_token_ids": _BOOLEAN,
    # These fields do not affect the text: any value is accepted and ignored.
    "metadata": Field(_object, {"type": "object"}),
    "prompt_cache_key": _STRING,
    "spaces_between_special_tokens": _BOOLEAN,  # special tokens are never written
    "truncation_side": _only("left", "right"),
    "cache_salt": _LABEL,
    # These features do not exist here: values that ask for nothing are accepted.
    **dict.fromkeys(
        (*_GUIDED, "allowed_token_ids", "ec_transfer_params", "kv_transfer_params", "logprob_token_ids", "moderation",
         "prompt_cache_options", "prompt_cache_retention", "repetition_detection", "request_id", "session_id",
         "structural_tag", "structured_outputs", "truncate_prompt_tokens"),
        _only(),
    ),
    **dict.fromkeys(
        ("include_stop_str_in_output", "return_prompt_text", "return_token_offsets", "store", "use_beam_search",
         "watermarking"),
        _only(False),
    ),
    "bad_words": _only([]),
    "length_penalty": _only(1),
    "logits_processors": _only([]),
    "response_format": _only({"type": "text"}),
    "return_mm_kwargs": _only(True),
    "routed_experts_prompt_start": _only(0),
    "service_tier": _only("auto", "default"),
    "skip_special_tokens": _only(True),
    "stream_interval": _only(1),
    "thinking_token_budget": _only(-1),
    "vllm_xargs": _only({}),
    **{each.name: _sampled(each.kind) for each in SAMPLING_FIELDS},
    # These override the table: their form or meaning differs in OpenAI's or vLLM's interface.
    "top_k": _integer(-1, INT_MAX, lambda value: max(0, value)),  # -1 is off too
    "seed": _integer(-(1 << 63), (1 << 64) - 1, lambda value: value & 0xFFFF_FFFF_FFFF_FFFF),  # OpenAI's is signed
    "prompt_logprobs": _only(),
}  # fmt: skip

COMPLETION: Fields = {
    **_COMMON,
    "prompt": Field(lambda name, value: None, _PROMPT),  # checked by the parser
    "max_tokens": _integer(0, INT_MAX, int),
    "add_special_tokens": _BOOLEAN,
    "echo": _BOOLEAN,
    "prompt_embeds": _only(),
    "suffix": _only(""),
}

_CONVERSATION: Fields = {
    "messages": _MESSAGES,
    "add_generation_prompt": _BOOLEAN,
    "add_special_tokens": _only(False),
    "chat_template": _only(),
    "chat_template_kwargs": _VARIABLES,
    "continue_final_message": _BOOLEAN,
    "media_io_kwargs": _only({}),
    "mm_processor_kwargs": _only({}),
    "tools": _only([]),
}

CHAT: Fields = {
    **_COMMON,
    **_CONVERSATION,
    "audio": _only(),
    "documents": _only([]),
    "echo": _only(False),
    "function_call": _only("none", "auto"),
    "functions": _only([]),
    "include_reasoning": _only(True),
    "logprobs": _BOOLEAN,
    "max_completion_tokens": _integer(1, INT_MAX),
    "modalities": _only(["text"]),
    "parallel_tool_calls": _BOOLEAN,
    "prediction": _only(),
    "reasoning_effort": _only("none", "minimal", "low", "medium", "high", "xhigh", "max"),
    "tool_choice": _only("none", "auto"),
    "top_logprobs": _integer(0, LOGPROBS_MAX),
    "verbosity": _only("medium"),
    "web_search_options": _only(),
}

TOKENIZE: Fields = {
    **_CONVERSATION,
    "model": _STRING,
    "prompt": _STRING,
    "add_special_tokens": _BOOLEAN,
    "return_token_strs": _BOOLEAN,
}

DETOKENIZE: Fields = {"model": _STRING, "tokens": Field(lambda name, value: None, _TOKEN_LIST)}
