"""Ended tasks are over, and the error of a task that died before is reported."""

from __future__ import annotations

import asyncio
import logging

import pytest

from pinyon.runtime.tasks import ended


async def died() -> None:
    raise ValueError("the sweeper broke")


async def test_ended_tasks_are_over_and_earlier_deaths_logged(caplog: pytest.LogCaptureFixture) -> None:
    dead, running = asyncio.create_task(died(), name="sweep"), asyncio.create_task(asyncio.sleep(3600))
    await asyncio.wait((dead,))
    with caplog.at_level(logging.ERROR, "pinyon.tasks"):
        await ended(dead, None, running)
    assert running.cancelled()
    assert [(each.message, str(each.exc_info[1])) for each in caplog.records if each.exc_info] == [
        ("sweep had ended", "the sweeper broke")
    ]
