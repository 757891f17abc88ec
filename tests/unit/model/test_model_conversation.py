"""Conversations as vLLM renders them. The texts are those of vLLM 0.32.0, for the same templates and bodies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pinyon.core.errors import InvalidArgument
from pinyon.frontdoor.servers.given_prompt import CHAT, COMPLETION, given_prompt
from pinyon.model.card import load_card
from pinyon.model.chat_template import JinjaChatTemplate
from pinyon.model.tokenizer import HfTokenizer

CARD = load_card(str(Path(__file__).parents[2] / "data" / "golden" / "qwen3-f32"))
assert isinstance(CARD.tokenizer, HfTokenizer)
TOKENIZER: HfTokenizer = CARD.tokenizer

TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "({{ call.function.name }} {{ call.function.arguments | tojson }}){% endfor %}"
    "{{ message.tool_call_id or '' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is false %}no thought{% endif %}{% endif %}"
)
PARTS = (
    "{% for message in messages %}<{{ message['role'] }}>{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}[{{ part['text'] }}]{% endfor %}{% endif %}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PLAIN = (
    "{% for m in messages %}<|{{m['role']}}|>{{m['content']}}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


ASKED = {"role": "user", "content": "Which town?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"b": {"x": 1}, "a": {}},
        "description": "does ö",
        "odd": 1,
        "strict": True,
    },
    "more": 2,
}
CALL = {"type": "function", "id": "c1", "function": {"arguments": '{"b": 1, "a": [2, "é"]}', "name": "f"}}
CALLED = [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
RESULT = {
    "role": "tool",
    "tool_call_id": "c1",
    "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}],
}
NOT_JSON = {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "not json"}}]}
TWO_PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}

RENDERED: dict[str, tuple[str, dict[str, Any], str]] = {
    "tools": (
        TOOLS,
        {"messages": [ASKED], "tools": [TOOL, {"function": {"name": "g"}}]},
        '{"type": "function", "function": {"name": "f", "description": "does ö", "parameters": '
        '{"b": {"x": 1}, "a": {}}, "strict": true}}\n'
        '{"type": "function", "function": {"name": "g", "description": null, "parameters": null}}\n'
        "<user>Which town?<assistant>",
    ),
    "calls": (
        TOOLS,
        {"messages": [*CALLED, RESULT]},
        '<user>Which town?<assistant>(f {"b": 1, "a": [2, "é"]})<tool>x\nyc1<assistant>',
    ),
    "arguments that are no JSON": (
        TOOLS,
        {"messages": [ASKED, NOT_JSON, RESULT]},
        "<user>Which town?<assistant>(f {})<tool>x\nyc1<assistant>",
    ),
    "a call as a template writes it": (
        PARTS,
        {"messages": CALLED},
        '<user>[Which town?]<assistant>[{"id": "c1", "function": {"arguments": {"b": 1, "a": [2, "é"]}, "name": "f"}, '
        '"type": "function"}]<assistant>',
    ),
    "parts for a template that reads them": (
        PARTS,
        {"messages": [{"role": "system", "content": ["s", {"type": "text", "text": "t"}]}, TWO_PARTS]},
        "<system>[s][t]<user>[a][b]<assistant>",
    ),
    "parts joined": (PLAIN, {"messages": [TWO_PARTS]}, "<|user|>a\nb\n<|assistant|>"),
    "special text": (
        PLAIN,
        {"messages": [{"role": "user", "name": "bob", "content": "special <|im_end|> text"}]},
        "<|user|>special <|im_end|> text\n<|assistant|>",
    ),
    "no thinking": (TOOLS, {"messages": [ASKED], "reasoning_effort": "none"}, "<user>Which town?<assistant>no thought"),
    "variables": (
        TOOLS,
        {"messages": [ASKED], "chat_template_kwargs": {"enable_thinking": False, "unread": 1}},
        "<user>Which town?<assistant>no thought",
    ),
    "no generation prompt": (PLAIN, {"messages": [ASKED], "add_generation_prompt": False}, "<|user|>Which town?\n"),
    "a continued answer": (
        PLAIN,
        {
            "messages": [ASKED, {"role": "assistant", "content": "a b "}],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
        "<|user|>Which town?\n<|assistant|>a b ",
    ),
}


@pytest.mark.parametrize("name", RENDERED)
def test_a_conversation_is_rendered_as_vllm_does(name: str) -> None:
    template, body, expected = RENDERED[name]
    given = given_prompt(CHAT, body)
    assert given is not None
    assert isinstance(given.prompt, list)
    rendering = given.rendering
    tokens = JinjaChatTemplate(template, TOKENIZER).encode_chat(
        given.prompt,
        rendering.variables,
        add_generation_prompt=rendering.add_generation_prompt,
        continue_final_message=rendering.continue_final_message,
        as_given=True,
    )
    assert TOKENIZER.decode(tokens, skip_special_tokens=False) == expected
    assert tokens.tolist() == TOKENIZER.encode(expected, add_special_tokens=False).tolist()


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": 5},
        {"role": "developer", "content": "x"},
        {"content": "x"},
        {"role": "assistant", "tool_calls": [{"type": "custom"}]},
        {"role": "assistant", "tool_calls": 5},
        {"role": "assistant", "tool_calls": {"function": {}}},
        {"role": "user", "content": [{"type": [], "text": "x"}]},
        {"role": "user", "content": [{"type": {}}, None]},
        {"role": [], "content": "x"},
        None,
    ],
)
def test_what_only_a_server_renders_is_told_apart(message: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        CARD.chat_template.encode_chat([message], as_given=True)


def test_fields_that_change_tokens_leave_them_to_the_server() -> None:
    assert given_prompt(CHAT, {"messages": [ASKED]}) is not None
    for name in ("chat_template", "documents", "truncate_prompt_tokens", "mm_processor_kwargs"):
        assert given_prompt(CHAT, {"messages": [ASKED], name: 1}) is None
        assert given_prompt(CHAT, {"messages": [ASKED], name: None}) is not None
    assert given_prompt(CHAT, {"messages": [ASKED], "tools": [{"type": "web_search"}]}) is None
    assert given_prompt("/v1/responses", {"input": "x"}) is None
    assert given_prompt(COMPLETION, {"prompt": ["a", "b"]}) is None
    assert given_prompt(COMPLETION, {"prompt": "a", "prompt_embeds": "x"}) is None
