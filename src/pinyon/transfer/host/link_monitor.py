"""A monitor that learns from the kernel (rtnetlink), not from the next stall, when an interface's link changes.

Only the host's own interfaces can be seen; failures farther away are found by stalls and broken connections.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterable

_log = logging.getLogger(__name__)
_RTMGRP_LINK = 1
_SIOCGIFFLAGS = 0x8913
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_POLL_S = 1.0
"""Interval at which states are read even without an event: events can be lost when the socket's buffer overflows."""


class LinkMonitor:
    """A thread that calls ``changed(name, up)`` for each of these interfaces that changes; all count as up at first.

    Names that are no interfaces are not watched.
    """

    def __init__(self, names: Iterable[str], changed: Callable[[str, bool], None]) -> None:
        self._changed = changed
        self._up = {name: True for name in names if _exists(name)}
        self._closing = threading.Event()
        self._wake = -1  # an eventfd: ``close`` need not wait for the poll
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread, if there are interfaces. Without rtnetlink it only polls them."""
        if not self._up:
            return
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
            self._socket.bind((0, _RTMGRP_LINK))
        except OSError as error:
            _log.info("interfaces are polled, not watched: %s", error)
        thread = threading.Thread(target=self._watch, name="pinyon-transfer-links", daemon=True)
        thread.start()
        self._thread = thread

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if self._socket is not None:
            self._socket.setblocking(False)
            poll.register(self._socket, select.POLLIN)
        while not self._closing.is_set():
            for name, was_up in self._up.items():
                try:
                    up = link_is_up(name)
                except OSError as error:  # no more file descriptors: that says nothing of the link
                    _log.warning("the links of the NICs cannot be read: %s", error)
                    break
                if up is not was_up:
                    self._up[name] = up
                    try:
                        self._changed(name, up)
                    except Exception:
                        _log.exception("acting on a link event failed")
            poll.poll(_POLL_S * 1000)
            self._drain()

    def _drain(self) -> None:
        """Discards the events, which are not parsed: the states are read anyway."""
        if self._socket is not None:
            try:
                self._socket.recv(65536)
            except BlockingIOError:
                return
            except OSError:
                self._closing.wait(0.01)

    def close(self) -> None:
        self._closing.set()
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join(_POLL_S * 3)
        if self._socket is not None:
            self._socket.close()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1


def _exists(name: str) -> bool:
    try:
        socket.if_nametoindex(name)
    except OSError:
        return False
    return True


def link_is_up(name: str) -> bool:
    """Returns whether the interface is administratively up and has a carrier; one that is gone is down.

    Asks by ioctl because sysfs may be of another network namespace. Raises OSError if out of file descriptors."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16sH14x", name.encode()[:15], 0))
        except OSError:
            return False
    (flags,) = struct.unpack_from("H", answer, 16)
    return bool(flags & _IFF_UP and flags & _IFF_RUNNING)
