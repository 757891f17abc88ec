"""The text that routing keys are made of where there is no tokenizer: equal beginnings are equal bytes.

The text stands for the beginning of the prompt, which a chat template makes that only the server has. The same
conversation must give the same text, however its JSON is spaced and its members are ordered. A conversation that goes
on must begin with the text it had before. Tools and instructions come before the messages, as in all templates."""

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


def prompt_text(body: Mapping[str, Any]) -> bytes:
    """Returns the text of a JSON body for OpenAI's completions, chats and responses, or Anthropic's messages.

    A member of another form adds nothing, or its JSON; the server gets it unchanged and may know better. Of several
    prompts, only the first counts."""
    if "prompt" in body:
        return _of_prompt(body["prompt"])
    parts: list[str] = []
    for name in ("tools", "system", "instructions"):
        given = body.get(name)
        if given:
            text = _content(given) if name == "system" or isinstance(given, str) else _canonical(given)
            parts += (name, _PART, text, _MESSAGE)
    spoken = body.get("messages")
    if spoken is None:
        spoken = body.get("input")
    if isinstance(spoken, str):
        spoken = [{"role": "user", "content": spoken}]
    if isinstance(spoken, list):
        left = TEXT_MAX - sum(map(len, parts))
        for message in spoken:
            if left <= 0:
                break
            text = _message(message)
            parts.append(text)
            left -= len(text)
    return "".join(parts)[:TEXT_MAX].encode("utf-8", "surrogatepass")[:TEXT_MAX]


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


def _message(message: Any) -> str:
    if isinstance(message, str):
        return message + _MESSAGE
    if not isinstance(message, dict):
        return _MESSAGE
    role = message.get("role")
    text = f"{role if isinstance(role, str) else ''}{_PART}{_content(message.get('content'))}"
    others = {name: value for name, value in message.items() if name not in _SPOKEN and value is not None}
    # Others are tool calls, references to them, names.
    return f"{text}{_PART}{_canonical(others)}{_MESSAGE}" if others else text + _MESSAGE


def _content(content: Any) -> str:
    """Returns the text of a message's content, a string or a list of parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join([_part(part) for part in content])
    return "" if content is None else _canonical(content)


def _part(part: Any) -> str:
    """Returns the text of a part; the hash of one without text, such as a picture."""
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    return _PART + xxh3_128_hexdigest(_canonical(part).encode("utf-8", "surrogatepass"))


def _canonical(value: Any) -> str:
    """Returns the same JSON for values that differ only in spacing and in the order of members."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
