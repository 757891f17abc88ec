"""The prompts that are worked on within the event loop, and those that are not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pinyon.frontdoor.instances.instances import ConductorCluster
from pinyon.frontdoor.instances.prompts import INLINE_CHARS, NEW_CHARS, THREAD_CHARS, KeyChains, Prompts
from pinyon.model.card import load_card
from pinyon.model.chat_template import JinjaChatTemplate
from pinyon.model.tokenizer import HfTokenizer
from pinyon.openai.parse import PLAIN

CARD = load_card(str(Path(__file__).parents[2] / "data" / "golden_text" / "qwen2-bytes"))


@pytest.mark.parametrize(
    ("chars", "elsewhere"), [(20, False), (INLINE_CHARS + 4 * NEW_CHARS, True), (THREAD_CHARS, True)]
)
async def test_text_a_template_adds_counts_in_the_size_of_messages(chars: int, elsewhere: bool) -> None:
    text = " ".join(f"{chars}{number * 7919:x}" for number in range(chars))[:chars]
    assert isinstance(CARD.tokenizer, HfTokenizer)
    template = JinjaChatTemplate("{{ names.one[0] }}{{ messages[0].content }}", CARD.tokenizer)
    card: Any = SimpleNamespace(
        tokenizer=CARD.tokenizer, path=None, chat_template=template, config=CARD.config, name="m"
    )
    sent: list[str] = []

    async def run(holder: str, work: Any, *args: Any) -> Any:
        sent.append(holder)
        return work(*args)

    off_loop: Any = SimpleNamespace(run=run)
    prompts = Prompts(card, ConductorCluster(lambda _: None), off_loop, KeyChains(), 16, 16)
    messages = [{"role": "user", "content": "hi"}]
    rendering = PLAIN._replace(variables={"names": {"one": [text]}})
    tokens = await prompts.tokenize(messages, "messages", rendering, "a")
    assert tokens == template.encode_chat(messages, rendering.variables).tobytes()
    assert sent == (["a"] if elsewhere else [])
