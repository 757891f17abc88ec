"""Waits for what another thread, process or task brings about without an event: they poll until a deadline."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

WAIT_S = 90.0
"""Seconds far above what anything takes, far below a hang and a request's own two minutes."""
POLL_S = 0.002

Value = TypeVar("Value")


def wait_until(condition: Callable[[], Value], what: str, timeout_s: float = WAIT_S, poll_s: float = POLL_S) -> Value:
    """Blocks until the condition is true; returns its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(poll_s)
    return value


async def eventually(condition: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    """Runs other tasks until the condition is true; it may be a coroutine function."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                value = condition()
                if await value if inspect.isawaitable(value) else value:
                    return
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        pytest.fail(f"never: {what}")
