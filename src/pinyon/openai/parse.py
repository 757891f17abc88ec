"""The parser of requests' bodies: it takes bytes from clients and returns checked values.

An unknown field is refused; :mod:`pinyon.openai.fields` has the values that known fields accept. These include fields
of vLLM: ``top_k``, ``min_p``, ``min_tokens``, ``ignore_eos``, ``repetition_penalty``, ``priority`` and more.

pydantic-core parses the JSON (jiter: 1 µs for 8 KB, a seventh of ``json``); checks are one dict lookup per field."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from pydantic_core import from_json

from pinyon.core.errors import InvalidArgument
from pinyon.core.request import NO_LIMIT, SamplingParams
from pinyon.openai.fields import (
    CHAT,
    CHOICES_MAX,
    COMPLETION,
    DETOKENIZE,
    FIELD_SHOWN_CHARS,
    PROMPTS_MAX,
    TOKENIZE,
    Fields,
    shown,
    wrong,
)
from pinyon.openai.large import is_large, read_large

Messages = list[dict[str, Any]]
PromptInput = str | bytes | Messages
"""A text, tokens as little-endian u32, or a conversation."""

FIELDS_MAX = 128


class Rendering(NamedTuple):
    """Options for turning a text or a conversation into tokens."""

    add_special_tokens: bool | None = None
    """True if the tokenizer adds its special tokens. None: only for a text, as a template has its own."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] | None = None
    """Variables of the chat template."""
    whose: str = ""
    """The owner of the text, for a tokenizer that caches texts."""
    as_given: bool = False
    """True for a conversation that another engine renders: nothing is refused that it may accept."""


PLAIN = Rendering()

_UNNAMED: dict[str, Any] = {"max_tokens": NO_LIMIT, "temperature": 1.0}
"""Values of sampling fields that a request omits, where OpenAI's default differs from ours."""
_UNSAID = SamplingParams(**_UNNAMED)


class Call:
    """The parsed body of one call. Fields that were not given have class defaults (``priority`` None, ``user``
    empty)."""

    model: str
    prompt: PromptInput
    prompt_field: str
    sampling: SamplingParams = _UNSAID
    """The sampling parameters; ``max_tokens`` is :data:`pinyon.core.request.NO_LIMIT` if the call does not set it."""
    seeded: bool = False
    """True if the call sets ``sampling.seed``; otherwise a seed must be drawn."""
    stream: bool = False
    include_usage: bool = False
    user: str = ""
    priority: int | None = None
    cache_salt: str = ""
    others: tuple[PromptInput, ...] = ()
    """The prompts after the first one."""
    n: int = 1
    echo: bool = False
    unseen: bool = False
    """True if no generated text is shown, because the call is only about its prompts."""
    continuous_usage: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    rendering: Rendering = PLAIN

    def __init__(self, model: str, prompt: PromptInput, prompt_field: str) -> None:
        self.model = model
        self.prompt = prompt
        self.prompt_field = prompt_field

    @property
    def choices(self) -> int:
        return self.n * (1 + len(self.others))

    @property
    def plain(self) -> bool:
        """True for a call with one choice of which only the text is returned."""
        return not (
            self.n > 1
            or self.others
            or self.echo
            or self.sampling.logprobs >= 0
            or self.continuous_usage
            or self.return_token_ids
        )


def parse_completion(body: bytes | bytearray) -> Call:
    """Parses a completion call. Raises :class:`InvalidArgument` naming the field (None: the whole body is wrong)."""
    values, sampled = _read(body, COMPLETION)
    call = _call(values, "prompt")
    if values.get("echo"):
        call.echo = True
    if call.others and call.choices > CHOICES_MAX:  # n alone is below the limit
        raise InvalidArgument(f"prompts times n are {call.choices}, at most {CHOICES_MAX} are allowed.", field="n")
    if sampled:
        if call.echo and "logprobs" in sampled:
            sampled["prompt_logprobs"] = True
        if sampled.get("max_tokens") == 0:
            if not call.echo:
                raise wrong("max_tokens", "an integer, at least 1 (0 only with echo)", 0)
            sampled["max_tokens"] = 1
            call.unseen = True
        call.sampling = SamplingParams(**(_UNNAMED | sampled))
        call.seeded = "seed" in sampled
    if values.get("add_special_tokens") is False:
        call.rendering = Rendering(add_special_tokens=False)
    return call


def parse_chat(body: bytes | bytearray) -> Call:
    """Parses a chat call. Raises :class:`InvalidArgument` naming the field (None: the whole body is wrong)."""
    values, sampled = _read(body, CHAT)
    call = _call(values, "messages")
    if not _CHATS_OWN.isdisjoint(values):
        _put_chats_own(call, values, sampled)
    if sampled:
        call.sampling = SamplingParams(**(_UNNAMED | sampled))
        call.seeded = "seed" in sampled
    return call


def _put_chats_own(call: Call, values: dict[str, Any], sampled: dict[str, Any]) -> None:
    newer = values.get("max_completion_tokens")
    if newer is not None:
        if sampled.get("max_tokens", newer) != newer:
            raise InvalidArgument(
                f"max_tokens ({sampled['max_tokens']}) and max_completion_tokens ({newer}) differ.",
                field="max_completion_tokens",
            )
        sampled["max_tokens"] = newer
    top = values.get("top_logprobs") or 0
    if values.get("logprobs"):
        sampled["logprobs"] = top
    elif top:
        raise InvalidArgument(f"top_logprobs ({top}) needs logprobs to be true.", field="top_logprobs")
    if not _RENDERING.isdisjoint(values):
        call.rendering = _rendering(values)


class TokenizeCall(NamedTuple):
    """A parsed call of ``/tokenize``; ``model`` is None if the call does not name one."""

    model: str | None
    prompt: PromptInput
    prompt_field: str
    rendering: Rendering
    strings: bool
    """True if the texts of the tokens are requested too."""


def parse_tokenize(body: bytes | bytearray) -> TokenizeCall:
    """Parses a tokenize call. Raises :class:`InvalidArgument` naming the field (None: the whole body is wrong)."""
    values, _ = _read(body, TOKENIZE)
    text, messages = values.get("prompt"), values.get("messages")
    if (text is None) == (messages is None):
        raise InvalidArgument("You must provide either prompt or messages.", field="prompt")
    strings = bool(values.get("return_token_strs"))
    if text is not None:
        rendering = Rendering(add_special_tokens=values.get("add_special_tokens") is not False)
        return TokenizeCall(values.get("model"), text, "prompt", rendering, strings)
    assert messages is not None
    if values.get("add_special_tokens"):
        raise InvalidArgument(
            "'add_special_tokens' is not supported with the value true for messages: the chat template adds them.",
            field="add_special_tokens",
        )
    return TokenizeCall(values.get("model"), messages, "messages", _rendering(values), strings)


def parse_detokenize(body: bytes | bytearray) -> tuple[str | None, bytes]:
    """Returns the model, None if the call names none, and the tokens. Raises :class:`InvalidArgument`."""
    values, _ = _read(body, DETOKENIZE, "tokens")
    tokens = values.get("tokens")
    if type(tokens) is list and (not tokens or type(tokens[0]) is int):
        tokens = _tokens(tokens, "tokens") if tokens else b""
    if type(tokens) is not bytes:
        raise InvalidArgument("Invalid value for 'tokens': expected a list of token ids.", field="tokens")
    return values.get("model"), tokens


def _read(body: bytes | bytearray, known: Fields, tokens: str = "prompt") -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the checked fields as JSON has them, and those of :class:`SamplingParams` converted."""
    try:
        if is_large(body):
            values = read_large(body, tokens)
        else:
            values = from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        brief = str(error)[:120]  # jiter's messages are short and contain no input; any other message is cut
        raise InvalidArgument(f"We could not parse the JSON body of your request: {brief}.") from None
    if type(values) is not dict:
        raise InvalidArgument("The body must be a JSON object.")
    if len(values) > FIELDS_MAX:
        raise InvalidArgument(f"The body has {len(values)} fields, at most {FIELDS_MAX} are allowed.")
    sampled: dict[str, Any] = {}
    for name, value in values.items():
        field = known.get(name)
        if field is None:
            raise InvalidArgument(
                f"Unrecognized request argument supplied: {name[:FIELD_SHOWN_CHARS]} (with the value {shown(value)})",
                field=name[:FIELD_SHOWN_CHARS],
            )
        if value is not None:
            field[0](name, value)
            if (convert := field[2]) is not None:
                sampled[name] = convert(value)
    return values, sampled


def _call(values: dict[str, Any], prompt_field: str) -> Call:
    get = values.get
    model, prompt = get("model"), get(prompt_field)
    if model is None:
        raise InvalidArgument("You must provide a model parameter.", field="model")
    if prompt is None:
        raise InvalidArgument(f"You must provide a {prompt_field} parameter.", field=prompt_field)
    others: list[PromptInput] = []
    if prompt_field == "prompt" and (type(prompt) is not str or not prompt):
        prompt, *others = _prompts(prompt)
    call = Call(model, prompt, prompt_field)
    if others:
        call.others = tuple(others)
    if get("stream"):
        call.stream = True
    if not _RARE.isdisjoint(values):
        _put_rare(call, values)
    return call


def _put_rare(call: Call, values: dict[str, Any]) -> None:
    get = values.get
    call.user = get("user") or get("safety_identifier") or ""
    call.priority = get("priority")
    if (options := get("stream_options")) is not None:
        if not call.stream:
            raise InvalidArgument("stream_options is only allowed when stream is true.", field="stream_options")
        call.include_usage = bool(options.get("include_usage"))
        call.continuous_usage = bool(options.get("continuous_usage_stats"))
    call.n = get("n") or 1
    call.cache_salt = get("cache_salt") or ""
    call.return_token_ids = bool(get("return_token_ids"))
    call.return_tokens_as_token_ids = bool(get("return_tokens_as_token_ids"))
    if (best_of := get("best_of")) is not None and best_of != call.n:
        raise InvalidArgument(f"'best_of' is not supported with a value ({best_of}) other than n.", field="best_of")


_RARE = frozenset(("user", "safety_identifier", "priority", "stream_options", "n", "best_of", "cache_salt"))
_RARE |= {"return_token_ids", "return_tokens_as_token_ids"}
"""Fields that most calls do not have."""
_RENDERING = frozenset(("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "reasoning_effort"))
_CHATS_OWN = _RENDERING | {"max_completion_tokens", "logprobs", "top_logprobs"}


def _rendering(values: dict[str, Any]) -> Rendering:
    generation, final = values.get("add_generation_prompt"), bool(values.get("continue_final_message"))
    if generation and final:
        raise InvalidArgument(
            "continue_final_message and add_generation_prompt cannot both be true.", field="continue_final_message"
        )
    variables = dict(values.get("chat_template_kwargs") or {})
    effort = values.get("reasoning_effort")
    if effort is not None and variables.setdefault("reasoning_effort", effort) != effort:
        raise InvalidArgument(
            f"reasoning_effort ({effort}) and the one of chat_template_kwargs "
            f"({shown(variables['reasoning_effort'])}) differ.",
            field="reasoning_effort",
        )
    return Rendering(
        add_generation_prompt=not final if generation is None else generation,
        continue_final_message=final,
        variables=variables or None,
    )


def _prompts(value: Any) -> list[PromptInput]:
    """Returns the prompts of a string, ``[string, …]``, ``[token, …]`` or ``[[token, …], …]``."""
    if type(value) is bytes:  # token ids that are parsed already
        return [value]
    if type(value) is str:
        if not value:
            raise InvalidArgument("prompt must not be empty.", field="prompt")
        return [value]
    if type(value) is not list or not value:
        raise wrong("prompt", "texts or lists of token ids, and not empty", value)
    kind = type(value[0])
    if kind is int:
        return [_tokens(value, "prompt")]
    if kind not in (str, list, bytes):
        raise wrong("prompt", "texts or lists of token ids", value)
    if len(value) > PROMPTS_MAX:
        raise InvalidArgument(f"prompt has {len(value)} entries, at most {PROMPTS_MAX} are allowed.", field="prompt")
    for each in value:
        if type(each) is not kind:
            raise wrong("prompt", "texts or lists of token ids, not both", value)
        if not each:
            raise InvalidArgument("prompt must not be empty.", field="prompt")
    return [_tokens(each, "prompt") for each in value] if kind is list else value


def _tokens(value: list[Any], field: str) -> bytes:
    if any(type(token) is not int for token in value):
        raise wrong(field, "token ids", value)
    if not 0 <= min(value) <= max(value) < 1 << 32:
        raise InvalidArgument(f"{field} holds a token id outside the vocabulary.", field=field)
    return np.array(value, dtype="<u4").tobytes()
