"""This host's RDMA devices: opened at first use, shared by both directions, closed when they are being removed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from pinyon.transfer.host.nic import Nic
from pinyon.transfer.memory.region import Region
from pinyon.transfer.transports.rdma.verbs import Device, VerbsError

__all__ = ["DeviceTable"]

_log = logging.getLogger(__name__)


class DeviceTable:
    """Name → opened device, with those who use it. All methods are thread-safe.

    The kernel cannot remove a device that somebody has open. So one that is to be removed is taken from all its users
    and closed with the last of them; another one of the same name is opened afresh.
    """

    def __init__(self, nics: Mapping[str, Nic]) -> None:
        self._nics = {name: nic for name, nic in nics.items() if nic.transport == "rdma"}
        self._lock = threading.RLock()
        """Reentrant: a user may be told to stop by a call that it makes itself."""
        self._left = threading.Condition(self._lock)
        self._closed = False
        self._open: dict[str, Device] = {}
        self._users: dict[Device, dict[object, Callable[[], None]]] = {}
        """With what makes each of them stop; must not block."""

    def names(self) -> list[str]:
        return list(self._nics)

    def use(self, name: str, user: object, stop: Callable[[], None]) -> Device:
        """The device of this NIC, open until ``leave``.

        Raises:
            VerbsError: not one of this host's NICs, or it does not work at present.
        """
        nic = self._nics.get(name)
        if nic is None:
            raise VerbsError(f"no RDMA device {name!r} is configured")
        with self._lock:
            if self._closed:
                raise VerbsError("the devices are closed")
            device = self._open.get(name)
            if device is not None and not device.present:
                self._retire(device)
                device = None
            if device is None:
                device = self._open[name] = Device(nic)
                self._users[device] = {}
            elif not device.usable:
                raise VerbsError(f"port {nic.port} of {name} is not active")
            self._users[device][user] = stop
            return device

    def leave(self, device: Device, user: object) -> None:
        """The user has closed what it had on the device."""
        with self._lock:
            users = self._users.get(device)
            if users is not None:
                users.pop(user, None)
                self._left.notify_all()
                self._close_if_retired(device)

    def sweep(self) -> list[str]:
        """Stop the users of devices that do not work any more, and close those that are being removed; their names."""
        with self._lock:
            failed = [device for device in self._open.values() if not device.usable]
            for device in failed:
                for stop in self._users[device].values():
                    stop()
                if not device.present:
                    _log.info("RDMA device %s is being removed", device.nic.name)
                    self._retire(device)
            return [device.nic.name for device in failed]

    def _retire(self, device: Device) -> None:
        del self._open[device.nic.name]
        for stop in self._users[device].values():
            stop()
        self._close_if_retired(device)

    def _close_if_retired(self, device: Device) -> None:
        if not self._users[device] and self._open.get(device.nic.name) is not device:
            del self._users[device]
            device.close()

    def forget(self, region: Region) -> None:
        """On return no device lets anybody touch the region. Does not raise."""
        with self._lock:
            devices = list(self._users)
        for device in devices:
            try:
                device.forget(region)
            except VerbsError as error:
                _log.error("%s", error)

    def close(self, timeout_s: float) -> None:
        """Stop all users, wait until they have left, close the devices."""
        give_up = time.monotonic() + timeout_s
        with self._left:
            self._closed = True
            for users in self._users.values():
                for stop in users.values():
                    stop()
            while any(self._users.values()):
                remaining = give_up - time.monotonic()
                if remaining <= 0:
                    break
                self._left.wait(remaining)
            for device, users in self._users.items():
                if users:  # closing it under them would crash the process
                    _log.error("RDMA device %s stays open: %d queue pairs do not end", device.nic.name, len(users))
                else:
                    device.close()
            self._users.clear()
            self._open.clear()
