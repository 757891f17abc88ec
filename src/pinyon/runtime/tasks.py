"""Tasks of an event loop, and their end."""

from __future__ import annotations

import asyncio
from typing import Any

from pinyon.runtime.logging import get_logger

_log = get_logger("tasks")


async def ended(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancels these tasks and waits until they are over. If one had died before, its error is logged."""
    there = [task for task in tasks if task is not None]
    for task in there:
        if not task.cancel() and not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s had ended", task.get_name(), exc_info=error)
    if there:
        await asyncio.wait(there)
