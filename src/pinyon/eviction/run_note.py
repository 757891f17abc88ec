"""The note that pinyon's own policy keeps of a run of keys."""

from __future__ import annotations

from pinyon.eviction.hazard_table import HazardClass, Sample


class RunNote:
    """The facts about one run."""

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
        """A counter that rises when the run enters or leaves a queue; odd while it is in one."""
        self.pins = 0
        """The number of pinned keys."""
        self.fixed = 0
        """The number of first keys that may not go: those up to the last pinned one."""
        self.sample: Sample | None = None
        self.kind = ""
        self.turn = 0
        self.tenant = ""
        self.group = 0
        """The group of tenants."""
        self.gap_s = 0.0
        """The time between the last two uses; for a shared run a mean of such times."""
        self.branches = 0
        """The number of requests that went on differently at the run's end."""
        self.pending = False
        """True after a use by a request of which nothing else is known yet."""
        self.growing = False
        """True from when the run is stored until it is used."""
