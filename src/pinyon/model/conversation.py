"""Conversations in the form in which other engines (vLLM and those that follow it) hand them to a chat template.

Nothing is refused here that such an engine might accept. What it would render in a way that is not known here, such as
pictures, raises :class:`InvalidArgument`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import nodes

from pinyon.core.errors import InvalidArgument

_TEXT_PARTS = frozenset(("text", "input_text", "output_text", "refusal", "thinking"))
_FUNCTION = ("name", "description", "parameters", "strict")


def engine_messages(messages: Sequence[Any], *, parts: bool) -> list[dict[str, Any]]:
    """Returns the messages as a template gets them: with ``parts``, a content is a list of parts, else one text."""
    found = [_message(each, parts) for each in messages]
    if not found:
        raise InvalidArgument("there are no messages", field="messages")
    return found


def _message(message: Any, parts: bool) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str) or role == "developer":  # engines differ in what they make of a developer
        raise InvalidArgument("a message without a role that all engines know", field="messages")
    texts = [_text(part) for part in _parts(message.get("content"))]
    joined = "\n".join(texts)
    as_parts = parts and role != "tool"
    made: dict[str, Any] = {"role": role}
    made["content"] = [{"type": "text", "text": text} for text in texts] if as_parts else joined
    if role == "assistant":
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list):
                raise InvalidArgument("tool calls that are no list", field="messages")
            made["tool_calls"] = [_call(each) for each in calls]
        if (reasoning := message.get("reasoning")) is not None:
            made["reasoning"] = made["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        made["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        made["name"] = message["name"]
    return made


def _parts(content: Any) -> Sequence[Any]:
    if content is None:
        return ()
    return [content] if isinstance(content, str) else content if isinstance(content, list) else [None]


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind in _TEXT_PARTS:
        text = part.get(kind if kind in ("refusal", "thinking") else "text")
        if isinstance(text, str):
            return text
    raise InvalidArgument("a part of a content that is no text", field="messages")


def _call(call: Any) -> dict[str, Any]:
    """Returns a tool call with its arguments as an object, which templates expect; OpenAI's are text. The members are
    in the order that vLLM has, as a template may write them all."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidArgument("a tool call without a function", field="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {}
    made = {"arguments": arguments if isinstance(arguments, dict) else {}, "name": function.get("name")}
    return {"id": call.get("id"), "function": made, "type": "function"}


def engine_tools(tools: Any) -> list[dict[str, Any]]:
    """Returns the tools as a template gets them: with the fields, in the order, that engines know."""
    made: list[dict[str, Any]] = []
    for each in tools if isinstance(tools, list) else (None,):
        function = each.get("function") if isinstance(each, Mapping) and not each.get("defer_loading") else None
        if not isinstance(function, Mapping) or function.get("defer_loading"):
            raise InvalidArgument("a tool that is no function", field="tools")
        said = {name: function.get(name) for name in _FUNCTION if name != "strict" or function.get(name) is not None}
        made.append({"type": "function", "function": said})
    return made


def reads_parts(template: nodes.Template) -> bool:
    """Returns whether a template goes through the parts of a content, so that engines give it parts."""
    return any(_is_content(loop.iter) for loop in template.find_all(nodes.For))


def _is_content(node: nodes.Node | None) -> bool:
    if isinstance(node, nodes.Filter | nodes.Test):
        return _is_content(node.node)
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _is_content(node.node)
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Name) and node.name == "content"
