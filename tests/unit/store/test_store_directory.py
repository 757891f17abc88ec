"""What the directory makes of lists of nodes: a loss is counted once, and nobody waits for another's question."""

from __future__ import annotations

import asyncio
from typing import Any

from pinyon.store.directory import NODES_FRESH_S, BlockDirectory


class Record:
    def __init__(self, life: str) -> None:
        self.life = life


class Metadata:
    """Each question waits for an answer of its own."""

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
        for _ in range(4):  # its turn
            await asyncio.sleep(0)
        return task

    async def listed(self, *lives: str) -> None:
        self.now += NODES_FRESH_S
        task = await self.ask()
        self.metadata.asked[-1].set_result([Record(life) for life in lives])
        await task


async def test_a_node_that_is_gone_or_lives_anew_is_a_loss_and_a_new_one_is_none() -> None:
    play = Play()
    seen = []
    for lives in (("a1",), ("a1", "b1"), ("a1", "b1"), ("a1", "b2"), ("a1",), (), ("a1",)):
        await play.listed(*lives)
        seen.append(play.directory.losses)
    assert seen == [0, 0, 0, 1, 2, 3, 3]


async def test_questions_do_not_wait_for_each_other_and_an_old_answer_is_no_loss() -> None:
    play = Play()
    await play.listed("a1")
    play.now += NODES_FRESH_S
    older = await play.ask()
    play.now += 0.1
    newer = await play.ask()
    assert len(play.metadata.asked) == 3, "the second question waits for the first"
    play.metadata.asked[2].set_result([Record("a1"), Record("b1")])
    await newer
    play.metadata.asked[1].set_result([Record("a1")])
    assert [node.life for node in await older] == ["a1", "b1"]
    assert play.directory.losses == 0
