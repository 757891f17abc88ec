"""Bodies of ``/v1/completions`` and ``/v1/chat/completions``: bytes from outside in, checked values out.

A field that nobody knows is refused; what the others may hold is in :mod:`pinyon.openai.fields`. Fields of vLLM
beside OpenAI's: ``top_k``, ``min_p``, ``min_tokens``, ``ignore_eos``, ``repetition_penalty``, ``priority`` and more.

The JSON reader is pydantic-core's (jiter: 1 µs for 8 KB, a seventh of ``json``); checks are one dict lookup per field.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from pydantic_core import from_json

from pinyon.core.errors import InvalidArgument
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

__all__ = [
    "PLAIN",
    "Call",
    "Messages",
    "PromptInput",
    "Rendering",
    "TokenizeCall",
    "parse_chat",
    "parse_completion",
    "parse_detokenize",
    "parse_tokenize",
]

Messages = list[dict[str, Any]]
PromptInput = str | bytes | Messages
"""Text, tokens as little-endian u32, or a conversation."""

FIELDS_MAX = 128


class Rendering(NamedTuple):
    """How a text or a conversation becomes tokens."""

    add_special_tokens: bool | None = None
    """Those that the model's tokenizer puts around a text. None: a text has them, a conversation those of its
    template."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] | None = None
    """Of the chat template."""
    whose: str = ""
    """Whose text it is, for a tokenizer that remembers texts."""


PLAIN = Rendering()


class Call:
    """One call's body. ``max_tokens`` 0, ``seed`` None, ``priority`` None, ``user`` empty: not named.

    From ``min_p`` to ``prompt_logprobs`` as in :class:`pinyon.core.request.SamplingParams`. Most calls name few of all:
    the rest is as the class has it.
    """

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
    cache_salt: str = ""
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int = -1
    prompt_logprobs: bool = False
    others: tuple[PromptInput, ...] = ()
    """Prompts beside the first one."""
    n: int = 1
    echo: bool = False
    unseen: bool = False
    """Nothing generated is shown: the call is about its prompts."""
    continuous_usage: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    rendering: Rendering = PLAIN

    def __init__(self, model: str, prompt: PromptInput, prompt_field: str, **said: Any) -> None:
        self.model = model
        self.prompt = prompt
        self.prompt_field = prompt_field
        for name, value in said.items():
            setattr(self, name, value)

    @property
    def choices(self) -> int:
        return self.n * (1 + len(self.others))

    @property
    def plain(self) -> bool:
        """One choice, and nothing but its text is told."""
        return not (
            self.n > 1
            or self.others
            or self.echo
            or self.logprobs >= 0
            or self.continuous_usage
            or self.return_token_ids
        )


def parse_completion(body: bytes | bytearray) -> Call:
    """Raises :class:`InvalidArgument` naming the field (None if the body as a whole is wrong)."""
    values = _read(body, COMPLETION)
    call = _call(values, "prompt")
    if values.get("echo"):
        call.echo = True
    if call.choices > CHOICES_MAX:
        raise InvalidArgument(f"prompts times n are {call.choices}, at most {CHOICES_MAX} are allowed.", field="n")
    if (logprobs := values.get("logprobs")) is not None:
        call.logprobs = logprobs
        call.prompt_logprobs = call.echo
    if values.get("max_tokens") == 0:
        if not call.echo:
            raise wrong("max_tokens", "an integer, at least 1 (0 only with echo)", 0)
        call.max_tokens = 1
        call.unseen = True
    if values.get("add_special_tokens") is False:
        call.rendering = Rendering(add_special_tokens=False)
    return call


def parse_chat(body: bytes | bytearray) -> Call:
    """Raises :class:`InvalidArgument` naming the field (None if the body as a whole is wrong)."""
    values = _read(body, CHAT)
    call = _call(values, "messages")
    newer = values.get("max_completion_tokens")
    if newer is not None:
        if call.max_tokens and call.max_tokens != newer:
            raise InvalidArgument(
                f"max_tokens ({call.max_tokens}) and max_completion_tokens ({newer}) differ.",
                field="max_completion_tokens",
            )
        call.max_tokens = newer
    top = values.get("top_logprobs") or 0
    if values.get("logprobs"):
        call.logprobs = top
    elif top:
        raise InvalidArgument(f"top_logprobs ({top}) needs logprobs to be true.", field="top_logprobs")
    if not _RENDERING.isdisjoint(values):
        call.rendering = _rendering(values)
    return call


class TokenizeCall(NamedTuple):
    """``model`` None: not named."""

    model: str | None
    prompt: PromptInput
    prompt_field: str
    rendering: Rendering
    strings: bool
    """The tokens' texts are wanted too."""


def parse_tokenize(body: bytes | bytearray) -> TokenizeCall:
    """Raises :class:`InvalidArgument` naming the field (None if the body as a whole is wrong)."""
    values = _read(body, TOKENIZE)
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
    """The model if one is named, and the tokens. Raises :class:`InvalidArgument`."""
    values = _read(body, DETOKENIZE, "tokens")
    tokens = values.get("tokens")
    if type(tokens) is list and (not tokens or type(tokens[0]) is int):
        tokens = _tokens(tokens, "tokens") if tokens else b""
    if type(tokens) is not bytes:
        raise InvalidArgument("Invalid value for 'tokens': expected a list of token ids.", field="tokens")
    return values.get("model"), tokens


def _read(body: bytes | bytearray, known: Fields, tokens: str = "prompt") -> dict[str, Any]:
    try:
        if is_large(body):
            values = read_large(body, tokens)
        else:
            values = from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError as error:
        raise InvalidArgument(f"We could not parse the JSON body of your request: {_brief(error)}.") from None
    if type(values) is not dict:
        raise InvalidArgument("The body must be a JSON object.")
    if len(values) > FIELDS_MAX:
        raise InvalidArgument(f"The body has {len(values)} fields, at most {FIELDS_MAX} are allowed.")
    for name, value in values.items():
        field = known.get(name)
        if field is None:
            raise InvalidArgument(
                f"Unrecognized request argument supplied: {name[:FIELD_SHOWN_CHARS]} (with the value {shown(value)})",
                field=name[:FIELD_SHOWN_CHARS],
            )
        if value is not None:
            field[0](name, value)
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
    others: list[PromptInput] = []
    if prompt_field == "prompt":
        prompt, *others = _prompts(prompt)
    call = Call(model, prompt, prompt_field)
    call.others = tuple(others)
    if (value := get("max_tokens")) is not None:
        call.max_tokens = value
    if (value := get("temperature")) is not None:
        call.temperature = float(value)
    if (value := get("top_p")) is not None:
        call.top_p = float(value)
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
        call.continuous_usage = bool(options.get("continuous_usage_stats"))
    if not _RARE_NAMES.isdisjoint(values):
        for name in _RARE_NAMES.intersection(values):
            if (value := values[name]) is not None:
                setattr(call, name, _RARE[name](value))
    if (best_of := get("best_of")) is not None and best_of != call.n:
        raise InvalidArgument(f"'best_of' is not supported with a value ({best_of}) other than n.", field="best_of")
    return call


def _bias(value: dict[str, float]) -> tuple[tuple[int, float], ...]:
    return tuple(sorted((int(token), float(bias)) for token, bias in value.items() if bias))


_RARE: dict[str, Callable[[Any], Any]] = {
    "top_k": lambda value: max(0, value),  # -1 is off too
    "min_p": float,
    "min_tokens": int,
    "stop_token_ids": tuple,
    "repetition_penalty": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "logit_bias": _bias,
    "n": int,
    "cache_salt": str,
    "return_token_ids": bool,
    "return_tokens_as_token_ids": bool,
}
"""What most calls do not have, and how it is kept."""
_RARE_NAMES = frozenset(_RARE)

_RENDERING = frozenset(("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "reasoning_effort"))


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
    """A string, ``[string, …]``, ``[token, …]`` or ``[[token, …], …]``."""
    if type(value) is bytes:  # token ids, read already
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
