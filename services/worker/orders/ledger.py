"""The events on this worker since the conductor's last report, and what came of prompts computed here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pinyon.batching.token_times import TokenTimes
from pinyon.core.orders import PrefillReport
from pinyon.messages.orders import FirstToken
from pinyon.placement.decision_log import MeasuredFirstToken


@dataclass(frozen=True, slots=True)
class SpanFetched:
    """A read of fetched KV that arrived whole."""

    source_id: str
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PrefillOutcome:
    """The first token of a prompt computed here, and the measurements to learn from."""

    first: FirstToken
    fetched_bytes: int
    spans: tuple[SpanFetched, ...]
    """The fetch's last spans."""


KEPT = 4096
"""The number of entries of each kind kept while nothing is reported; the oldest are dropped first."""


class Happened:
    """The ids of requests of which a part began or ended, with measured prefills and first tokens."""

    def __init__(self) -> None:
        self.begun_prefills: deque[str] = deque(maxlen=KEPT)
        self.begun_decodes: deque[str] = deque(maxlen=KEPT)
        self.ended_prefills: deque[str] = deque(maxlen=KEPT)
        self.ended_decodes: deque[str] = deque(maxlen=KEPT)
        self.measured: deque[PrefillOutcome] = deque(maxlen=KEPT)
        self.first_tokens: deque[tuple[int, MeasuredFirstToken]] = deque(maxlen=KEPT)
        """First tokens with the numbers of their placements."""


class Ledger:
    """The events since the last report; ``observe`` is called with every measured prefill at once.

    ``on_end`` is called whenever a part of a request ended: until then the conductor counts its predicted load.
    """

    def __init__(self, observe: Callable[[PrefillOutcome], None]) -> None:
        self._observe = observe
        self._happened = Happened()
        self.on_end: Callable[[], None] = lambda: None
        self.token_times = TokenTimes()

    def prefill_begun(self, request_id: str) -> None:
        """Notes that a prompt is being or was computed, for the next report."""
        self._happened.begun_prefills.append(request_id)

    def decode_begun(self, request_id: str) -> None:
        """Notes that a request is here to decode, for the next report."""
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
        """Notes a first token for the next report; number 0 is skipped, as nobody asked for it."""
        if placement_number:
            self._happened.first_tokens.append((placement_number, MeasuredFirstToken(seconds, report)))

    def take(self) -> Happened:
        """Returns all events and forgets them."""
        happened, self._happened = self._happened, Happened()
        return happened
