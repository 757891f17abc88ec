"""Why requests run where they run, for who asks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from pinyon.core.clock import Clock
from pinyon.core.errors import FailedPrecondition, InvalidArgument, NotFound
from pinyon.messages.checks import check_text
from pinyon.placement.decision_log import DecisionLog, LoggedDecision
from pinyon.placement.explanation import Explanation, explain

ASKED_CHARS_MAX = 256
"""A client's own id, and what follows it in ours."""
DECISIONS_MAX = 64


class Explainer:
    """Asks the log. ``log``: None where nothing is kept."""

    def __init__(self, log: DecisionLog | None, clock: Clock) -> None:
        self._log = log
        self._clock = clock

    async def explain(self, request_id: str) -> AsyncGenerator[tuple[LoggedDecision, Explanation, float], None]:
        """Its decisions, why they are so, and how old. Part by part, one by one: others get the loop in between.

        Raises :class:`InvalidArgument`, :class:`FailedPrecondition` if nothing is kept, and :class:`NotFound`.
        """
        if not request_id:
            raise InvalidArgument("must name a request", field="request_id")
        check_text(request_id, "request_id", ASKED_CHARS_MAX)
        if self._log is None:
            raise FailedPrecondition("this conductor remembers no placements (--explain-max 0)")
        found: deque[LoggedDecision] = deque(maxlen=DECISIONS_MAX)
        for part in self._log.search(request_id):
            found.extend(part)
            await asyncio.sleep(0)
        if not found:
            raise NotFound(
                f"no request {request_id[:128]!r} among the last {len(self._log)} that this conductor decided: it "
                "knows them by their x-request-id or the id of a completion, since its start, and forgets the oldest "
                "(--explain-max)"
            )
        for logged in found:
            yield logged, explain(logged), self._clock() - logged.at_s
            await asyncio.sleep(0)
