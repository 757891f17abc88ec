"""Membership of instances: registrations, leases by the age of the last report, and those who wait for a change."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from pinyon.core.clock import Clock
from pinyon.core.errors import FailedPrecondition
from pinyon.placement.fleet import Fleet
from pinyon.placement.instances import InstanceInfo, InstanceLoad, InstanceState
from pinyon.runtime.logging import get_logger

DISPLACED_MAX = 64
SPARSER_S = 300.0
"""Seconds for which a sparser sample must have been enough before a store node is asked for fewer keys.

Instances that restart come back, and each change of mind costs a snapshot."""

_log = get_logger("conductor")


@dataclass(eq=False)
class Reporter:
    """One report session of one instance; void as soon as a newer session of the instance exists."""

    state: InstanceState
    last_report_s: float
    every: int = 1
    """The sampling interval: one in ``every`` keys of the instance is indexed (:mod:`pinyon.core.key_sample`)."""
    displaced: dict[str, None] = field(default_factory=dict)
    """The boot ids from which this boot took over the instance id, latest last."""
    sparser_since_s: float | None = None
    """The time since when a sparser sample has been enough, or None."""
    sparser: int = 1
    """The sampling interval that has been enough all that time."""
    left: bool = False
    """True once the instance has said that it leaves; its session is over."""

    def wants(self, every: int, now_s: float) -> bool:
        """Notes that one key in ``every`` is enough, and returns whether the instance must be told another interval.

        A denser sample is asked for at once, a sparser one only after :data:`SPARSER_S`."""
        if every > self.every:
            if self.sparser_since_s is None:
                self.sparser_since_s, self.sparser = now_s, every
            self.sparser = min(self.sparser, every)
            if now_s - self.sparser_since_s < SPARSER_S:
                return False
            every = self.sparser
        self.sparser_since_s = None
        if every == self.every:
            return False
        self.every = every
        return True


class Membership:
    """Members of the fleet and their report sessions.

    - A session that breaks leaves its instance in place until the lease ends, but not schedulable. A process that died
      breaks its session at once; one that only lost its connection is back before the lease ends, with its blocks.
    - The newest session of an instance is the valid one. A session with the same boot id goes on with what is known.
      Another boot id replaces everything, and the boot it replaced cannot come back while the new one lives. So of two
      processes with one instance id the one that started last has it, and the other is told.
    - In its first ``settle_s`` seconds a conductor does not know all instances, and says so: the fleet is *settling*.
    - Time in which this process itself stood still shortens no lease, as it could not receive any report."""

    def __init__(self, fleet: Fleet, clock: Clock, lease_s: float, settle_s: float) -> None:
        self.lease_s = lease_s
        self._settle_s = settle_s
        self._settled_s = clock() + settle_s
        fleet.settle(settle_s > 0)
        self._fleet = fleet
        self._clock = clock
        self._reporters: dict[str, Reporter] = {}
        self._announced = fleet.version
        self._changed = asyncio.Event()
        """Set, and replaced, at each change."""

    @property
    def sessions(self) -> int:
        """The number of instances with a live report session."""
        return sum(reporter.state.connected for reporter in list(self._reporters.values()))

    def open(self, info: InstanceInfo) -> Reporter:
        """Opens a report session and returns its reporter.

        Raises :class:`ResourceExhausted` at the limit of instances, :class:`FailedPrecondition` for a boot that lost
        its instance id to another one."""
        name = info.instance_id
        state = self._fleet.get(name)
        displaced: dict[str, None] = {}
        if state is not None:
            displaced = self._displaced(self._reporters[name], info)
        if state is not None and state.info == info:
            self._fleet.index.new_session(state)
            self._fleet.inflight.unclaim(state, self._clock())
            self._fleet.set_connected(state, True)
            _log.info("instance is back", extra={"instance": name})
        else:
            if state is not None:
                del self._reporters[name]  # join makes the old boot leave
            state = self._fleet.join(info, self._clock())
            _log.info("instance joined", extra={"instance": name, "role": info.role.value, "address": info.address})
        reporter = Reporter(state, self._clock(), self._fleet.sample_for(info), displaced)
        self._reporters[name] = reporter
        self._notify()
        return reporter

    def heard(self, reporter: Reporter) -> None:
        """Renews the lease, as a report came. Raises :class:`FailedPrecondition` if the session is void."""
        if self._reporters.get(reporter.state.info.instance_id) is not reporter:
            raise FailedPrecondition("another session has taken this instance id, or the lease has ended")
        reporter.last_report_s = self._clock()

    def set_load(self, reporter: Reporter, load: InstanceLoad) -> None:
        self._fleet.set_load(reporter.state, load, self._clock())
        self._notify()

    def close(self, reporter: Reporter) -> None:
        """Marks the instance as disconnected: its session ended, but it did not say that it leaves."""
        if self._reporters.get(reporter.state.info.instance_id) is reporter:
            self._fleet.set_connected(reporter.state, False)
            _log.info("instance lost its session", extra={"instance": reporter.state.info.instance_id})
            self._notify()

    def leave(self, reporter: Reporter) -> None:
        """Removes the instance, as it asked for."""
        reporter.left = True
        self._remove(reporter.state.info.instance_id, "left")

    def stood_still(self, seconds: float) -> None:
        """Extends all leases by the ``seconds`` in which this process did nothing."""
        now_s = self._clock()
        for reporter in self._reporters.values():
            reporter.last_report_s = min(now_s, reporter.last_report_s + seconds)
        if seconds >= self.lease_s:  # by now, many instances have given up on this conductor and will soon reconnect
            _log.warning("this process stood still for %.1f s", seconds)
            self._settled_s = now_s + self._settle_s
            self._fleet.settle(self._settle_s > 0)
            self._notify()

    def expire(self) -> list[str]:
        """Removes instances whose lease has ended, and returns their ids. Ends the settling when it is time."""
        now_s = self._clock()
        if self._fleet.settling and now_s >= self._settled_s:
            self._fleet.settle(False)
            self._notify()
        ended = [name for name, r in self._reporters.items() if now_s - r.last_report_s > self.lease_s]
        for name in ended:
            self._remove(name, "lease ended")
        return ended

    def report_age_s(self, instance_id: str) -> float:
        return self._clock() - self._reporters[instance_id].last_report_s

    def _displaced(self, reporter: Reporter, info: InstanceInfo) -> dict[str, None]:
        """Returns the boot ids that a new boot displaces. Raises :class:`FailedPrecondition` if it was displaced."""
        known = reporter.state.info
        if info.boot_id in reporter.displaced:
            raise FailedPrecondition(
                f"the instance id {known.instance_id!r} belongs to a process at {known.address} that started later: "
                "every process needs an id of its own",
                field="registration.instance_id",
            )
        displaced = dict(reporter.displaced)
        if info.boot_id != known.boot_id:
            displaced[known.boot_id] = None
            _log.info(
                "another process has taken this instance id",
                extra={"instance": known.instance_id, "was": known.address, "is": info.address},
            )
        while len(displaced) > DISPLACED_MAX:
            del displaced[next(iter(displaced))]
        return displaced

    async def wait_change(self, version: int) -> None:
        """Waits until the membership's version differs from ``version``."""
        while self._fleet.version == version:
            await self._changed.wait()

    def _remove(self, name: str, reason: str) -> None:
        del self._reporters[name]
        self._fleet.leave(name)
        _log.info("instance is gone", extra={"instance": name, "reason": reason})
        self._notify()

    def _notify(self) -> None:
        if self._fleet.version != self._announced:
            self._announced = self._fleet.version
            self._changed.set()
            self._changed = asyncio.Event()
