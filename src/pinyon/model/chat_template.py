"""Chat messages to prompt tokens.

A checkpoint brings its own Jinja template, which runs sandboxed and bounded; the built-in byte model has role tokens.
Two promises hold for both:

- Text of a message never becomes a special token: a user who writes ``<|im_end|>`` has written ten characters.
- Appending turns keeps the earlier rendering as a prefix (for a checkpoint: if its template does), so the next turn of
  a conversation reuses the KV of the ones before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pinyon.core.errors import InvalidArgument
from pinyon.model.tokenizer import ByteTokenizer, HfTokenizer, TokenArray, utf8

__all__ = ["ByteChatTemplate", "ChatTemplate", "JinjaChatTemplate"]

MESSAGES_MAX = 4_096
RENDERED_CHARS_MAX = 16 << 20
TEMPLATE_CHARS_MAX = 1 << 20

DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""For a checkpoint without a template of its own."""

_ANSWERED = {"add_generation_prompt": True}
_RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt", "raise_exception"))
"""Variables that have a source of their own."""

# Private-use characters around the index of a marker found in a message; no template produces them.
_OPEN, _CLOSE = "\uf8f0", "\uf8f1"
_HERE = "\uf8f2"
"""Where a last message ends that is to be continued."""
_ESCAPE = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")


class ChatTemplate(Protocol):
    """Renders a conversation, ready for the assistant to answer."""

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt as people read it. Raises :class:`InvalidArgument` with field ``messages``."""
        ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> TokenArray:
        """The prompt's tokens. Raises :class:`InvalidArgument` with field ``messages``.

        ``continue_final_message``: the prompt ends with the last message's text, for the model to go on with it; not
        together with ``add_generation_prompt``. ``variables`` are checked already.
        """
        ...

    def check_variables(self, variables: Mapping[str, Any]) -> None:
        """Raises :class:`InvalidArgument` naming what the template does not know, or must not be told."""
        ...


class ByteChatTemplate:
    """The built-in model's: ``BOS (role text END_OF_TURN)* ASSISTANT``."""

    _ROLES: ClassVar[dict[str, int]] = {
        "system": ByteTokenizer.SYSTEM,
        "developer": ByteTokenizer.SYSTEM,
        "user": ByteTokenizer.USER,
        "assistant": ByteTokenizer.ASSISTANT,
        "tool": ByteTokenizer.TOOL,
    }

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        lines = [f"{m['role']}: {m['content']}\n" for m in _checked(messages, set(self._ROLES))]
        return "".join(lines) + "assistant:"

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> TokenArray:
        tokenizer = ByteTokenizer()
        end = np.array([ByteTokenizer.END_OF_TURN], dtype="<u4")
        parts = [np.array([ByteTokenizer.BOS], dtype="<u4")]
        for message in _checked(messages, set(self._ROLES)):
            role = np.array([self._ROLES[message["role"]]], dtype="<u4")
            parts += [role, tokenizer.encode(message["content"]), end]
        if continue_final_message:
            parts.pop()
        elif add_generation_prompt:
            parts.append(np.array([ByteTokenizer.ASSISTANT], dtype="<u4"))
        return np.concatenate(parts)

    def check_variables(self, variables: Mapping[str, Any]) -> None:
        _check_variables(variables, frozenset())


class JinjaChatTemplate:
    """A checkpoint's template (``chat_template`` of tokenizer_config.json, or chat_template.jinja).

    ``variables`` are what templates expect beside the messages: ``bos_token``, ``eos_token``, ….
    """

    def __init__(self, source: str | None, tokenizer: HfTokenizer, variables: Mapping[str, str] | None = None) -> None:
        source = DEFAULT_TEMPLATE if source is None else source
        if len(source) > TEMPLATE_CHARS_MAX:
            raise InvalidArgument(f"chat template is longer than {TEMPLATE_CHARS_MAX} characters", field="model")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
            self._known = frozenset(find_undeclared_variables(environment.parse(source)))
        except TemplateError as error:
            raise InvalidArgument(f"chat template cannot be parsed: {error}", field="model") from error
        self._tokenizer = tokenizer
        self._variables = dict(variables or {})
        self._known -= _RESERVED | self._variables.keys() | environment.globals.keys()
        # Longest first, so that a marker which begins with another is found whole.
        self._markers = sorted(tokenizer.special_tokens, key=len, reverse=True)
        pattern = "|".join(re.escape(marker) for marker in self._markers)
        self._marker_pattern = re.compile(pattern) if pattern else None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return self._render(_checked(messages, None))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> TokenArray:
        checked = _checked(messages, None)
        given = {**(variables or {}), "add_generation_prompt": add_generation_prompt}
        pattern = self._marker_pattern
        if pattern is None or not any(pattern.search(part) for m in checked for part in m.values()):
            return self._tokenizer.encode_marked(self._render(checked, given, final=continue_final_message))
        return self._encode_escaped(checked, pattern, given, final=continue_final_message)

    def check_variables(self, variables: Mapping[str, Any]) -> None:
        _check_variables(variables, self._known)
        if self._marker_pattern is not None and self._marker_pattern.search(_tojson(variables)):
            raise InvalidArgument(
                "chat_template_kwargs must not hold markers of special tokens", field="chat_template_kwargs"
            )

    def _encode_escaped(
        self, messages: list[dict[str, str]], pattern: re.Pattern[str], given: Mapping[str, Any], *, final: bool
    ) -> TokenArray:
        """Some message holds a marker: escape it, let the template write its own, then encode piece by piece."""
        index = {marker: i for i, marker in enumerate(self._markers)}

        def escape(text: str) -> str:
            return pattern.sub(lambda m: f"{_OPEN}{index[m[0]]}{_CLOSE}", text)

        def unescape(match: re.Match[str]) -> str:
            i = int(match[1])
            return self._markers[i] if i < len(self._markers) else match[0]

        escaped = [{name: escape(text) for name, text in m.items()} for m in messages]
        rendered = self._render(escaped, given, final=final)
        special = self._tokenizer.special_tokens
        parts: list[TokenArray] = []
        position = 0
        for match in (*pattern.finditer(rendered), None):
            end = len(rendered) if match is None else match.start()
            text = _ESCAPE.sub(unescape, rendered[position:end])
            if text:
                parts.append(self._tokenizer.encode(text))
            if match is not None:
                parts.append(np.array([special[match[0]]], dtype="<u4"))
                position = match.end()
        return np.concatenate(parts) if parts else np.empty(0, dtype="<u4")

    def _render(
        self, messages: list[dict[str, str]], given: Mapping[str, Any] = _ANSWERED, *, final: bool = False
    ) -> str:
        pieces: list[str] = []
        size = 0
        if final:
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _HERE}]
        try:
            for piece in self._template.generate(
                {"messages": messages, "tools": None, "documents": None, **self._variables, **given}
            ):
                size += len(piece)
                if size > RENDERED_CHARS_MAX:
                    raise _bad(f"render to more than {RENDERED_CHARS_MAX} characters")
                pieces.append(piece)
        except InvalidArgument:
            raise
        except _TemplateRefusal as error:
            raise _bad(f"are refused by the model's chat template: {error}") from None
        except (TemplateError, SecurityError) as error:
            raise _bad(f"cannot be rendered by the model's chat template: {error}") from error
        except Exception as error:  # templates run arbitrary expressions: TypeError, KeyError, OverflowError, …
            raise _bad(f"cannot be rendered by the model's chat template ({type(error).__name__})") from error
        rendered = "".join(pieces)
        if not final:
            return rendered
        end = rendered.rfind(_HERE)
        if end < 0:
            raise _bad("cannot be continued: the model's chat template does not show the last one's text")
        return rendered[:end]


class _TemplateRefusal(Exception):
    """``raise_exception(...)`` inside a template."""


def _raise_exception(message: object) -> None:
    raise _TemplateRefusal(str(message))


def _tojson(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _bad(what: str) -> InvalidArgument:
    return InvalidArgument(f"messages {what}", field="messages")


def _check_variables(variables: Mapping[str, Any], known: frozenset[str]) -> None:
    unknown = sorted(variables.keys() - known)
    if unknown:
        field = "reasoning_effort" if unknown == ["reasoning_effort"] else "chat_template_kwargs"
        raise InvalidArgument(
            f"{field}: the model's chat template does not use {unknown[0][:64]!r}, which was given as "
            f"{_tojson(variables[unknown[0]])[:64]}; it uses {', '.join(sorted(known)) or 'no variables'}",
            field=field,
        )


def _checked(messages: Sequence[Mapping[str, Any]], roles: set[str] | None) -> list[dict[str, str]]:
    """``role`` and ``content`` as strings. ``content`` may be a list of OpenAI text parts."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise _bad("must be a list of objects")
    if not messages:
        raise _bad("must not be empty")
    if len(messages) > MESSAGES_MAX:
        raise _bad(f"has {len(messages)} entries, at most {MESSAGES_MAX} are allowed")
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _bad(f"[{i}] must be an object")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise _bad(f"[{i}].role must be a string")
        if roles is not None and role not in roles:
            raise _bad(f"[{i}].role must be one of {sorted(roles)}, got {role[:64]!r}")
        text = _text(i, content)
        for part in (role, text):
            try:
                utf8(part)
            except InvalidArgument as error:
                raise _bad(f"[{i}]: {error.message}") from None
        checked.append({"role": role, "content": text})
    return checked


def _text(i: int, content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        texts = []
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise _bad(f"[{i}].content may hold text parts only")
            texts.append(part["text"])
        return "".join(texts)
    raise _bad(f"[{i}].content must be a string or a list of text parts")
