"""A log of the last decisions for explanations: each with the facts known at its time, and with its outcome.

Decisions are made often and explained seldom, so an entry holds what is cheap to keep. That is numbers, a copy of the
load table, and the runs of the prefix match, which nobody changes. It becomes sentences in
:mod:`pinyon.placement.explanation`. No block keys, no tenants, no names of sessions or users are kept."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from statistics import fmean
from typing import NamedTuple

from pinyon.core.errors import PinyonError
from pinyon.core.orders import PrefillReport
from pinyon.placement.instances import InstanceState
from pinyon.placement.policy import PlacementDecision, PlacementRequest, Pool
from pinyon.placement.prefix_match import PrefixMatch

ENTRY_BYTES = 2048
"""The approximate bytes of an entry besides what :class:`Seen` counts."""
RUN_BYTES = 96
"""The bytes of a run of a prefix match, without its mask."""
FETCH_BYTES = 64
CONSIDERED_BYTES = 56
"""The bytes of a policy's findings, for each instance."""
MEMBER_BYTES = 128
"""The bytes of a pool and its caches, for each instance."""
NAME_BYTES = 192
"""The bytes of the name of an excluded instance."""
WINDOW = 256
"""The number of a model's last placements whose errors count."""
MODELS_MAX = 64
"""The maximum number of models whose errors are kept: their names come from instances."""
MEASURED_MIN_S = 1e-3
"""Shorter times count as this long: an error relative to almost nothing says nothing."""
SEARCHED = 1024
"""The number of decisions that are searched at a time."""
_ID = re.compile(r"(?:(.+)\.)?([0-9a-f]{20,})(?:-[0-9]+)?")
_PREFIX = re.compile(r"^(?:chat)?cmpl-")


class MeasuredFirstToken(NamedTuple):
    """The time from a decode instance's acceptance of the request to the first token, as measured there. The ``report``
    has the parts of that time at the instance that computed the prompt."""

    ttft_s: float
    report: PrefillReport


class Seen:
    """The state of the fleet that a decision saw; none of it changes afterwards. ``loads`` is the load table at that
    time; None if the decision itself holds what its policy considered."""

    __slots__ = ("decision", "loads", "match", "pool")

    def __init__(self, decision: PlacementDecision, pool: Pool, match: PrefixMatch) -> None:
        self.decision, self.pool, self.match = decision, pool, match.without_answers()
        self.loads = decision.prefill.loads.past() if decision.considered is None else None

    @property
    def size_bytes(self) -> int:
        """The approximate size, without the coefficients and the pool, which decisions share."""
        rows = len(self.pool.prefills)
        size_bytes = CONSIDERED_BYTES * rows
        if self.loads is not None:
            rows, size_bytes = len(self.loads.room_s), self.loads.own_bytes
        size_bytes += (len(self.match.runs) + len(self.match.soon.runs)) * (RUN_BYTES + rows // 8)
        return size_bytes + len(self.decision.fetches) * FETCH_BYTES


class LoggedDecision:
    """One placement or refusal. For a refusal, ``error`` and its gRPC ``code`` say why; ``seen`` is None if no policy
    was asked. ``at_s`` is by the caller's clock."""

    __slots__ = (
        *("_asked", "at_s", "code", "error", "first_token", "kind", "number", "priority", "request_id", "seen"),
        *("size_bytes", "turn"),
    )

    def __init__(self, number: int, request: PlacementRequest, at_s: float, seen: Seen | None) -> None:
        """Copies the request's fields: the request itself has the prompt's keys and is not kept."""
        self.number = number
        self.at_s = at_s
        self.seen = seen
        self.request_id = request.request_id
        # The request is made only on demand: that takes longer, and few are asked for.
        self._asked = (
            request.model, request.prompt_tokens, request.max_tokens, request.ttft_slo_s, request.tbt_slo_s,
            request.exclude, request.no_reuse, request.ttft_slo_named,
        )  # fmt: skip
        asked = request.request_class
        self.kind, self.turn, self.priority = asked.kind, asked.turn, asked.priority
        self.code = self.error = ""
        self.first_token: MeasuredFirstToken | None = None
        self.size_bytes = ENTRY_BYTES + len(request.exclude) * NAME_BYTES

    @property
    def request(self) -> PlacementRequest:
        """Returns the request with the fields that are kept."""
        model, tokens, most, ttft_slo_s, tbt_slo_s, exclude, no_reuse, named = self._asked
        return PlacementRequest(
            self.request_id, model, tokens, b"", most, ttft_slo_s, tbt_slo_s, exclude, no_reuse, ttft_slo_named=named
        )


class DecisionLog:
    """The last decisions: at most ``most`` of them, and about ``bytes_max`` bytes. The oldest are dropped first.

    Decisions are numbered from ``first`` on, which should differ in each process. A measurement names its placement by
    number, and that placement may stem from the process before. For each request, :meth:`consider` is called with the
    policy's decision before that is counted; then :meth:`placed` or :meth:`refused`."""

    def __init__(self, most: int, bytes_max: int, first: int) -> None:
        self._most = most
        self._bytes_max = bytes_max
        self._next = first
        self._entries: deque[LoggedDecision] = deque()
        self._considered: PlacementRequest | None = None
        self._seen: Seen | None = None
        """The request that was considered last, and what its decision saw."""
        self._learned = -1
        self._pool: Pool | None = None
        """The version of the coefficients, and the pool, whose bytes were counted last. Decisions share both until
        something is learned, or an instance comes or goes."""
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def consider(self, request: PlacementRequest, decision: PlacementDecision, pool: Pool, match: PrefixMatch) -> None:
        """Remembers a decision until it is logged; the last of several counts. See
        :attr:`pinyon.placement.scheduler.Scheduler.consider`."""
        self._considered, self._seen = request, Seen(decision, pool, match)

    def placed(self, request: PlacementRequest, now_s: float) -> int:
        """Logs the remembered decision as a placement. Returns its number, at least 1."""
        return self._add(LoggedDecision(self._next, request, now_s, self._taken(request)))

    def refused(self, request: PlacementRequest, error: PinyonError, now_s: float) -> None:
        """Logs a refusal. For a request that could not be read, only its known fields are set."""
        entry = LoggedDecision(self._next, request, now_s, self._taken(request))
        entry.code, entry.error = error.grpc_code, error.message  # not the error: its frames keep objects alive
        self._add(entry)

    def measured(self, number: int, first_token: MeasuredFirstToken, decode: InstanceState) -> LoggedDecision | None:
        """Stores the decode instance's measurement of a placement, and returns the entry. Returns None if the number is
        not known (any more), has a measurement already, or belongs to another instance or another boot of it."""
        if not self._entries or not 0 <= (at := number - self._entries[0].number) < len(self._entries):
            return None
        entry = self._entries[at]
        if entry.code or entry.first_token is not None or entry.seen is None:
            return None
        if entry.seen.decision.decode is not decode:
            return None
        entry.first_token = first_token
        return entry

    def search(self, asked: str) -> Iterator[list[LoggedDecision]]:
        """Yields the decisions on requests that go by the id ``asked`` (:func:`is_named`), in order. Each list comes
        from :data:`SEARCHED` entries, which take some ms. Entries made after the call are not searched."""
        bare = _PREFIX.sub("", asked, count=1)
        entries = list(self._entries)
        for start in range(0, len(entries), SEARCHED):
            yield [
                entry
                for entry in entries[start : start + SEARCHED]
                if bare in entry.request_id and (is_named(entry.request_id, asked) or is_named(entry.request_id, bare))
            ]

    def _taken(self, request: PlacementRequest) -> Seen | None:
        """Returns what was remembered of this request, or None, and forgets it."""
        seen = self._seen if self._considered is request else None
        self._considered = self._seen = None
        return seen

    def _add(self, entry: LoggedDecision) -> int:
        entries = self._entries
        if (seen := entry.seen) is not None:
            entry.size_bytes += seen.size_bytes
            if (loads := seen.loads) is not None and loads.version != self._learned:
                entry.size_bytes += loads.learned_bytes
                self._learned = loads.version
            if seen.pool is not self._pool:
                self._pool = pool = seen.pool
                entry.size_bytes += (len(pool.prefills) + len(pool.decodes)) * MEMBER_BYTES
        entries.append(entry)
        self._next += 1
        self.size_bytes += entry.size_bytes
        while len(entries) > self._most or (self.size_bytes > self._bytes_max and entries):
            self.size_bytes -= entries.popleft().size_bytes
        return entry.number


def is_named(request_id: str, asked: str) -> bool:
    """Returns whether a client or a log may call the request ``asked``. Ids are ``[TOLD.]UNIQUE[-CHOICE][~ATTEMPT]``.
    TOLD is the client's own ``x-request-id``, and UNIQUE is in the id of a completion. Others name only themselves."""
    base = request_id.rpartition("~")[0] or request_id
    names = {request_id, base}
    if (parts := _ID.fullmatch(base)) is not None:
        names.add(base[: parts.end(2)])
        if (told := parts[1]) is not None:
            names |= {each[len(told) + 1 :] for each in names} | {told}
    return asked in names


class PredictionErrors:
    """The relative errors of the predictions for the last placements, by model."""

    def __init__(self) -> None:
        self._errors: dict[str, deque[float]] = {}

    def add(self, model: str, predicted_s: float, measured_s: float) -> bool:
        """Adds an error. Returns whether it is the first of its model."""
        errors = self._errors.get(model)
        first = errors is None
        if errors is None:
            if len(self._errors) >= MODELS_MAX:
                return False
            errors = self._errors[model] = deque(maxlen=WINDOW)
        errors.append(abs(measured_s - predicted_s) / max(measured_s, MEASURED_MIN_S))
        return first

    def mean(self, model: str) -> float:
        """Returns the mean of ``|measured - predicted| / measured`` of the last placements; 0 if there are none."""
        errors = self._errors.get(model)
        return fmean(errors) if errors else 0.0
