"""Explanations of past placements, looked up by request id."""

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
"""The longest request id that is searched for: a client's own id and the suffix that pinyon adds."""
DECISIONS_MAX = 64


async def explained(
    log: DecisionLog | None, request_id: str, clock: Clock
) -> AsyncGenerator[tuple[LoggedDecision, Explanation, float], None]:
    """Yields each decision about the request, its explanation and its age in seconds; other tasks run in between.

    Raises :class:`InvalidArgument` for a bad id, :class:`FailedPrecondition` if no decisions are kept (no ``log``), and
    :class:`NotFound` if there is none for this id.
    """
    if not request_id:
        raise InvalidArgument("must name a request", field="request_id")
    check_text(request_id, "request_id", ASKED_CHARS_MAX)
    if log is None:
        raise FailedPrecondition("this conductor remembers no placements (--explain-max 0)")
    found: deque[LoggedDecision] = deque(maxlen=DECISIONS_MAX)
    for part in log.search(request_id):
        found.extend(part)
        await asyncio.sleep(0)
    if not found:
        raise NotFound(
            f"no request {request_id[:128]!r} among the last {len(log)} that this conductor decided: it knows them by "
            "their x-request-id or the id of a completion, since its start, and forgets the oldest (--explain-max)"
        )
    for logged in found:
        yield logged, explain(logged), clock() - logged.at_s
        await asyncio.sleep(0)
