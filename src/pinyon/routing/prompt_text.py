"""The text that routing keys are made of where there is no tokenizer: equal beginnings are equal bytes.

The text stands for the beginning of the prompt, which a chat template makes that only the server has. The same
conversation must give the same text, however its JSON is spaced and its members are ordered. A conversation that goes
on must begin with the text it had before. Tools and instructions come before the messages, as in all templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from xxhash import xxh3_128_hexdigest

from pinyon.routing.routing_keys import CHUNK_BYTES, KEYS_MAX

TEXT_MAX: Final = KEYS_MAX * CHUNK_BYTES
"""Bytes of text; the rest has no keys."""
TOKEN_MAX: Final = 1 << 32
_MESSAGE: Final = "\x1e"
_PART: Final = "\x1f"
_SPOKEN: Final = ("role", "content")


class _Text:
    """A text that grows up to its bound, :data:`TEXT_MAX`."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._chars = 0

    @property
    def full(self) -> bool:
        return self._chars >= TEXT_MAX

    def add(self, text: str) -> None:
        if self._chars < TEXT_MAX:
            text = text[: TEXT_MAX - self._chars]
            self._parts.append(text)
            self._chars += len(text)

    def encoded(self) -> bytes:
        return "".join(self._parts).encode("utf-8", "surrogatepass")[:TEXT_MAX]


def prompt_text(body: Mapping[str, Any]) -> bytes:
    """Returns the text of a JSON body for OpenAI's completions, chats and responses, or Anthropic's messages.

    A member of another form adds nothing, or its JSON; the server gets it unchanged and may know better. Of several
    prompts, only the first counts.
    """
    if "prompt" in body:
        return _of_prompt(body["prompt"])
    text = _Text()
    for name in ("tools", "system", "instructions"):
        given = body.get(name)
        if given:
            text.add(name + _PART)
            if isinstance(given, str):
                text.add(given)
            elif name == "system":
                _add_content(text, given)
            else:
                text.add(_canonical(given))
            text.add(_MESSAGE)
    spoken = body.get("messages")
    if spoken is None:
        spoken = body.get("input")
    if isinstance(spoken, str):
        _add_message(text, {"role": "user", "content": spoken})
    elif isinstance(spoken, list):
        for message in spoken:
            if text.full:
                break
            _add_message(text, message)
    return text.encoded()


def _of_prompt(prompt: Any) -> bytes:
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, bytes, list)):
        prompt = prompt[0]
    if isinstance(prompt, bytes):  # tokens that the parser has packed
        return prompt[:TEXT_MAX]
    if isinstance(prompt, str):
        return prompt[:TEXT_MAX].encode("utf-8", "surrogatepass")[:TEXT_MAX]
    if isinstance(prompt, list):
        tokens = prompt[: TEXT_MAX // 4]
        for token in tokens:
            if not isinstance(token, int) or not 0 <= token < TOKEN_MAX:
                return b""
        return b"".join([token.to_bytes(4, "little") for token in tokens])
    return b""


def _add_message(text: _Text, message: Any) -> None:
    if isinstance(message, str):
        text.add(message)
    elif isinstance(message, dict):
        role = message.get("role")
        text.add(role if isinstance(role, str) else "")
        text.add(_PART)
        _add_content(text, message.get("content"))
        others = {name: value for name, value in message.items() if name not in _SPOKEN and value is not None}
        if others:  # tool calls, references to them, names
            text.add(_PART)
            text.add(_canonical(others))
    text.add(_MESSAGE)


def _add_content(text: _Text, content: Any) -> None:
    """Adds a message's content, a string or a list of parts. A part without text, such as a picture, adds its hash."""
    if isinstance(content, str):
        text.add(content)
    elif isinstance(content, list):
        for part in content:
            if isinstance(part, str):
                text.add(part)
            elif isinstance(part, dict) and isinstance(part.get("text"), str):
                text.add(part["text"])
            else:
                text.add(_PART + xxh3_128_hexdigest(_canonical(part).encode("utf-8", "surrogatepass")))
    elif content is not None:
        text.add(_canonical(content))


def _canonical(value: Any) -> str:
    """Returns the same JSON for values that differ only in spacing and in the order of members."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
