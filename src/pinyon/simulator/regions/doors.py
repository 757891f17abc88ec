"""The load balancer of one region: a queue, and both layers of routing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pinyon.routing.layer import Layer
from pinyon.routing.pushing import PUSHING_RULES, UNLIMITED, PushingRule
from pinyon.routing.target import Report
from pinyon.routing.target_policies import TARGET_POLICIES
from pinyon.routing.target_policy import TargetPolicy
from pinyon.routing.two_layers import Choice, Route, TwoLayers, Where
from pinyon.simulator.regions.calls import Call, Hop
from pinyon.simulator.regions.settings import GLOBAL_VIEW, System
from pinyon.simulator.virtual_time import VirtualTime

__all__ = ["Door", "Visit"]


class Visit:
    """A call in a load balancer's queue."""

    __slots__ = ("call", "epoch", "forwarded")

    def __init__(self, call: Call, forwarded: bool) -> None:
        self.call, self.epoch, self.forwarded = call, call.epoch, forwarded


class Door:
    """First come, first served (§4.1); who came from another region cannot go on to a third, and does not keep others
    from it. ``push`` gets what goes to an instance, ``forward`` what goes to another region."""

    def __init__(
        self,
        region: str,
        system: System,
        time: VirtualTime,
        global_view: TargetPolicy,
        push: Callable[[Door, Call], None],
        forward: Callable[[Door, Call], None],
    ) -> None:
        self.region, self.alive = region, True
        self._system, self._time, self._global_view = system, time, global_view
        self._push, self._forward = push, forward
        self._own: deque[Visit] = deque()
        self._others: deque[Visit] = deque()
        """From other regions."""
        self._turn = 0
        self._received: dict[str, int] = {}
        """From each other region, in all."""
        self.queued_max = 0
        self.layers = self._fresh()

    def _fresh(self) -> TwoLayers:
        return TwoLayers(self.region, Layer(*self._rules()), Layer(*self._rules()))

    def _rules(self) -> tuple[PushingRule, TargetPolicy]:
        system = self._system
        own = system.policy == GLOBAL_VIEW
        return PUSHING_RULES.make(system.pushing), self._global_view if own else TARGET_POLICIES.make(system.policy)

    @property
    def queued(self) -> int:
        return len(self._own) + len(self._others)

    def die(self) -> None:
        """With all it knows. Whose calls these were sees to them."""
        self.alive = False
        self._own.clear()
        self._others.clear()
        self._received.clear()

    def live(self) -> None:
        """Again, and it knows nobody."""
        self.alive = True
        self.layers = self._fresh()

    def arrive(self, call: Call, sender: str, *, again: bool = False) -> None:
        """``sender``: another region, "" for a client. ``again``: it was here before, and is first."""
        if sender and not again:
            self._received[sender] = self._received.get(sender, 0) + 1
        line = self._others if sender else self._own
        visit = Visit(call, bool(sender))
        if again:
            line.appendleft(visit)
        else:
            line.append(visit)
        self.queued_max = max(self.queued_max, self.queued)
        self.pump()

    def forget(self, call: Call) -> None:
        """It does not wait here any more, if it did."""
        for line in (self._own, self._others):
            for visit in line:
                if visit.call is call:
                    line.remove(visit)
                    return

    def pump(self) -> None:
        """Whoever can go on does."""
        while self.alive and self._next():
            pass

    def _next(self) -> bool:
        """One that goes on, of the two that have waited longest: one's own, and one from elsewhere."""
        lines = [line for line in (self._own, self._others) if line]
        if len(lines) == 2 and lines[1][0].call.sent_s < lines[0][0].call.sent_s:
            lines.reverse()
        for line in lines:
            visit = line[0]
            choice = self._choose(visit)
            if choice.where is Where.LOCAL or choice.where is Where.REMOTE:
                line.popleft()
                self._go(visit.call, choice)
                return True
        return False

    def _choose(self, visit: Visit) -> Choice:
        call = visit.call
        forwarded = visit.forwarded or not self._system.forwards
        route = Route(call.routed, forwarded=forwarded, exclude=call.exclude)
        return self.layers.choose(route, self._time.now_s)

    def _go(self, call: Call, choice: Choice) -> None:
        local = choice.where is Where.LOCAL
        layer = self.layers.local if local else self.layers.remote
        call.hops.append(Hop(self.region, choice.target, layer.sent(call.routed, choice.target)))
        (self._push if local else self._forward)(self, call)

    def report(self, sender: str, peers: int) -> Report:
        """What another region's load balancer hears that probes this one: who has room is shared among so many."""
        local, now_s = self.layers.local, self._time.now_s
        spare = local.spare(now_s)
        room = UNLIMITED if spare >= UNLIMITED else -(-max(0, spare - self.queued) // max(1, peers))
        return Report(self.queued, room=room, received=self._received.get(sender, 0), available=local.with_room(now_s))
