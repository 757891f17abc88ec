"""The directory's use of lists of nodes: a loss is counted once, and no request waits for another's question."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pinyon.core.errors import Unavailable
from pinyon.store.directory import DOUBT_S, MAX_PAUSE_S, NODES_FRESH_S, BlockDirectory


class Record:
    def __init__(self, life: str) -> None:
        self.life = life


class Metadata:
    """Metadata whose questions each wait for an answer of their own."""

    def __init__(self) -> None:
        self.asked: list[asyncio.Future[list[Record]]] = []

    async def nodes(self) -> list[Record]:
        self.asked.append(asyncio.get_running_loop().create_future())
        return await self.asked[-1]


class Play:
    def __init__(self) -> None:
        self.now = 0.0
        self.metadata = Metadata()
        metadata: Any = self.metadata
        self.directory = BlockDirectory(metadata, lambda: self.now)

    async def ask(self) -> asyncio.Task[Any]:
        task = asyncio.create_task(self.directory.nodes())
        for _ in range(4):  # lets the task have its turn
            await asyncio.sleep(0)
        return task

    async def listed(self, *lives: str) -> None:
        self.now += NODES_FRESH_S
        task = await self.ask()
        self.metadata.asked[-1].set_result([Record(life) for life in lives])
        await task


async def test_a_gone_or_restarted_node_is_a_loss_and_a_new_one_is_not() -> None:
    play = Play()
    seen = []
    for lives in (("a1",), ("a1", "b1"), ("a1", "b1"), ("a1", "b2"), ("a1",), (), ("a1",)):
        await play.listed(*lives)
        seen.append(play.directory.losses)
    assert seen == [0, 0, 0, 1, 2, 3, 3]


async def test_questions_do_not_wait_and_an_old_answer_is_no_loss() -> None:
    play = Play()
    await play.listed("a1")
    play.now += NODES_FRESH_S
    older = await play.ask()
    play.now += DOUBT_S / 2
    newer = await play.ask()
    assert len(play.metadata.asked) == 3, "the second question waits for the first"
    play.metadata.asked[2].set_result([Record("a1"), Record("b1")])
    await newer
    play.metadata.asked[1].set_result([Record("a1")])
    assert [node.life for node in await older] == ["a1", "b1"]
    assert play.directory.losses == 0


async def test_one_question_at_a_time_asks_a_redis_that_hangs() -> None:
    play = Play()
    first = await play.ask()
    play.now += DOUBT_S + 0.01
    with pytest.raises(Unavailable):
        await (await play.ask())
    assert len(play.metadata.asked) == 1
    play.metadata.asked[0].set_exception(Unavailable("Redis: TimeoutError"))
    with pytest.raises(Unavailable):
        await first
    play.now += MAX_PAUSE_S
    crowd = [await play.ask() for _ in range(8)]
    assert len(play.metadata.asked) == 2, "after the pause all ask"
    play.metadata.asked[1].set_result([Record("a1")])
    came = await asyncio.gather(*crowd, return_exceptions=True)
    assert [isinstance(each, Unavailable) for each in came] == [False] + [True] * 7
    play.now += NODES_FRESH_S
    crowd = [await play.ask() for _ in range(2)]
    assert len(play.metadata.asked) == 4, "Redis answers, and is asked one question at a time"
    for each in play.metadata.asked[2:]:
        each.set_result([Record("a1")])
    await asyncio.gather(*crowd)


async def test_a_question_that_hangs_past_its_time_is_a_failure() -> None:
    play = Play()
    task = asyncio.create_task(play.directory.locate([], 0.01))
    await asyncio.sleep(0)
    play.now += DOUBT_S + 0.01
    with pytest.raises(Unavailable):
        await task
    assert len(play.metadata.asked) == 1
    with pytest.raises(Unavailable, match="not asked for a moment"):
        await (await play.ask())
