"""The lenient reader of prompts takes any JSON that a server might accept."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.errors import InvalidArgument
from pinyon.frontdoor.servers.given_prompt import CHAT, COMPLETION, given_prompt
from pinyon.model.conversation import engine_messages

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMED = dict.fromkeys(("role", "content", "tool_calls", "name", "reasoning", "tool_call_id"), JSON)
MESSAGE = JSON | st.fixed_dictionaries(
    {}, optional=NAMED | {"role": st.sampled_from(["user", "assistant", "tool", "system"]) | JSON}
)
BODY = st.fixed_dictionaries(
    {},
    optional={
        "messages": JSON | st.lists(MESSAGE, max_size=4),
        "prompt": JSON,
        **dict.fromkeys(("tools", "chat_template_kwargs", "reasoning_effort", "continue_final_message"), JSON),
    },
)


@given(body=BODY, path=st.sampled_from([CHAT, COMPLETION, "/v1/responses"]))
def test_any_body_is_a_prompt_or_the_servers_business(body: dict[str, Any], path: str) -> None:
    found = given_prompt(path, body)
    if found is not None and isinstance(found.prompt, list):
        for parts in (True, False):
            with suppress(InvalidArgument):
                assert len(engine_messages(found.prompt, parts=parts)) == len(found.prompt)
