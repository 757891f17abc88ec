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


class Ledger:
    """What happened since the last report. ``observe`` is told of every measured prefill at once.

    ``on_end`` is called whenever a part of a request ended: the conductor counts its predicted load until it knows.
    """

    def __init__(self, observe: Callable[[PrefillOutcome], None]) -> None:
        self._observe = observe
        self.on_end: Callable[[], None] = _nobody
        self._begun_prefills: deque[str] = deque(maxlen=KEPT)
        self._begun_decodes: deque[str] = deque(maxlen=KEPT)
        self._ended_prefills: deque[str] = deque(maxlen=KEPT)
        self._ended_decodes: deque[str] = deque(maxlen=KEPT)
        self._measured: deque[PrefillOutcome] = deque(maxlen=KEPT)
        self._first_tokens: deque[tuple[int, FirstToken]] = deque(maxlen=KEPT)
        self.token_times = TokenTimes()

    def prefill_begun(self, request_id: str) -> None:
        """Its prompt is being computed, or was before this is told. It goes with the next report."""
        self._begun_prefills.append(request_id)

    def decode_begun(self, request_id: str) -> None:
        """It goes with the next report: nobody waits for it."""
        self._begun_decodes.append(request_id)

    def prefill_ended(self, request_id: str) -> None:
        self._ended_prefills.append(request_id)
        self.on_end()

    def decode_ended(self, request_id: str) -> None:
        self._ended_decodes.append(request_id)
        self.on_end()

    def prefill_measured(self, outcome: PrefillOutcome) -> None:
        self._observe(outcome)
        self._measured.append(outcome)

    def first_token(self, placement_number: int, seconds: float, report: PrefillReport) -> None:
        """It goes with the next report; nothing does for number 0, of which nobody asked."""
        if placement_number:
            self._first_tokens.append((placement_number, FirstToken(seconds, report)))

    def take_begun(self) -> tuple[list[str], list[str]]:
        begun = list(self._begun_prefills), list(self._begun_decodes)
        self._begun_prefills.clear()
        self._begun_decodes.clear()
        return begun

    def take_ended(self) -> tuple[list[str], list[str]]:
        ended = list(self._ended_prefills), list(self._ended_decodes)
        self._ended_prefills.clear()
        self._ended_decodes.clear()
        return ended

    def take_measured(self) -> list[PrefillOutcome]:
        measured = list(self._measured)
        self._measured.clear()
        return measured

    def take_first_tokens(self) -> list[tuple[int, FirstToken]]:
        """With the numbers of their placements."""
        taken = list(self._first_tokens)
        self._first_tokens.clear()
        return taken
