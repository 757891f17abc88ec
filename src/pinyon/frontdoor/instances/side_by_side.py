"""The choices of one call, side by side."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

from pinyon.frontdoor.admission import Ticket
from pinyon.frontdoor.line import Place

__all__ = ["GRANTED", "run_side_by_side"]


class _Granted:
    """The :class:`pinyon.frontdoor.admission.Turn` of a choice: its slot is held for it."""

    def enter(self, tokens: int, *, priority: int = 0, demand: int = 0, room: bool = False) -> bool:
        return True

    async def wait(self) -> None:
        pass

    def release(self) -> None:
        pass

    async def again(self, demand: int) -> bool:
        return False

    def leave(self, used_tokens: int = 0) -> None:
        pass


GRANTED = _Granted()


async def run_side_by_side(ticket: Ticket, runs: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Run all of them; ``ticket`` has had its turn.

    The call's own slot runs one after the other, so it ends however full it is, and never waits for a second one. What
    slots are spare run others at the same time, each for one choice: then whoever waits has it.

    Raises the first error; then all of them have ended.
    """
    waiting = deque(runs)

    def spread() -> None:
        while waiting and (place := ticket.spare()) is not None:
            task = group.create_task(extra(place, waiting.popleft()))
            task.add_done_callback(lambda _, place=place: place.leave())  # type: ignore[misc]

    async def extra(place: Place, run: Callable[[], Awaitable[None]]) -> None:
        place.release()
        await run()
        place.leave()
        spread()

    try:
        async with asyncio.TaskGroup() as group:
            while waiting:
                run = waiting.popleft()
                spread()
                await run()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
