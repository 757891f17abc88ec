"""Work in steps: small work is done at once, and in large work others get the loop between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import TypeVar

Value = TypeVar("Value")
Steps = Generator[None, None, Value]
"""Others may have the loop at each ``yield``."""


def now_or_in_turns(steps: Steps[Value], then: Callable[[Value], Awaitable[None] | None]) -> Awaitable[None] | None:
    """All of it, and ``then`` what comes of it; what is left to be awaited, if anything is. A task's turn costs as much
    as what most messages ask for."""
    try:
        next(steps)
        return _rest(steps, then)
    except StopIteration as end:
        value: Value = end.value
    return then(value)


async def _rest(steps: Steps[Value], then: Callable[[Value], Awaitable[None] | None]) -> None:
    await asyncio.sleep(0)
    doing = then(await in_turns(steps))
    if doing is not None:
        await doing


async def in_turns(steps: Steps[Value]) -> Value:
    """All of it."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            value: Value = end.value
            return value
        await asyncio.sleep(0)
