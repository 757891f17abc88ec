"""A breaker: servers get no requests for a while if their earlier ones went badly.

Two things speak against a server. One is that the server is *absent*: nothing listens, or no connection is made in
time; one such failure is enough. The other is that it *fails*: answers break off, do not come, or are errors of its
own. Requests may be to blame for that, so it takes several failures, and half of all. Never are more than half of the
servers left out for failing, so that a client whose requests break servers cannot end the service for everybody.

A server that was left out is tried with one request when its pause is over; each failure doubles the pause.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pinyon.core.avoidance import Avoidance

SERVERS_MAX = 4096


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """Thresholds and pauses, in seconds. ``first_s`` is the first pause, ``max_s`` the longest.

    A server fails with ``failures`` in about the last ``window_s``, if these are at least this ``ratio`` of all.
    """

    failures: int = 5
    ratio: float = 0.5
    window_s: float = 10.0
    first_s: float = 0.5
    max_s: float = 30.0

    def __post_init__(self) -> None:
        if self.failures < 1 or not 0 < self.ratio <= 1:
            raise ValueError("failures must be at least 1, and ratio above 0 and at most 1")
        if not 0 < self.window_s < math.inf or not 0 < self.first_s <= self.max_s < math.inf:
            raise ValueError("times must be positive, and first_s at most max_s")


class _Counts:
    """The recent outcomes of requests. An outcome counts half as much for each window that has passed."""

    __slots__ = ("at_s", "failures", "successes")

    def __init__(self, now_s: float) -> None:
        self.at_s = now_s
        self.failures = 0.0
        self.successes = 0.0

    def fade(self, now_s: float, window_s: float) -> None:
        passed_s = now_s - self.at_s
        if passed_s > 0:
            left = 0.5 ** (passed_s / window_s)
            self.failures *= left
            self.successes *= left
            self.at_s = now_s


class Breaker:
    """The breaker of all servers of one load balancer. Owned by one thread; the caller passes the time (seconds)."""

    def __init__(self, settings: BreakerSettings | None = None) -> None:
        self._settings = settings or BreakerSettings()
        self._pauses = Avoidance(first_s=self._settings.first_s, max_s=self._settings.max_s, max_peers=SERVERS_MAX)
        self._counts: dict[str, _Counts] = {}
        self._absent: set[str] = set()
        self._failing: set[str] = set()

    def add(self, server: str, now_s: float) -> None:
        """Adds a server; does nothing if it is there. Raises ``ValueError`` beyond :data:`SERVERS_MAX`."""
        if server not in self._counts:
            if len(self._counts) >= SERVERS_MAX:
                raise ValueError(f"at most {SERVERS_MAX} servers")
            self._counts[server] = _Counts(now_s)

    def remove(self, server: str) -> None:
        if self._counts.pop(server, None) is not None:
            self._close(server)

    def failed(self, server: str, now_s: float, *, absent: bool = False) -> None:
        """Records a request that failed. ``absent``: it did not reach the server."""
        counts = self._counts.get(server)
        if counts is None:
            return
        settings = self._settings
        counts.fade(now_s, settings.window_s)
        counts.failures += 1.0
        if absent:
            self._absent.add(server)
            self._failing.discard(server)
        elif server not in self._absent and server not in self._failing:
            total = counts.failures + counts.successes
            # The half makes up for what has faded since the first failure.
            if counts.failures < settings.failures - 0.5 or counts.failures < settings.ratio * total:
                return
            if 2 * (len(self._failing) + 1) > len(self._counts):
                return
            self._failing.add(server)
        self._pauses.failed(server, now_s)

    def succeeded(self, server: str, began_s: float, now_s: float) -> None:
        """Records that a request sent at ``began_s`` ended well."""
        counts = self._counts.get(server)
        if counts is None:
            return
        counts.fade(now_s, self._settings.window_s)
        counts.successes += 1.0
        if server in self._absent or server in self._failing:
            self._pauses.succeeded(server, began_s)
            if server not in self._pauses:
                self._close(server)
                counts.failures = 0.0

    def found(self, server: str) -> None:
        """Records that the server answers a probe, so it is not absent. Only requests show whether it still fails."""
        if server in self._absent:
            self._close(server)

    def allows(self, server: str, now_s: float) -> bool:
        """Returns whether the server may get a request now."""
        return not self._pauses.avoids(server, now_s)

    def tried(self, server: str, now_s: float) -> None:
        """Records a request that goes there. For a server that was left out, it is the only one for now."""
        if server in self._absent or server in self._failing:
            self._pauses.tried(server, now_s)

    def is_open(self, server: str) -> bool:
        """Returns whether the server was left out, and nothing good is known of it since."""
        return server in self._absent or server in self._failing

    def _close(self, server: str) -> None:
        self._absent.discard(server)
        self._failing.discard(server)
        self._pauses.succeeded(server)
