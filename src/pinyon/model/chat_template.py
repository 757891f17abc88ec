"""Chat messages to prompt tokens.

A checkpoint brings its own Jinja template, which runs sandboxed and bounded; the built-in byte model has role tokens.
Two promises hold for both:

- Text of a message or of a variable never becomes a special token: a user who writes ``<|im_end|>`` has written ten
  characters. (A template can still form a special token by joining two texts directly.) For messages without such text,
  the tokens are those of ``transformers``' ``apply_chat_template``.
- Appending turns keeps the earlier rendering as a prefix (for a checkpoint: if its template does), so the next turn of
  a conversation reuses the KV of earlier turns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from jinja2 import TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pinyon.core.errors import InvalidArgument
from pinyon.model.conversation import engine_messages, reads_parts
from pinyon.model.markers import Markers
from pinyon.model.tokenizer import ByteTokenizer, HfTokenizer, MuchNew, TokenArray, utf8

MESSAGES_MAX = 4_096
RENDERED_CHARS_MAX = 16 << 20
TEMPLATE_CHARS_MAX = 1 << 20

DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""The template for a checkpoint that has none."""

_RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"))
"""Variables that clients cannot set, because their values come from elsewhere."""

# Private-use characters around the index of an escaped text: a marker, or the first of these characters. No template
# produces them, but a name in an object may.
_OPEN, _CLOSE = "\uf8f0", "\uf8f1"
_HERE = "\uf8f2"
"""The mark at the end of a last message that the model is to continue."""
_ESCAPE = re.compile(f"{_OPEN}([0-9]{{1,9}}){_CLOSE}")


class ByteChatTemplate:
    """The built-in model's template: ``BOS (role text END_OF_TURN)* ASSISTANT``."""

    _ROLES: ClassVar[dict[str, int]] = {
        "system": ByteTokenizer.SYSTEM,
        "developer": ByteTokenizer.SYSTEM,
        "user": ByteTokenizer.USER,
        "assistant": ByteTokenizer.ASSISTANT,
        "tool": ByteTokenizer.TOOL,
    }

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        as_given: bool = False,
        new_chars: int | None = None,
        whose: str = "",
    ) -> TokenArray:
        """Returns the prompt's tokens. Raises as :meth:`JinjaChatTemplate.encode_chat`; here, no text takes long."""
        if as_given:
            messages = engine_messages(messages, parts=False)
        else:
            self.check_variables(variables or {})
        tokenizer = ByteTokenizer()
        end = np.array([ByteTokenizer.END_OF_TURN], dtype="<u4")
        parts = [np.array([ByteTokenizer.BOS], dtype="<u4")]
        for message in self._checked(messages):
            role = np.array([self._ROLES[message["role"]]], dtype="<u4")
            parts += [role, tokenizer.encode(message["content"]), end]
        if continue_final_message:
            parts.pop()
        elif add_generation_prompt:
            parts.append(np.array([ByteTokenizer.ASSISTANT], dtype="<u4"))
        return np.concatenate(parts)

    def check_variables(self, variables: Mapping[str, Any]) -> None:
        _check_variables(variables, frozenset())

    def _checked(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
        checked = _checked(messages, set(self._ROLES))
        _refuse_names(checked)
        return checked


class JinjaChatTemplate:
    """A checkpoint's template (``chat_template`` of tokenizer_config.json, or chat_template.jinja).

    ``tokens`` are those that templates know by name: ``bos_token``, ``eos_token``, …. ``strftime_now`` formats the
    present time; without it, templates that write the date are refused."""

    def __init__(
        self,
        source: str | None,
        tokenizer: HfTokenizer,
        tokens: Mapping[str, str] | None = None,
        strftime_now: Callable[[str], str] | None = None,
    ) -> None:
        source = DEFAULT_TEMPLATE if source is None else source
        if len(source) > TEMPLATE_CHARS_MAX:
            raise InvalidArgument(f"chat template is longer than {TEMPLATE_CHARS_MAX} characters", field="model")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = strftime_now or _no_clock
        try:
            self._template = environment.from_string(source)
            parsed = environment.parse(source)
            reads = frozenset(meta.find_undeclared_variables(parsed))
        except TemplateError as error:
            raise InvalidArgument(f"chat template cannot be parsed: {error}", field="model") from error
        self._tokenizer = tokenizer
        self._tokens = dict(tokens or {})
        self._reads = reads - _RESERVED - environment.globals.keys()
        self._parts = reads_parts(parsed)
        special = [marker for marker in tokenizer.special_tokens if marker]
        self._markers = Markers(special) if special else None
        self._escaped = (*special, _OPEN)
        self._escapes = {text: f"{_OPEN}{i}{_CLOSE}" for i, text in enumerate(self._escaped)}
        self._to_escape = Markers(self._escaped).pattern

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
        """Returns the prompt as readable text.

        ``variables`` are plain JSON values that the template reads besides the messages (vLLM's
        ``chat_template_kwargs``). Raises :class:`InvalidArgument` with field ``messages``, also when names in the
        messages change nothing. The field is ``chat_template_kwargs`` if a variable is reserved or the template does
        not read it."""
        return self._render(*self._given(messages, variables))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        as_given: bool = False,
        new_chars: int | None = None,
        whose: str = "",
    ) -> TokenArray:
        """Returns the prompt's tokens.

        Raises as :meth:`render`, and with ``new_chars`` and ``whose`` as :meth:`HfTokenizer.encode`. With
        ``continue_final_message`` the prompt ends with the last message's text, which the model continues, without a
        generation prompt. With ``add_special_tokens``, it has the special tokens that the tokenizer puts around a text,
        besides the template's.

        With ``as_given``, these are the tokens that other engines make (:mod:`pinyon.model.conversation`), whose
        templates find ``tools`` among the ``variables``. There, text may become special tokens."""
        how = {"add_generation_prompt": add_generation_prompt, "final": continue_final_message}
        if as_given:
            rendered = self._render(engine_messages(messages, parts=self._parts), variables or {}, **how)
            return self._tokenizer.encode(rendered, add_special_tokens=False, new_chars=new_chars, whose=whose)
        checked, given = self._given(messages, variables)
        markers, texts = self._markers, list(_texts([checked, given]))
        work = 0 if markers is None else markers.work(texts)
        if new_chars is not None:
            if work > new_chars:
                raise MuchNew
            new_chars -= work
        if markers is None or not work or not any(map(markers.pattern.search, texts)):
            rendered = self._render(checked, given, **how)
            return self._tokenizer.encode(
                rendered, add_special_tokens=add_special_tokens, new_chars=new_chars, whose=whose
            )
        if new_chars is not None and sum(map(len, texts)) > new_chars:
            raise MuchNew  # escaping takes as long as encoding
        tokens = self._encode_escaped(checked, given, markers.pattern, new_chars, **how)
        if not add_special_tokens:
            return tokens
        before, behind = self._tokenizer.around
        return np.frombuffer(before + tokens.tobytes() + behind, "<u4")

    def check_variables(self, variables: Mapping[str, Any]) -> None:
        """Raises :class:`InvalidArgument` naming a variable that is reserved or that the template does not read.

        A ``reasoning_effort`` of ``none`` asks for nothing, so it is accepted where it is not read."""
        _check_variables(variables, self._reads)

    def _given(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None
    ) -> tuple[list[dict[str, str]], Mapping[str, Any]]:
        checked, given = _checked(messages, None), variables or {}
        self.check_variables(given)
        self._check_names(checked, given)
        return checked, given

    def _check_names(self, messages: list[dict[str, str]], variables: Mapping[str, Any]) -> None:
        """Raises :class:`InvalidArgument` if names in the messages do not change the prompt."""
        if not any("name" in message for message in messages):
            return
        nameless = [{"role": message["role"], "content": message["content"]} for message in messages]
        named = self._render(messages, variables)
        try:
            if named != self._render(nameless, variables):
                return
        except InvalidArgument:
            return  # the template demands names
        _refuse_names(messages)

    def _encode_escaped(
        self,
        messages: list[dict[str, str]],
        variables: Mapping[str, Any],
        pattern: re.Pattern[str],
        new_chars: int | None,
        **how: bool,
    ) -> TokenArray:
        """Encodes texts that contain markers: escapes them, renders, then encodes piece by piece."""
        escaped, escapes, found = self._escaped, self._escapes, self._to_escape

        def escape(value: Any) -> Any:
            if isinstance(value, str):
                return found.sub(lambda m: escapes[m[0]], value)
            if isinstance(value, Mapping):
                return {name: escape(item) for name, item in value.items()}
            return [escape(item) for item in value] if isinstance(value, list) else value

        def unescape(match: re.Match[str]) -> str:
            i = int(match[1])
            return escaped[i] if i < len(escaped) else match[0]

        rendered = self._render(escape(messages), escape(variables), **how)
        if new_chars is not None and len(rendered) > new_chars:
            raise MuchNew
        special = self._tokenizer.special_tokens
        parts: list[TokenArray] = []
        position = 0
        for match in (*pattern.finditer(rendered), None):
            end = len(rendered) if match is None else match.start()
            text = _ESCAPE.sub(unescape, rendered[position:end])
            if text:
                parts.append(self._tokenizer.encode_plain(text, goes_on=position > 0))
            if match is not None:
                parts.append(np.array([special[match[0]]], dtype="<u4"))
                position = match.end()
        return np.concatenate(parts) if parts else np.empty(0, dtype="<u4")

    def _render(
        self,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
        final: bool = False,
    ) -> str:
        pieces: list[str] = []
        size = 0
        if final:
            if not isinstance(messages[-1]["content"], str):
                raise _bad("cannot be continued: the model's chat template reads parts")
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _HERE}]
        given = {"tools": None, "documents": None, **self._tokens, **variables}
        given["add_generation_prompt"] = add_generation_prompt
        try:
            for piece in self._template.generate(given, messages=messages):
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


ChatTemplate = ByteChatTemplate | JinjaChatTemplate


class _GenerationTag(Extension):
    """The tag ``{% generation %}…{% endgeneration %}``, which marks the assistant's text for training; ignored here."""

    tags = {"generation"}  # noqa: RUF012  # as the base class declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _TemplateRefusal(Exception):
    """The error of ``raise_exception(...)`` inside a template."""


def _raise_exception(message: object) -> None:
    raise _TemplateRefusal(str(message))


def _no_clock(_: str) -> str:
    raise _TemplateRefusal("it writes the date, and nobody said what day it is")


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _texts(value: object) -> Iterator[str]:
    """Yields all texts of a JSON value, except the names in objects."""
    if isinstance(value, str):
        yield value
    else:
        items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        for item in items:
            yield from _texts(item)


def _check_variables(variables: Mapping[str, Any], reads: frozenset[str]) -> None:
    """Raises :class:`InvalidArgument` if the template does not read each variable."""
    unknown = sorted(variables.keys() - reads)
    if unknown == ["reasoning_effort"] and variables["reasoning_effort"] == "none":
        return
    if unknown:
        field = "reasoning_effort" if unknown == ["reasoning_effort"] else "chat_template_kwargs"
        raise InvalidArgument(
            f"{field}: the model's chat template does not read {unknown[0][:64]!r}, which was given as "
            f"{_tojson(variables[unknown[0]])[:64]}; it reads {', '.join(sorted(reads)) or 'no variables'}",
            field=field,
        )


def _refuse_names(messages: Sequence[Mapping[str, str]]) -> None:
    for i, message in enumerate(messages):
        if "name" in message:
            raise _bad(
                f"[{i}].name: the model's chat template does not read it, which was given as "
                f"{_tojson(message['name'][:64])}"
            )


def _bad(what: str) -> InvalidArgument:
    return InvalidArgument(f"messages{'' if what.startswith('[') else ' '}{what}", field="messages")


def _checked(messages: Sequence[Mapping[str, Any]], roles: set[str] | None) -> list[dict[str, str]]:
    """Returns ``role``, ``content`` (joined from OpenAI text parts) and, unless empty, ``name`` as strings."""
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
        text, name = _text(i, content), message.get("name") or ""
        if not isinstance(name, str):
            raise _bad(f"[{i}].name must be a string")
        for part in (role, text, name):
            try:
                utf8(part)
            except InvalidArgument as error:
                raise _bad(f"[{i}]: {error.message}") from None
        checked.append({"role": role, "content": text, "name": name} if name else {"role": role, "content": text})
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
