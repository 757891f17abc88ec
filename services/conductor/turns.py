"""Work in steps: small work is done at once; during large work, other tasks get the event loop between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import TypeVar

Value = TypeVar("Value")
Steps = Generator[None, None, Value]
"""A generator that lets other tasks have the event loop at each ``yield``."""


def now_or_in_turns(steps: Steps[Value], then: Callable[[Value], Awaitable[None] | None]) -> Awaitable[None] | None:
    """Does all steps and calls ``then`` with their value; returns what the caller has to await, if anything.

    Most messages need one step, and a task's turn would cost as much as their work."""
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
    """Does all steps, and returns their value."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            value: Value = end.value
            return value
        await asyncio.sleep(0)
