"""The results of one fault as rows, one per size of request, computed from its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from tests.chaos.jobs import SIZES
from tests.chaos.traffic import Record

GAP_S = 2.0
"""The time after an event within which a request that any client sends then must be answered."""
WORST_S = 3.5
"""The longest acceptable time of a single request."""


@dataclass
class Row:
    """One service, fault and size. Times are seconds; None: there was nothing to measure."""

    configuration: str
    victim: str
    fault: str
    size: str
    requests: int = 0
    failed: int = 0
    """Requests neither answered nor excused, including those with an unexpected text."""
    wrong: int = 0
    only_copy: int = 0
    """Requests that nobody else could finish: of a load balancer that was killed, or frozen with its answer begun."""
    gap_s: float | None = None
    """The longest time that a client waited, from the fault or the return (whichever is worse), for an answer.

    It counts the answer to the first request that the client sent after the event and that was answered."""
    silence_s: float | None = None
    """The longest time without an answer to any client."""
    worst_s: float | None = None
    calm_s: float | None = None
    """The longest request of the calm before the fault."""
    details: list[str] = field(default_factory=list)
    """Reasons of failed requests, with counts."""

    @property
    def good(self) -> bool:
        gap, worst = self.gap_s, self.worst_s
        return not self.failed and gap is not None and gap <= GAP_S and worst is not None and worst <= WORST_S

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "good": self.good}


def gap_s(records: Sequence[Record], clients: Sequence[int], event_s: float) -> float | None:
    """Returns a client's longest wait, from ``event_s`` on, for an answer to a later request; None: it never came."""
    gaps = []
    for client in clients:
        ends = [
            record.ended_s
            for record in records
            if record.client == client and record.outcome == "ok" and record.started_s >= event_s
        ]
        if not ends:
            return None
        gaps.append(min(ends) - event_s)
    return max(gaps)


def only_copy(record: Record, victim: str, fault: str, struck_s: float) -> bool:
    """Returns whether the victim alone had the request when it was struck."""
    if record.outcome == "died":
        return True
    if fault != "freeze" or record.door != victim or record.began_s is None:
        return False
    return record.began_s <= struck_s <= record.ended_s


def rows_of(
    key: tuple[str, str, str], records: Sequence[Record], struck_s: float, events_s: Sequence[float]
) -> list[Row]:
    """Returns one row per size; ``key`` is configuration, victim and fault; gaps begin at each of ``events_s``."""
    _, victim, fault = key
    rows = []
    for size in sorted({record.size for record in records}, key=list(SIZES).index):
        mine = [record for record in records if record.size == size]
        excused = [record for record in mine if only_copy(record, victim, fault, struck_s)]
        others = [record for record in mine if record not in excused]
        bad = [record for record in others if record.outcome != "ok"]
        # A request of the first half of the calm has ended before the fault, unless the machine is too slow.
        calm_s = (min(record.started_s for record in mine) + struck_s) / 2
        before = [record.seconds for record in others if record.outcome == "ok" and record.started_s <= calm_s]
        after = [record.seconds for record in others if record.outcome == "ok" and record.ended_s >= struck_s]
        clients = sorted({record.client for record in mine})
        gaps = [gap_s(mine, clients, event_s) for event_s in events_s]
        ends = sorted(record.ended_s for record in mine if record.outcome == "ok" and record.ended_s >= struck_s)
        silences = [late - early for early, late in zip([struck_s, *ends], ends, strict=False)]
        rows.append(
            Row(
                *key,
                size,
                requests=len(mine),
                failed=len(bad),
                wrong=sum(record.outcome == "wrong" for record in bad),
                only_copy=len(excused),
                gap_s=None if None in gaps else max(gap for gap in gaps if gap is not None),
                silence_s=max(silences, default=None),
                worst_s=max(after, default=None),
                calm_s=max(before, default=None),
                details=[f"{count} × {text}" for text, count in Counter(record.detail for record in bad).items()],
            )
        )
    return rows
