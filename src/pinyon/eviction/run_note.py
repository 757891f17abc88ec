"""What pinyon's own policy knows of a run of keys."""

from __future__ import annotations

from pinyon.eviction.hazard_table import HazardClass, Sample


class RunNote:
    """What the policy knows of a run."""

    __slots__ = (
        "bin",
        "branches",
        "fixed",
        "gap_s",
        "group",
        "growing",
        "kind",
        "last_s",
        "of",
        "pending",
        "pins",
        "sample",
        "stamp",
        "tenant",
        "turn",
    )

    def __init__(self, now_s: float, of: HazardClass) -> None:
        self.last_s = now_s
        self.of = of
        self.bin = 0
        self.stamp = 0
        """Counts up when a place in a queue is not valid any more; odd: it is in one."""
        self.pins = 0
        """Keys."""
        self.fixed = 0
        """So many of its first keys may not go: up to the last one that is pinned."""
        self.sample: Sample | None = None
        self.kind = ""
        self.turn = 0
        self.tenant = ""
        self.group = 0
        """Of tenants."""
        self.gap_s = 0.0
        """Between the uses before: the last one, for what is shared their mean."""
        self.branches = 0
        """Times that a request went on differently at its end."""
        self.pending = False
        """It was used by a request of which nothing else is known yet."""
        self.growing = False
        """It was stored, and not used since."""
