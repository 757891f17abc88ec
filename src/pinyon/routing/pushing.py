"""Rules for when a load balancer may push a request: always, up to a number, or while none waits (SkyWalker §3.3).

*Selective pushing by pending requests* keeps a request at the load balancer until some target has room in its batch.
The paper lets any number be pushed until the next probe. With one probe per 100 ms, a burst between two of them all
goes to targets that looked free, and every region sends its own to the same one. So here a target's report is worth
*credits*: as many requests as it has room for, or ``burst`` where it cannot say, less those not yet in the report.

When a target has room, the next request in the queue goes there, and computes again what a target holds that is full at
this moment. Where many share prefixes, that fills the memory of all targets with the same. So a few requests may wait
at the *door* of a full target, if a policy wants them there for what it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from pinyon.core.policies import NoSettings, Registry, check_bounds
from pinyon.routing.interface import PushingRule
from pinyon.routing.target import UNKNOWN, Target

UNLIMITED: Final = 1 << 30
PROBE_S: Final = 0.1
"""Seconds between two probes (§4.1)."""


class Blind:
    """A rule that pushes everything to any live target, as round robin and least load do elsewhere."""

    name: ClassVar[str] = "blind"

    def spare(self, target: Target, now_s: float) -> int:
        return UNLIMITED if target.live and not target.draining else 0

    def admits(self, target: Target, now_s: float) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class OutstandingSettings:
    """The ``limit`` on our requests at one target."""

    limit: int = 32

    def __post_init__(self) -> None:
        check_bounds(self, limit=(1, 1 << 20))


class Outstanding:
    """A rule that allows a fixed number of our requests at once (SP-O in Fig. 9)."""

    name: ClassVar[str] = "outstanding"

    def __init__(self, settings: OutstandingSettings | None = None) -> None:
        self._limit = (settings or OutstandingSettings()).limit

    def spare(self, target: Target, now_s: float) -> int:
        if not target.live or target.draining:
            return 0
        return max(0, self._limit - target.outstanding)

    def admits(self, target: Target, now_s: float) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class PendingSettings:
    """Options of :class:`Pending`.

    ``credits``: push no more between two reports than there is room for; without, as in the paper. ``burst``: requests
    for a target that does not say how much room it has. ``stale_s``: seconds after which a report no longer counts.
    ``queue``: requests that may wait at another region's load balancer (τ of Listing 1). ``door``: requests that may
    wait at a full instance that has their prompt; 0: they go where there is room. Only with credits."""

    credits: bool = True
    burst: int = 4
    stale_s: float = 1.0
    queue: int = 10
    door: int = 16

    def __post_init__(self) -> None:
        check_bounds(self, burst=(1, 1 << 20), stale_s=(PROBE_S, 3600), queue=(0, 1 << 20), door=(0, 1 << 20))


class Pending:
    """A rule that pushes while no request waits for room at the target (SP-P, Listing 1 lines 3 to 15)."""

    name: ClassVar[str] = "pending"

    def __init__(self, settings: PendingSettings | None = None) -> None:
        self._settings = settings or PendingSettings()

    def spare(self, target: Target, now_s: float) -> int:
        settings, report = self._settings, target.report
        if not target.live or target.draining or now_s - target.reported_s > settings.stale_s:
            return 0
        pending = report.pending
        if report.available != UNKNOWN:
            if report.available == 0 or pending > settings.queue:
                return 0
        elif pending > 0:
            return 0
        if not settings.credits:
            return UNLIMITED
        # The target reports nothing, so all we know is the size of its batch.
        if pending == UNKNOWN and report.available == UNKNOWN and target.capacity:
            return max(0, target.capacity - target.outstanding)
        # One request waits at the door: without it, a place that becomes free stays empty until the next report.
        room = settings.burst if report.room == UNKNOWN else max(1, report.room)
        unseen, outstanding = target.sent - target.sent_before, target.outstanding
        if unseen > outstanding:
            unseen = outstanding
        return room - unseen if room > unseen else 0

    def admits(self, target: Target, now_s: float) -> bool:
        settings, report = self._settings, target.report
        if not settings.credits or not target.live or target.draining or now_s - target.reported_s > settings.stale_s:
            return False
        if report.available != UNKNOWN or report.pending == UNKNOWN:  # another region, or its queue is unknown
            return False
        if report.room == UNKNOWN and not report.pending:  # perhaps it is not full: the next report says
            return False
        return report.pending + max(0, target.unseen - max(0, report.room)) < settings.door


PUSHING_RULES: Registry[PushingRule] = Registry(
    "pushing",
    {
        Pending.name: (PendingSettings, Pending),
        Outstanding.name: (OutstandingSettings, Outstanding),
        Blind.name: (NoSettings, lambda _: Blind()),
    },
    PushingRule,
)


def remote_pushing(choice: str) -> Pending:
    """Returns the rule for other regions, always :class:`Pending`, with the settings of ``choice`` if it is that."""
    rule = PUSHING_RULES.make(choice)
    return rule if isinstance(rule, Pending) else Pending()
