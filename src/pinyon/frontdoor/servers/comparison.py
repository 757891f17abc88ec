"""The comparison of the tokens that are made here with those that an instance's server makes, by fixed prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from pydantic_core import from_json

from pinyon.core.errors import InvalidArgument, Unavailable
from pinyon.frontdoor.instances.prompts import Prompts
from pinyon.frontdoor.servers.given_prompt import CHAT, COMPLETION, given_prompt
from pinyon.frontdoor.upstreams.server import Server

ANSWER_S: Final = 5.0
BYTES_MAX: Final = 1 << 20

_ASKED = {"role": "user", "content": "Which town has the most bridges?"}
_SYSTEM = {"role": "system", "content": "You answer in one word."}
_SAID = {"role": "assistant", "content": "Hamburg has 2500."}
_TOOL = {
    "type": "function",
    "function": {
        "name": "count_bridges",
        "description": "Counts the bridges of a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
_CALL = {"id": "call_1", "type": "function", "function": {"name": "count_bridges", "arguments": '{"town": "Hamburg"}'}}
_PARTS = {"role": "user", "content": [{"type": "text", "text": "Which town?"}, {"type": "text", "text": "One word."}]}

SAMPLES: Final[Mapping[str, Mapping[str, Any]]] = {
    "completion": {"prompt": "The town with the most bridges is called"},
    "unicode": {"prompt": "Äpfel, naïve Œuvre, 東京の橋, мосты, 🌉 e\u0301"},
    "chat": {"messages": [_ASKED]},
    "system": {"messages": [_SYSTEM, _ASKED]},
    "turns": {"messages": [_ASKED, _SAID, {"role": "user", "content": "And the fewest?"}]},
    "tools": {"messages": [_ASKED], "tools": [_TOOL]},
    "calls": {
        "messages": [
            _ASKED,
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "2500"},
        ],
        "tools": [_TOOL],
    },
    "parts": {"messages": [_PARTS]},
    "open": {"messages": [_ASKED, _SAID], "add_generation_prompt": False},
    "continued": {"messages": [_ASKED, _SAID], "add_generation_prompt": False, "continue_final_message": True},
}
"""The bodies that are compared, by the kind of prompt that each stands for."""


async def differences(server: Server, prompts: Prompts) -> dict[str, str] | None:
    """Returns the kinds of prompts of which the server makes other tokens, with where the first difference is; None if
    it has no ``/tokenize``, or refuses all of them. A kind that the server refuses is not among them. Raises
    :class:`Unavailable` if it does not answer now."""
    found: dict[str, str] = {}
    answered = False
    for kind, sample in SAMPLES.items():
        body = json.dumps({"model": prompts.model, **sample}).encode()
        status, answer = await server.ask(b"/tokenize", ANSWER_S, BYTES_MAX, body)
        if status in (404, 405, 501):
            return None
        if status >= 500 or status in (401, 403, 429):
            raise Unavailable(f"/tokenize answers {status}")
        theirs = _tokens(answer) if status == 200 else None
        if theirs is None:
            continue
        answered = True
        ours = await _ours(prompts, sample)
        if theirs != ours:
            found[kind] = _where(theirs, ours)
    return found if answered else None


def _tokens(answer: bytes) -> list[int] | None:
    try:
        tokens = from_json(answer)["tokens"]
    except (ValueError, LookupError, TypeError):
        return None
    return tokens if type(tokens) is list else None


async def _ours(prompts: Prompts, sample: Mapping[str, Any]) -> list[int]:
    """Returns our tokens of a sample, made in the way of a request; none if we refuse it."""
    given = given_prompt(COMPLETION if "prompt" in sample else CHAT, sample)
    assert given is not None
    try:
        tokens, _ = await prompts.given(given.prompt, given.rendering, "", "", "")
    except InvalidArgument:
        return []
    ours: list[int] = np.frombuffer(tokens, "<u4").tolist()
    return ours


def _where(theirs: list[int], ours: list[int]) -> str:
    if not ours:
        return "we cannot render it"
    shared = min(len(theirs), len(ours))
    place = next((i for i in range(shared) if theirs[i] != ours[i]), shared)
    its, own = (str(each[place]) if place < len(each) else "the end" for each in (theirs, ours))
    return f"at token {place} it has {its}, we have {own}"
