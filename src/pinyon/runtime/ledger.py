"""The events on this instance since the conductor's last report, and what came of prompts computed here."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.batching.token_times import TokenTimes
from pinyon.core.orders import PrefillReport
from pinyon.messages.prefill_report import first_token_to_proto
from pinyon.placement.decision_log import MeasuredFirstToken

KEPT = 4096
"""The number of entries of each kind kept while nothing is reported; the oldest are dropped first."""


class Ledger:
    """The events since the last report; ``observe`` is called with the report of every computed prompt at once.

    ``on_end`` is called whenever a part of a request ended: until then the conductor counts its predicted load."""

    def __init__(self, observe: Callable[[PrefillReport], None]) -> None:
        self._observe = observe
        # by field of the report; a message would keep the memory of entries that are dropped
        self._news: defaultdict[str, deque[Any]] = defaultdict(lambda: deque(maxlen=KEPT))
        self.on_end: Callable[[], None] = lambda: None
        self.token_times = TokenTimes()

    def prefill_begun(self, request_id: str) -> None:
        """Notes that a prompt is being or was computed, for the next report."""
        self._news["begun_prefill_request_ids"].append(request_id)

    def decode_begun(self, request_id: str) -> None:
        """Notes that a request is here to decode, for the next report."""
        self._news["begun_decode_request_ids"].append(request_id)

    def prefill_ended(self, request_id: str) -> None:
        self._news["ended_prefill_request_ids"].append(request_id)
        self.on_end()

    def decode_ended(self, request_id: str) -> None:
        self._news["ended_decode_request_ids"].append(request_id)
        self.on_end()

    def prefill_measured(
        self, report: PrefillReport, fetched_bytes: int, spans: Iterable[conductor_pb2.FetchMeasurement]
    ) -> None:
        """Notes what computing a prompt here has cost; ``spans`` are the last ones of its fetch."""
        self._observe(report)
        measured = conductor_pb2.PrefillMeasurement(
            computed_tokens=report.computed_tokens,
            prefix_tokens=report.reused_tokens,
            compute_us=round(report.compute_ms * 1e3),
            fetched_bytes=fetched_bytes,
            fetch_us=round(report.fetch_ms * 1e3),
            fetches=spans,
        )
        self._news["prefills"].append(measured)

    def first_token(self, placement_number: int, seconds: float, report: PrefillReport) -> None:
        """Notes a first token for the next report; number 0 is skipped, as nobody asked for it."""
        if placement_number:
            measured = first_token_to_proto(placement_number, MeasuredFirstToken(seconds, report))
            self._news["first_tokens"].append(measured)

    def take(self) -> conductor_pb2.ReportSessionRequest:
        """Returns all events and forgets them."""
        news = conductor_pb2.ReportSessionRequest()
        for name, entries in self._news.items():
            getattr(news, name).extend(entries)
        self._news.clear()
        return news
