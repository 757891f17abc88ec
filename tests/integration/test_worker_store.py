"""A worker keeps blocks for a store that is away only in room that requests do not need."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pinyon.core.errors import Unavailable
from tests.integration.kvstore_parts import running_node
from tests.integration.worker_parts import BLOCK_TOKENS, SHORT, WAIT_S, Fleet, gauge, reference, submission, until
from tests.waiting import eventually

POOL = 32


class AwayStore:
    """A store that takes blocks, and answers with a failure when it is let."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.let_go = asyncio.Event()
        self.losses = 0

    async def nodes(self) -> None:
        pass

    async def put(self, *_: Any, **__: Any) -> None:
        self.asked.set()
        await self.let_go.wait()
        raise Unavailable("the store is away")


def prompt(number: int, blocks: int) -> list[int]:
    """Returns a prompt of full blocks less one token, with another beginning for each number."""
    return [32 + number, *range(32, 32 + blocks * BLOCK_TOKENS - 2)]


async def test_a_store_that_is_away_holds_no_room_that_requests_want(fleet: Fleet) -> None:
    store = AwayStore()
    worker, client = await fleet.mixed(blocks=POOL, store=store)

    async def serve(tokens: list[int]) -> None:
        assert (await client.answer(tokens, SHORT, prefill=worker, decode=worker)).tokens == reference(tokens, SHORT)
        assert await worker.decodes.drained(WAIT_S)  # it has returned its blocks
        assert await worker.prefills.drained(WAIT_S)

    for number in range(3):
        await serve(prompt(number, 9))
    await store.asked.wait()
    assert gauge(worker, "used_blocks") <= POOL // 4
    await serve(prompt(4, POOL - 3))  # while a put of the first blocks hangs
    store.let_go.set()
    await until(lambda: not gauge(worker, "used_blocks"))
    await serve(prompt(5, 9))
    await fleet.idle()  # also checks that nothing is kept for the store within the pause


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "mixed"])
async def test_prompts_placed_without_a_conductor_read_the_store(fleet: Fleet, redis_url: str, apart: bool) -> None:
    planned, unplanned = prompt(1, 9), prompt(2, 9)
    async with running_node(redis_url, pool_mib=8) as node:
        writer, client = await fleet.mixed(redis_url=redis_url)
        for tokens in (planned, unplanned):
            answer = await client.answer(tokens, SHORT, prefill=writer, decode=writer)
        await eventually(lambda: node.figure("listed_blocks") >= 16, "both prompts are stored")
        if apart:
            p, d = await fleet.pair(redis_url=redis_url)
        else:
            p = d = await fleet.start("mixed", "m1", redis_url=redis_url)
        client = await fleet.client(d)
        for tokens, asks in ((planned, False), (unplanned, True)):
            asked = submission(tokens, SHORT, prefill=p, decode=d, request_id=f"asks-{asks}")
            asked.placement.ask_store = asks
            (answer,) = await client.submit(asked)
            assert (await answer.wait()).tokens == reference(tokens, SHORT)
            assert answer.prefill.store_tokens == (8 * BLOCK_TOKENS if asks else 0)
        await fleet.idle()
