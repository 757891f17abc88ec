"""One layer of routing: the targets of a load balancer, which of them are available, and which gets a request.

There are two layers (SkyWalker §3.1): the instances of the region, and the load balancers of other regions."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator

from pinyon.routing.interface import PushingRule, TargetPolicy
from pinyon.routing.pushing import UNLIMITED
from pinyon.routing.target import UNKNOWN, Report, Routed, Target

TARGETS_MAX = 4096


class Layer:
    """The targets of one model. Owned by one thread; the caller passes clock values (seconds, any origin)."""

    def __init__(self, pushing: PushingRule, policy: TargetPolicy) -> None:
        self._pushing, self.policy = pushing, policy
        self._targets: dict[str, Target] = {}
        self._held = 0

    def use(self, pushing: PushingRule | None = None, policy: TargetPolicy | None = None) -> None:
        """Replaces the pushing rule or the policy; a new policy knows nothing of earlier requests."""
        if pushing is not None:
            self._pushing = pushing
        if policy is not None:
            self.policy = policy
            for name in self._targets:
                policy.add(name)

    # -- targets

    def __len__(self) -> int:
        return len(self._targets)

    def __iter__(self) -> Iterator[Target]:
        return iter(self._targets.values())

    def get(self, name: str) -> Target | None:
        return self._targets.get(name)

    def join(
        self, name: str, capacity: int = 0, distance_s: float = 0.0, region: str = "", *, batches: bool = True
    ) -> None:
        """Adds a target without cache and requests, replacing one of that name; ignored beyond :data:`TARGETS_MAX`."""
        known = name in self._targets
        if not known and len(self._targets) >= TARGETS_MAX:
            return
        if known:
            self.policy.remove(name)
        target = self._targets[name] = Target(name, capacity, distance_s, region)
        target.batches = batches
        self.policy.add(name)

    def leave(self, name: str) -> None:
        """Removes a target; does nothing if it is not there."""
        if self._targets.pop(name, None) is not None:
            self.policy.remove(name)

    def set_live(self, name: str, live: bool) -> None:
        """Sets whether the target answers. Its cache may survive a time without answers."""
        target = self._targets.get(name)
        if target is not None:
            target.live = live

    def set_draining(self, name: str, draining: bool) -> None:
        target = self._targets.get(name)
        if target is not None:
            target.draining = draining

    def set_distance(self, name: str, distance_s: float) -> None:
        """Sets the measured round-trip time in seconds."""
        target = self._targets.get(name)
        if target is not None:
            target.distance_s = distance_s

    def report(self, name: str, report: Report, now_s: float, unseen: int = UNKNOWN) -> None:
        """Records a new report or probe. ``unseen``: our requests under way, if known better than from ``received``."""
        target = self._targets.get(name)
        if target is None:
            return
        target.report, target.reported_s, target.ended = report, now_s, 0
        if report.instances > 0:
            target.capacity = report.instances
        if unseen != UNKNOWN:
            target.sent_before = target.sent - unseen
        else:
            target.sent_before = target.sent if report.received == UNKNOWN else min(target.sent, report.received)

    # -- availability

    def _among(self, allowed: Container[str] | None, exclude: Collection[str]) -> Collection[Target]:
        """Returns the targets among the ``allowed`` (None: all) that are not excluded."""
        targets = self._targets.values()
        if allowed is None and not exclude:
            return targets
        return [each for each in targets if (allowed is None or each.name in allowed) and each.name not in exclude]

    def spare(
        self, now_s: float, allowed: Container[str] | None = None, exclude: Collection[str] = (), most: int = UNLIMITED
    ) -> int:
        """Returns how many requests may go to targets with a batch, less those on :meth:`hold`, up to ``most``; looks
        at no more targets than necessary."""
        total, pushing, enough = 0, self._pushing, min(UNLIMITED, self._held + most)
        for target in self._among(allowed, exclude):
            if target.batches:
                total += pushing.spare(target, now_s)
                if total >= enough:
                    return most
        return max(0, total - self._held)

    def has_room(self, now_s: float, allowed: Container[str] | None = None, exclude: Collection[str] = ()) -> bool:
        """Returns whether :meth:`spare` is above 0."""
        return self.spare(now_s, allowed, exclude, 1) > 0

    def takes(self, name: str, now_s: float) -> bool:
        """Returns whether the target is available."""
        target = self._targets.get(name)
        return target is not None and self._pushing.spare(target, now_s) > 0

    def available(
        self, now_s: float, allowed: Container[str] | None = None, exclude: Collection[str] = ()
    ) -> list[Target]:
        """Returns the targets that a request may be pushed to now, among the ``allowed`` (None: all)."""
        spare = self._pushing.spare
        return [target for target in self._among(allowed, exclude) if spare(target, now_s)]

    def full(self, now_s: float, allowed: Container[str] | None = None, exclude: Collection[str] = ()) -> list[Target]:
        """Returns the targets without room at which one more request may wait."""
        pushing = self._pushing
        return [
            target
            for target in self._among(allowed, exclude)
            if not pushing.spare(target, now_s) and pushing.admits(target, now_s)
        ]

    def with_room(self, now_s: float) -> int:
        """Returns the number of available targets with a batch; other regions are told it."""
        return sum([target.batches for target in self.available(now_s)])

    # -- requests

    def choose(
        self, request: Routed, now_s: float, allowed: Container[str] | None = None, exclude: Collection[str] = ()
    ) -> Target | None:
        """Returns the request's target, or None if none is available. Changes nothing: see :meth:`sent`."""
        available = self.available(now_s, allowed, exclude)
        if len(available) < len(self._targets):
            full = self.policy.waits_for(request, available, self.full(now_s, allowed, exclude))
            if full is not None:
                return full
        return self.policy.choose(request, available) if available else None

    def may_wait(self, request: Routed, now_s: float, exclude: Collection[str] = ()) -> bool:
        """Returns whether :meth:`choose` would name a full target, in case a conductor makes the choice.

        The conductor may choose any sound target, so each of them must still admit one more waiting request."""
        available, full = self.available(now_s, exclude=exclude), self.full(now_s, exclude=exclude)
        if len(available) == len(self._targets) or self.policy.waits_for(request, available, full) is None:
            return False
        some = {target.name for target in (*available, *full)}
        return all(
            target.name in some
            for target in self._among(None, exclude)
            if target.batches and target.live and not target.draining
        )

    def affinity(self, request: Routed, target: Target) -> int:
        """Returns how much speaks for the target that this layer chose, to compare it with those of other layers."""
        return self.policy.affinity(request, target.name)

    def hold(self) -> None:
        """Counts a request whose target is not known yet, because a conductor is being asked."""
        self._held += 1

    def release(self) -> None:
        """Ends a :meth:`hold`: the request was :meth:`sent`, or will not be."""
        if self._held <= 0:
            raise ValueError("nothing is held")
        self._held -= 1

    def begin_session(self, name: str) -> None:
        """Resets the count of sent requests, as the target again counts those it receives from 0."""
        target = self._targets.get(name)
        if target is not None:
            target.sent = target.sent_before = 0

    def sent(self, request: Routed, name: str, *, counted: bool = True) -> Target | None:
        """Records a pushed request; returns the target for :meth:`ended`. ``counted``: the target will count it."""
        target = self._targets.get(name)
        if target is not None:
            target.sent += counted
            target.outstanding += 1
            self.policy.sent(request, name)
        return target

    @staticmethod
    def ended(target: Target | None) -> None:
        """Records the end of a request that was :meth:`sent`. A later target of the same name is not affected."""
        if target is not None:
            if target.outstanding <= 0:
                raise ValueError(f"nothing of ours is at {target.name}")
            target.outstanding -= 1
            target.ended += 1
