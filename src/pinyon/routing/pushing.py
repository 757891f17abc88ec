"""When a load balancer may push a request on: always, up to a number, or while nobody waits there (SkyWalker §3.3).

*Selective pushing by pending requests* keeps a request at the load balancer until some target has room in its batch.
How many may be pushed then, until the next probe says more? The paper's answer is: any number. With one probe per 100
ms, a burst that comes between two of them all goes to targets that looked free, and every region sends its own to the
same one. So here a target's report is worth *credits*: as many requests as it has room for, ``burst`` where it cannot
say, and those that are not in the report are taken off.

Who is next in the queue when a target has room is sent there, and computes again what another target holds that is full
at this moment: where many share prefixes, that fills the memory of all with the same. So a few may wait at the *door*
of a full target, if a policy wants them there for what it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from pinyon.core.policies import NoSettings, Registry, check_bounds
from pinyon.routing.interface import PushingRule
from pinyon.routing.target import UNKNOWN, Target

UNLIMITED: Final = 1 << 30
PROBE_S: Final = 0.1
"""Between two probes (§4.1)."""


class Blind:
    """Whoever lives gets whatever comes: what round robin and least load do elsewhere."""

    name: ClassVar[str] = "blind"

    def spare(self, target: Target, now_s: float) -> int:
        return UNLIMITED if target.live and not target.draining else 0

    def admits(self, target: Target, now_s: float) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class OutstandingSettings:
    """``limit``: requests of ours at one target."""

    limit: int = 32

    def __post_init__(self) -> None:
        check_bounds(self, limit=(1, 1 << 20))


class Outstanding:
    """At most so many of ours at once (SP-O in Fig. 9)."""

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
    """``credits``: no more between two reports than there is room for; without, as in the paper. ``burst``: that many
    for a target that does not say how much room it has. ``stale_s``: a report older than this speaks for nobody.
    ``queue``: requests that may wait at another region's load balancer (τ of Listing 1). ``door``: requests that may
    wait at a full instance that has their prompt; 0: they go to whoever has room. Only with credits."""

    credits: bool = True
    burst: int = 4
    stale_s: float = 1.0
    queue: int = 10
    door: int = 16

    def __post_init__(self) -> None:
        check_bounds(self, burst=(1, 1 << 20), stale_s=(PROBE_S, 3600), queue=(0, 1 << 20), door=(0, 1 << 20))


class Pending:
    """While nobody waits for room there (SP-P, Listing 1 lines 3 to 15)."""

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
        # It tells nothing: what its batch holds is all we know.
        if pending == UNKNOWN and report.available == UNKNOWN and target.capacity:
            return max(0, target.capacity - target.outstanding)
        # One at the door: until the next report says that a place has become free, it would stay empty.
        room = settings.burst if report.room == UNKNOWN else max(1, report.room)
        unseen, outstanding = target.sent - target.sent_before, target.outstanding
        if unseen > outstanding:
            unseen = outstanding
        return room - unseen if room > unseen else 0

    def admits(self, target: Target, now_s: float) -> bool:
        settings, report = self._settings, target.report
        if not settings.credits or not target.live or target.draining or now_s - target.reported_s > settings.stale_s:
            return False
        if report.available != UNKNOWN or report.pending == UNKNOWN:  # another region, or nobody knows who waits there
            return False
        if report.room == UNKNOWN and not report.pending:  # it may be full, or not: the next report says
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
    """Other regions are asked for what they have room for, whatever the rule is at home; only its settings count."""
    rule = PUSHING_RULES.make(choice)
    return rule if isinstance(rule, Pending) else Pending()
