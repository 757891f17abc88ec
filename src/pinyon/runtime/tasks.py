"""Tasks of an event loop, and their end."""

from __future__ import annotations

import asyncio
from typing import Any


async def ended(*tasks: asyncio.Task[Any] | None) -> None:
    """They are cancelled, and over."""
    there = [task for task in tasks if task is not None]
    for task in there:
        task.cancel()
    if there:
        await asyncio.wait(there)
