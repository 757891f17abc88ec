"""The prompt of a body that goes on to an instance's server: read leniently, as the server will render it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from pinyon.core.errors import InvalidArgument
from pinyon.model.conversation import engine_tools
from pinyon.openai.parse import PromptInput, Rendering

CHAT: Final = "/v1/chat/completions"
COMPLETION: Final = "/v1/completions"
_CHANGES_TOKENS: Final = (
    *("truncate_prompt_tokens", "prompt_embeds", "chat_template", "documents", "mm_processor_kwargs"),
    "media_io_kwargs",
)
"""Fields that change the prompt's tokens in ways that only the server knows."""


class GivenPrompt(NamedTuple):
    """A prompt and how the server renders it. ``kinds`` name what occurs in it and what servers may render otherwise
    (:data:`pinyon.frontdoor.servers.comparison.SAMPLES`)."""

    prompt: PromptInput
    rendering: Rendering
    kinds: frozenset[str]


def given_prompt(path: str, values: Mapping[str, Any]) -> GivenPrompt | None:
    """Returns the prompt of a body; None if only the server can tell its tokens: it has pictures, several prompts, or a
    form that is unknown here."""
    if any(values.get(name) is not None for name in _CHANGES_TOKENS):
        return None
    try:
        if path == CHAT:
            return _conversation(values)
        return _text(values) if path == COMPLETION else None
    except InvalidArgument:
        return None


def _text(values: Mapping[str, Any]) -> GivenPrompt | None:
    prompt = values.get("prompt")
    if type(prompt) is list and len(prompt) == 1 and type(prompt[0]) is not int:
        prompt = prompt[0]
    if type(prompt) is list and prompt and all(type(token) is int and 0 <= token < 1 << 32 for token in prompt):
        prompt = np.array(prompt, dtype="<u4").tobytes()
    if type(prompt) is bytes:
        return GivenPrompt(prompt, Rendering(), frozenset())
    if type(prompt) is not str or not prompt:
        return None
    kinds = {"completion"} if prompt.isascii() else {"completion", "unicode"}
    return GivenPrompt(prompt, Rendering(values.get("add_special_tokens") is not False), frozenset(kinds))


def _conversation(values: Mapping[str, Any]) -> GivenPrompt | None:
    messages = values.get("messages")
    variables = values.get("chat_template_kwargs") or {}
    if values.get("add_special_tokens") or type(messages) is not list or type(variables) is not dict:
        return None
    variables = dict(variables)
    kinds = {"chat"}
    if tools := values.get("tools"):
        variables["tools"] = engine_tools(tools)
        kinds.add("tools")
    if (effort := values.get("reasoning_effort")) is not None:
        variables["reasoning_effort"] = effort
        variables.setdefault("enable_thinking", effort != "none")
    for message in messages:
        if type(message) is not dict:
            return None
        role, content = message.get("role"), message.get("content")
        if role == "system":
            kinds.add("system")
        elif role == "assistant":
            kinds.add("turns")
        if role == "tool" or message.get("tool_calls"):
            kinds.add("calls")
        if type(content) is list:
            kinds.add("parts")
        elif type(content) is str and not content.isascii():
            kinds.add("unicode")
    generation, continued = values.get("add_generation_prompt"), bool(values.get("continue_final_message"))
    if generation is False and not continued:
        kinds.add("open")
    if continued:
        kinds.add("continued")
    rendering = Rendering(
        add_generation_prompt=generation is not False,
        continue_final_message=continued,
        variables=variables or None,
        as_given=True,
    )
    return GivenPrompt(messages, rendering, frozenset(kinds))
