"""The last decisions, each with what was known when it was made and what came of it: for who asks why.

A decision is asked for often and explained seldom, so what is kept of it is cheap to keep: numbers, a copy of the load
table, and the runs of the prefix match, which nobody changes. :mod:`pinyon.placement.explanation` makes sentences of
it. No block keys, no tenants, no names of sessions or users are kept.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from pinyon.core.errors import PinyonError
from pinyon.core.prefill_report import PrefillReport
from pinyon.placement.instances import InstanceState
from pinyon.placement.load_table import PastLoads
from pinyon.placement.policy import PlacementDecision, PlacementRequest, Pool
from pinyon.placement.prefix_match import PrefixMatch

ENTRY_BYTES = 2048
"""What one takes besides what :class:`Seen` counts, about."""
RUN_BYTES = 96
"""A run of a prefix match, without its mask."""
FETCH_BYTES = 64
CONSIDERED_BYTES = 56
"""Of each instance."""
MEMBER_BYTES = 128
"""Of a pool, with what it remembers of itself."""
NAME_BYTES = 192
"""Of an instance that is excluded."""
WINDOW = 256
"""Placements of a model whose errors count."""
MODELS_MAX = 64
"""Of more, no errors are kept: their names come from instances."""
MEASURED_MIN_S = 1e-3
"""Shorter times count as this much: what a share of almost nothing is says nothing."""
SEARCHED = 1024
"""Decisions that are looked through in one go."""
_ID = re.compile(r"(?:(.+)\.)?([0-9a-f]{20,})(?:-[0-9]+)?")
_PREFIX = re.compile(r"^(?:chat)?cmpl-")


class FirstToken(NamedTuple):
    """What a decode instance measured, from its acceptance of the request to the first token, and of that the parts at
    the instance that computed the prompt."""

    ttft_s: float
    report: PrefillReport


class Seen(NamedTuple):
    """What a decision saw of the fleet. Nothing of it changes afterwards."""

    decision: PlacementDecision
    pool: Pool
    runs: Sequence[tuple[int, int]]
    """Of the prefix match, with ``blocks``: the match itself remembers answers, which take memory."""
    blocks: int
    soon_runs: Sequence[tuple[int, int]]
    soon_blocks: int
    loads: PastLoads | None
    """None: the decision has what its policy considered."""

    def match(self) -> PrefixMatch:
        """As it was."""
        return PrefixMatch(self.runs, self.blocks, PrefixMatch(self.soon_runs, self.soon_blocks))

    @property
    def size_bytes(self) -> int:
        """About, less the coefficients and the pool, which decisions share."""
        rows = len(self.pool.prefills)
        size_bytes = CONSIDERED_BYTES * rows if self.decision.considered is not None else 0
        if self.loads is not None:
            rows, size_bytes = len(self.loads.room_s), self.loads.own_bytes
        size_bytes += (len(self.runs) + len(self.soon_runs)) * (RUN_BYTES + rows // 8)
        return size_bytes + len(self.decision.fetches) * FETCH_BYTES


class LoggedDecision:
    """One placement, or one refusal: then ``error`` and its gRPC ``code`` say why, and ``seen`` is None where no policy
    was asked. ``at_s`` is by the clock of who logs."""

    __slots__ = (
        *("at_s", "code", "error", "first_token", "kind", "number", "priority", "request", "seen", "size_bytes"),
        "turn",
    )

    def __init__(self, number: int, request: PlacementRequest, at_s: float, seen: Seen | None) -> None:
        """Nothing of the request is kept but what is here: it has the prompt's keys."""
        self.number = number
        self.at_s = at_s
        self.seen = seen
        self.request = PlacementRequest(
            request.request_id, request.model, request.prompt_tokens, b"", request.max_tokens, request.ttft_slo_s,
            request.tbt_slo_s, request.exclude, request.no_reuse, ttft_slo_named=request.ttft_slo_named,
        )  # fmt: skip
        asked = request.request_class
        self.kind, self.turn, self.priority = asked.kind, asked.turn, asked.priority
        self.code = self.error = ""
        self.first_token: FirstToken | None = None
        self.size_bytes = ENTRY_BYTES + len(request.exclude) * NAME_BYTES


class DecisionLog:
    """At most ``most`` decisions, and ``bytes_max`` bytes of them, about; the oldest go first.

    Numbers follow each other from ``first`` on, which should be another one in each process: a number comes back with
    what an instance measured, maybe of a placement by the process before.

    Where it is told: ``consider`` of what a policy decided, before that is counted; then ``placed`` or ``refused``.
    """

    def __init__(self, most: int, bytes_max: int, first: int) -> None:
        self._most = most
        self._bytes_max = bytes_max
        self._next = first
        self._entries: deque[LoggedDecision] = deque()
        self._considered: tuple[PlacementRequest, PlacementDecision, Pool, PrefixMatch, PastLoads | None] | None = None
        self._coefficients: object = None
        self._pool: Pool | None = None
        """Both counted last: decisions share them until something is learned, or an instance comes or goes."""
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def consider(self, request: PlacementRequest, decision: PlacementDecision, pool: Pool, match: PrefixMatch) -> None:
        """See :attr:`pinyon.placement.scheduler.Scheduler.consider`; of several, the last one counts."""
        loads = decision.prefill.loads.past() if decision.considered is None else None
        self._considered = request, decision, pool, match, loads

    def placed(self, request: PlacementRequest, now_s: float) -> int:
        """As it was considered. Returns the placement's number, at least 1."""
        return self._add(LoggedDecision(self._next, request, now_s, self._seen(request)))

    def refused(self, request: PlacementRequest, error: PinyonError, now_s: float) -> None:
        """Of a request that could not be read, what is known of it."""
        entry = LoggedDecision(self._next, request, now_s, self._seen(request))
        entry.code, entry.error = error.grpc_code, error.message  # not the error: its frames keep what they saw
        self._add(entry)

    def measured(self, number: int, first_token: FirstToken, decode: InstanceState) -> LoggedDecision | None:
        """What came of a placement, by the instance that decodes. None if that is not known (any more), is known
        already, or was placed elsewhere: on another boot of it, too."""
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
        """Those of the requests that go by this id (:func:`is_named`), in the order of their decisions: all that there
        are now, some of :data:`SEARCHED` decisions at a time (some ms)."""
        bare = _PREFIX.sub("", asked, count=1)
        entries = list(self._entries)
        for start in range(0, len(entries), SEARCHED):
            yield [
                entry
                for entry in entries[start : start + SEARCHED]
                if bare in (name := entry.request.request_id) and (is_named(name, asked) or is_named(name, bare))
            ]

    def _seen(self, request: PlacementRequest) -> Seen | None:
        """What was considered of this request."""
        considered, self._considered = self._considered, None
        if considered is None or considered[0] is not request:
            return None
        _, decision, pool, match, loads = considered
        soon = match.soon
        return Seen(decision, pool, match.runs, match.blocks, soon.runs, soon.blocks, loads)

    def _add(self, entry: LoggedDecision) -> int:
        entries = self._entries
        if (seen := entry.seen) is not None:
            entry.size_bytes += seen.size_bytes
            if (loads := seen.loads) is not None and loads.coefficients is not self._coefficients:
                entry.size_bytes += loads.coefficients.nbytes + loads.transfer.nbytes
                self._coefficients = loads.coefficients
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
    """Whether a client, or a log, may call the request so. Ids are ``[TOLD.]UNIQUE[-CHOICE][~ATTEMPT]``: told is the
    client's own ``x-request-id``, unique is in the id of a completion; any other id is called by itself."""
    base = request_id.rpartition("~")[0] or request_id
    names = {request_id, base}
    if (parts := _ID.fullmatch(base)) is not None:
        names.add(base[: parts.end(2)])
        if (told := parts[1]) is not None:
            names |= {each[len(told) + 1 :] for each in names} | {told}
    return asked in names


class PredictionErrors:
    """How far predictions of the last placements were off, by model: relative errors."""

    def __init__(self) -> None:
        self._errors: dict[str, deque[float]] = {}

    def add(self, model: str, predicted_s: float, measured_s: float) -> bool:
        """One more. Returns whether it is the first one of its model."""
        errors = self._errors.get(model)
        first = errors is None
        if errors is None:
            if len(self._errors) >= MODELS_MAX:
                return False
            errors = self._errors[model] = deque(maxlen=WINDOW)
        errors.append(abs(measured_s - predicted_s) / max(measured_s, MEASURED_MIN_S))
        return first

    def mean(self, model: str) -> float:
        """The mean of ``|measured - predicted| / measured`` of the last ones; 0 if there are none."""
        errors = self._errors.get(model)
        return fmean(errors) if errors else 0.0
