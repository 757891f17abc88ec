"""The controller's view of one load balancer: when it was last heard, whether it answers, since when it serves.

All times are by the controller's own clock, in seconds: clocks of hosts are never compared. The newer of two boots is
the one that registered later."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pinyon.federation.takeover import Standing
from pinyon.federation.view import LbInfo, LbState

DISPLACED_MAX = 8
DOUBLINGS_MAX = 16


@dataclass(frozen=True, slots=True)
class Timing:
    """The controller's times, in seconds."""

    silence_s: float = 2.0
    """Silence after which a load balancer with a session is suspected; one without is suspected at once."""
    probes: int = 2
    """The number of unanswered probes in a row after which a suspected load balancer counts as failed."""
    grace_s: float = 10.0
    """The time after the controller's start in which load balancers known from before, but not heard, cannot fail."""
    settle_s: float = 5.0
    """The time after which a returned owner gets its clusters back; it doubles with each failure in a row."""
    settle_max_s: float = 60.0
    calm_s: float = 300.0
    """Age at which failures are forgotten."""
    lease_s: float = 5.0
    """The time for which an adopter that does not hear the controller goes on unconditionally."""


@dataclass(slots=True, eq=False)
class WatchedBalancer:
    """The controller's knowledge of a load balancer. ``session`` is the number of its session, or 0 without one."""

    info: LbInfo
    registered: int
    """The load balancer's place in the order of registrations."""
    session: int = 0
    heard_s: float = -math.inf
    lost_s: float = -math.inf
    """The time when the load balancer lost its session, or became known without one."""
    up_s: float = -math.inf
    """The time since which the load balancer serves."""
    failed_probes: int = 0
    downs: int = 0
    """The number of failures in a row; at least 1 after it left or drained."""
    failed: bool = False
    left: bool = False
    draining: bool = False
    confirmed: bool = False
    """True if this controller, since its start, has heard the load balancer or had an answer from it."""
    hearsay: bool = False
    """True if only another load balancer has told of this one, and it has not been heard itself."""
    displaced: tuple[str, ...] = ()
    load: Any = None
    """The last report of its load, as received; None if there was none."""
    latencies_ms: dict[str, float] = field(default_factory=dict)

    @property
    def state(self) -> LbState:
        if self.left:
            return LbState.LEFT
        if self.failed:
            return LbState.FAILED
        return LbState.DRAINING if self.draining else LbState.LIVE

    @property
    def serves(self) -> bool:
        return not (self.left or self.failed or self.draining)

    def suspected_from_s(self, timing: Timing) -> float:
        """Returns when probes begin to count against it; that is in the future while it reports."""
        return self.heard_s + timing.silence_s if self.session else self.lost_s

    def suspected(self, now_s: float, timing: Timing) -> bool:
        return now_s >= self.suspected_from_s(timing)

    def heard(self, now_s: float) -> None:
        """Records a message from the load balancer itself."""
        self.heard_s = now_s
        self.left = False
        self.answered(now_s)

    def answered(self, now_s: float) -> None:
        """Records that the load balancer has answered a probe."""
        self.failed_probes = 0
        self.confirmed, self.hearsay = True, False
        if self.failed:
            self.failed = False
            self.up_s = now_s

    def silent(self, began_s: float, timing: Timing) -> None:
        """Records that a probe which began at ``began_s`` got no answer."""
        if began_s >= self.suspected_from_s(timing):
            self.failed_probes += 1

    def drains(self, draining: bool, now_s: float) -> None:
        if draining and not self.draining:
            self.downs = max(1, self.downs)
        elif self.draining and not draining:
            self.up_s = now_s
        self.draining = draining

    def leave(self, now_s: float) -> None:
        """Records that the load balancer left in good order; it returns with its next registration."""
        self.left, self.failed, self.draining = True, False, False
        self.session, self.lost_s = 0, now_s
        self.downs = max(1, self.downs)

    def displaces(self, boots: Iterable[str]) -> None:
        """Records boots from which this one has taken the name; they are older than those already known."""
        earlier = [boot for boot in boots if boot != self.info.boot_id and boot not in self.displaced]
        self.displaced = (*earlier, *self.displaced)[-DISPLACED_MAX:]

    def register(self, info: LbInfo, registered: int, session: int, now_s: float) -> None:
        """Records a session of the known boot, or of a newer one."""
        if info.boot_id != self.info.boot_id:
            self.displaced = (*self.displaced, self.info.boot_id)[-DISPLACED_MAX:]
            self.load, self.latencies_ms = None, {}
            self.draining = False
        if self.left:
            self.up_s = now_s
        self.info, self.registered, self.session = info, registered, session
        self.heard(now_s)

    def look(self, now_s: float, started_s: float, timing: Timing) -> bool:
        """Returns whether the load balancer has just failed."""
        if self.serves and self.downs and now_s - self.up_s >= timing.calm_s:
            self.downs = 0
        if self.failed or self.left or self.failed_probes < timing.probes or not self.suspected(now_s, timing):
            return False
        if not self.confirmed and now_s < started_s + timing.grace_s:
            return False
        self.failed = True
        self.downs += 1
        return True

    def standing(self, now_s: float, timing: Timing) -> Standing:
        hold_s = 0.0
        if self.downs:
            hold_s = min(timing.settle_max_s, timing.settle_s * 2.0 ** min(self.downs - 1, DOUBLINGS_MAX))
        steady = self.serves and self.confirmed and now_s - self.up_s >= hold_s
        keeps = bool(self.session) or not self.confirmed or now_s - self.lost_s < timing.lease_s
        return Standing(self.info.lb_id, self.info.region, self.serves, steady, bool(self.session), keeps)

    def measured(self, latencies_ms: Mapping[str, float], most: int) -> None:
        """Records round-trip times to other load balancers. Beyond ``most`` entries, the oldest go."""
        for lb_id, latency_ms in latencies_ms.items():
            self.latencies_ms.pop(lb_id, None)
            self.latencies_ms[lb_id] = latency_ms
        while len(self.latencies_ms) > most:
            del self.latencies_ms[next(iter(self.latencies_ms))]
