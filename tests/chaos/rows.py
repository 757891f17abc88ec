"""What the records of one fault come to: a row per size of request. Values in, values out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from tests.chaos.jobs import SIZES
from tests.chaos.traffic import Record

GAP_S = 2.0
"""Time after an event within which a request that any client sends then is answered."""
WORST_S = 3.5
"""Time of the slowest single request."""


@dataclass
class Row:
    """One service, fault and size. Times are seconds; None: there was nothing to measure."""

    configuration: str
    victim: str
    fault: str
    size: str
    requests: int = 0
    failed: int = 0
    """Neither answered nor excused; those with another text than expected among them."""
    wrong: int = 0
    only_copy: int = 0
    """With a load balancer that was killed, or answered in part by one that was frozen: nobody else could go on."""
    gap_s: float | None = None
    """From the fault, or the return if that was worse, to the answer of the first request that a client sent after it
    and that was answered; of the client that waited longest."""
    silence_s: float | None = None
    """Longest time without any answer to anybody."""
    worst_s: float | None = None
    calm_s: float | None = None
    """The slowest single request of the calm before the fault."""
    details: list[str] = field(default_factory=list)
    """How requests failed, with counts."""

    @property
    def good(self) -> bool:
        gap, worst = self.gap_s, self.worst_s
        return not self.failed and gap is not None and gap <= GAP_S and worst is not None and worst <= WORST_S

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "good": self.good}


def gap_s(records: Sequence[Record], clients: Sequence[int], event_s: float) -> float | None:
    """The longest time that one of the clients waited, from ``event_s`` on, for an answer to anything it sent after it.

    None: one of them was never answered.
    """
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
    """Whether the request was with the victim alone when that was struck."""
    if record.outcome == "died":
        return True
    if fault != "freeze" or record.door != victim or record.began_s is None:
        return False
    return record.began_s <= struck_s <= record.ended_s


def rows_of(
    key: tuple[str, str, str], records: Sequence[Record], struck_s: float, events_s: Sequence[float]
) -> list[Row]:
    """``key`` is configuration, victim and fault; ``events_s`` the moments after which a gap is measured."""
    _, victim, fault = key
    rows = []
    for size in sorted({record.size for record in records}, key=list(SIZES).index):
        mine = [record for record in records if record.size == size]
        excused = [record for record in mine if only_copy(record, victim, fault, struck_s)]
        others = [record for record in mine if record not in excused]
        bad = [record for record in others if record.outcome != "ok"]
        # Whoever began in the first half of the calm has ended before the fault, unless the machine is too slow.
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
