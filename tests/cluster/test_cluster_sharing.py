"""The sharing of KV: a request with another salt reuses none, and what must not be stored is never found."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from tests.cluster.asking import openai_client
from tests.cluster.observe import wait_idle

TEXT = "Pines are planted by jays that forget where they have cached the seeds. " * 8
_numbers = itertools.count()


@pytest.fixture
def prompt() -> str:
    """A prompt that is used only once."""
    return f"{next(_numbers)} {TEXT}"


@pytest.fixture
def cached(cluster):
    """A function that sends a prompt and returns how many tokens were reused."""
    with openai_client(cluster) as client:

        async def ask(prompt: str, headers: dict[str, str] | None = None, **fields: object) -> int:
            values = {"model": "pinyon-tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0}
            answer = await asyncio.to_thread(
                client.completions.create, **values, extra_headers=headers, extra_body=fields
            )
            await wait_idle(cluster)  # then the conductor knows the blocks that the prompt left
            return answer.usage.prompt_tokens_details.cached_tokens

        yield ask


@pytest.fixture
def found(cached):
    """A function that checks several times for reuse of a prompt: an instance without its KV may be done sooner."""

    async def ask(prompt: str, headers: dict[str, str] | None = None, **fields: object) -> bool:
        for _ in range(5):
            if await cached(prompt, headers, **fields) > 500:
                return True
        return False

    return ask


async def test_salts_are_apart(cached, found, prompt):
    assert await cached(prompt) == 0
    assert await found(prompt)
    assert await cached(prompt, cache_salt="one") == 0
    assert await cached(prompt, cache_salt="two") == 0
    assert await found(prompt, cache_salt="one")
    assert await found(prompt, cache_salt="")


async def test_what_must_not_be_stored_is_found_by_nobody(cached, found, prompt):
    unstored = {"x-pinyon-no-store": "1"}
    for _ in range(3):
        assert await cached(prompt, unstored) == 0
    assert await cached(prompt) == 0
    assert await found(prompt, unstored), "what others left may be reused"
