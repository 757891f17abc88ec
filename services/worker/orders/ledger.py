"""What happened here since the conductor was last told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pinyon.batching.token_times import TokenTimes
from pinyon.core.prefill_report import PrefillReport
from pinyon.placement.decision_log import FirstToken
from services.worker.orders.outcome import PrefillOutcome

KEPT = 4096
"""Entries kept of each kind while nobody asks; the oldest go first."""


def _nobody() -> None:
    """Nobody is reported to."""


class Happened:
    """Ids of requests of which a part began or ended, and what came of some."""

    def __init__(self) -> None:
        self.begun_prefills: deque[str] = deque(maxlen=KEPT)
        self.begun_decodes: deque[str] = deque(maxlen=KEPT)
        self.ended_prefills: deque[str] = deque(maxlen=KEPT)
        self.ended_decodes: deque[str] = deque(maxlen=KEPT)
        self.measured: deque[PrefillOutcome] = deque(maxlen=KEPT)
        self.first_tokens: deque[tuple[int, FirstToken]] = deque(maxlen=KEPT)
        """With the numbers of their placements."""


class Ledger:
    """What happened since the last report. ``observe`` is told of every measured prefill at once.

    ``on_end`` is called whenever a part of a request ended: the conductor counts its predicted load until it knows.
    """

    def __init__(self, observe: Callable[[PrefillOutcome], None]) -> None:
        self._observe = observe
        self._happened = Happened()
        self.on_end: Callable[[], None] = _nobody
        self.token_times = TokenTimes()

    def prefill_begun(self, request_id: str) -> None:
        """Its prompt is being computed, or was before this is told. It goes with the next report."""
        self._happened.begun_prefills.append(request_id)

    def decode_begun(self, request_id: str) -> None:
        """It goes with the next report: nobody waits for it."""
        self._happened.begun_decodes.append(request_id)

    def prefill_ended(self, request_id: str) -> None:
        self._happened.ended_prefills.append(request_id)
        self.on_end()

    def decode_ended(self, request_id: str) -> None:
        self._happened.ended_decodes.append(request_id)
        self.on_end()

    def prefill_measured(self, outcome: PrefillOutcome) -> None:
        self._observe(outcome)
        self._happened.measured.append(outcome)

    def first_token(self, placement_number: int, seconds: float, report: PrefillReport) -> None:
        """It goes with the next report; nothing does for number 0, of which nobody asked."""
        if placement_number:
            self._happened.first_tokens.append((placement_number, FirstToken(seconds, report)))

    def take(self) -> Happened:
        """All of it, which is forgotten."""
        happened, self._happened = self._happened, Happened()
        return happened
