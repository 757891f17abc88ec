"""A breaker: servers get no requests for a while if their earlier ones went badly.

Two things speak against a server. One is that the server is *absent*: nothing listens, or no connection is made in
time; one such failure is enough. The other is that it *fails*: answers break off, do not come, or are errors of its
own. Requests may be to blame for that, so it takes several failures, and half of all. Never are more than half of the
servers left out for failing, so that a client whose requests break servers cannot end the service for everybody.

A server that was left out is tried with one request when its pause is over; each failure doubles the pause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pinyon.core.avoidance import Avoidance

SERVERS_MAX = 4096
FAILURES: Final = 5
"""Failures in about the last ``WINDOW_S`` for which a server is left out, if they are half of its requests."""
WINDOW_S: Final = 10.0
FIRST_S: Final = 0.5
MAX_S: Final = 30.0
"""The longest pause; the first is ``FIRST_S``."""


@dataclass(slots=True)
class _Known:
    """One server's state. A request's outcome counts half as much for each window that has passed."""

    at_s: float
    failures: float = 0.0
    successes: float = 0.0
    absent: bool = False
    failing: bool = False

    @property
    def open(self) -> bool:
        return self.absent or self.failing

    def fade(self, now_s: float) -> None:
        passed_s = now_s - self.at_s
        if passed_s > 0:
            left = 0.5 ** (passed_s / WINDOW_S)
            self.failures *= left
            self.successes *= left
            self.at_s = now_s


class Breaker:
    """The breaker of all servers of one load balancer. Owned by one thread; the caller passes the time (seconds)."""

    def __init__(self) -> None:
        self._pauses = Avoidance(first_s=FIRST_S, max_s=MAX_S, max_peers=SERVERS_MAX)
        self._servers: dict[str, _Known] = {}

    def add(self, server: str, now_s: float) -> None:
        """Adds a server; does nothing if it is there. Raises ``ValueError`` beyond :data:`SERVERS_MAX`."""
        if server not in self._servers:
            if len(self._servers) >= SERVERS_MAX:
                raise ValueError(f"at most {SERVERS_MAX} servers")
            self._servers[server] = _Known(now_s)

    def remove(self, server: str) -> None:
        if self._servers.pop(server, None) is not None:
            self._pauses.succeeded(server)

    def failed(self, server: str, now_s: float, *, absent: bool = False) -> None:
        """Records a request that failed. ``absent``: it did not reach the server."""
        known = self._servers.get(server)
        if known is None:
            return
        known.fade(now_s)
        known.failures += 1.0
        if absent:
            known.absent, known.failing = True, False
        elif not known.open:
            # The half makes up for what has faded since the first failure.
            if known.failures < FAILURES - 0.5 or known.failures < known.successes:
                return
            if 2 * (sum([each.failing for each in self._servers.values()]) + 1) > len(self._servers):
                return
            known.failing = True
        self._pauses.failed(server, now_s)

    def succeeded(self, server: str, began_s: float, now_s: float) -> None:
        """Records that a request sent at ``began_s`` ended well."""
        known = self._servers.get(server)
        if known is None:
            return
        known.fade(now_s)
        known.successes += 1.0
        if known.open:
            self._pauses.succeeded(server, began_s)
            if server not in self._pauses:
                known.absent = known.failing = False
                known.failures = 0.0

    def found(self, server: str) -> None:
        """Records that the server answers a probe, so it is not absent. Only requests show whether it still fails."""
        known = self._servers.get(server)
        if known is not None and known.absent:
            known.absent = False
            self._pauses.succeeded(server)

    def allows(self, server: str, now_s: float) -> bool:
        """Returns whether the server may get a request now."""
        return not self._pauses.avoids(server, now_s)

    def tried(self, server: str, now_s: float) -> None:
        """Records a request that goes there. For a server that was left out, it is the only one for now."""
        if self.is_open(server):
            self._pauses.tried(server, now_s)

    def is_open(self, server: str) -> bool:
        """Returns whether the server was left out, and nothing good is known of it since."""
        known = self._servers.get(server)
        return known is not None and known.open
