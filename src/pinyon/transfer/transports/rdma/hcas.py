"""The HCAs (RDMA NICs) of this host: opened at first use, shared by both directions, closed on their removal."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from pinyon.core.clock import Clock
from pinyon.transfer.memory.region import Region
from pinyon.transfer.transports.rdma.hca import Hca
from pinyon.transfer.transports.rdma.verbs import VerbsError
from pinyon.transfer.types.nic import Nic

_log = logging.getLogger(__name__)


class HcaTable:
    """The opened HCAs by name, with their users. All methods are thread-safe.

    The kernel cannot remove an HCA that is open. So an HCA that is to be removed is taken from all its users and closed
    with the last of them; another one of the same name is opened afresh."""

    def __init__(self, nics: Mapping[str, Nic], clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._nics = {name: nic for name, nic in nics.items() if nic.transport == "rdma"}
        self._lock = threading.RLock()
        """Reentrant, because a user may be told to stop by a call that it makes itself."""
        self._left = threading.Condition(self._lock)
        self._closed = False
        self._open: dict[str, Hca] = {}
        self._users: dict[Hca, dict[object, Callable[[], None]]] = {}
        """The users of each HCA, and the call that makes each stop; it must not block."""

    def use(self, name: str, user: object, stop: Callable[[], None]) -> Hca:
        """Returns the HCA of this name, open until ``leave``. Raises VerbsError if it is not ours or not working."""
        nic = self._nics.get(name)
        if nic is None:
            raise VerbsError(f"no HCA {name!r} is configured")
        with self._lock:
            if self._closed:
                raise VerbsError("the HCAs are closed")
            hca = self._open.get(name)
            if hca is not None and not hca.present:
                self._retire(hca)
                hca = None
            if hca is None:
                hca = self._open[name] = Hca(nic)
                self._users[hca] = {}
            elif not hca.usable:
                raise VerbsError(f"port {nic.port} of {name} is not active")
            self._users[hca][user] = stop
            return hca

    def leave(self, hca: Hca, user: object) -> None:
        """Removes the user, which has closed what it had on the HCA."""
        with self._lock:
            users = self._users.get(hca)
            if users is not None:
                users.pop(user, None)
                self._left.notify_all()
                self._close_if_retired(hca)

    def sweep(self) -> list[str]:
        """Stops the users of HCAs that do not work any more, closes HCAs being removed, and returns their names."""
        with self._lock:
            failed = [hca for hca in self._open.values() if not hca.usable]
            for hca in failed:
                for stop in self._users[hca].values():
                    stop()
                if not hca.present:
                    _log.info("HCA %s is being removed", hca.nic.name)
                    self._retire(hca)
            return [hca.nic.name for hca in failed]

    def _retire(self, hca: Hca) -> None:
        del self._open[hca.nic.name]
        for stop in self._users[hca].values():
            stop()
        self._close_if_retired(hca)

    def _close_if_retired(self, hca: Hca) -> None:
        if not self._users[hca] and self._open.get(hca.nic.name) is not hca:
            del self._users[hca]
            hca.close()

    def forget(self, region: Region) -> None:
        """Ends the region's registrations: from then on no HCA touches it for us. Does not raise."""
        with self._lock:
            hcas = list(self._users)
        for hca in hcas:
            try:
                hca.forget(region)
            except VerbsError as error:
                _log.error("%s", error)

    def close(self, timeout_s: float) -> None:
        """Stops all users, waits until they have left, and closes the HCAs."""
        give_up = self._clock() + timeout_s
        with self._left:
            self._closed = True
            for users in self._users.values():
                for stop in users.values():
                    stop()
            while any(self._users.values()):
                remaining = give_up - self._clock()
                if remaining <= 0:
                    break
                self._left.wait(remaining)
            for hca, users in self._users.items():
                if users:  # closing it under them would crash the process
                    _log.error("HCA %s stays open: %d queue pairs do not end", hca.nic.name, len(users))
                else:
                    hca.close()
            self._users.clear()
            self._open.clear()
