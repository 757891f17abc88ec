"""The link monitor, on interfaces of a separate network namespace."""

from __future__ import annotations

import ctypes
import queue
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from pinyon.transfer.host.interfaces import LinkMonitor
from tests.unit.transfer.conftest import GENEROUS_S, eventually, nothing_left_behind

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


class Space:
    """A thread in a network namespace of its own, as are the threads and processes that it starts."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        error = self._answers.get(timeout=GENEROUS_S)
        if error:
            self.close()
            pytest.skip(f"no network namespace can be made: error {error}")
        try:
            self.ip("link add a0 type veth peer name b0")
            self.ip("link add a1 type veth peer name b1")
        except subprocess.CalledProcessError as failed:
            self.close()
            pytest.skip(f"no veth interfaces can be made: {failed.stderr.decode().strip()}")
        for name in ("a0", "b0", "a1", "b1"):
            self.ip(f"link set {name} up")
        eventually(lambda: self.do(self._is_ready), "the carriers are there")

    @staticmethod
    def _is_ready() -> bool:
        with closing(LinkMonitor(("a0", "a1"))) as monitor:
            return not monitor.changes()

    def _run(self) -> None:
        self._answers.put(ctypes.get_errno() if _LIBC.unshare(_CLONE_NEWNET) else 0)
        while (work := self._work.get()) is not None:
            try:
                self._answers.put(work())
            except Exception as error:
                self._answers.put(error)

    def do(self, work: Callable[[], object]) -> object:
        self._work.put(work)
        answer = self._answers.get(timeout=GENEROUS_S)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def ip(self, command: str) -> None:
        self.do(lambda: subprocess.run(["ip", *command.split()], check=True, capture_output=True))

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(GENEROUS_S)


@pytest.fixture
def space() -> Iterator[Space]:
    if shutil.which("ip") is None:
        pytest.skip("the ip command (iproute2) is not installed")
    one = Space()
    yield one
    one.close()


@pytest.fixture
def watch(space: Space) -> Iterator[Callable[..., LinkMonitor]]:
    """Makes monitors inside the space."""
    monitors: list[LinkMonitor] = []

    def make(*names: str) -> LinkMonitor:
        monitors.append(space.do(lambda: LinkMonitor(names)))
        return monitors[-1]

    yield make
    for monitor in monitors:
        monitor.close()
        monitor.close()


def changes(monitor: LinkMonitor) -> list[tuple[str, bool]]:
    """Waits for the next changes: a carrier takes a moment to come and go."""
    found: list[tuple[str, bool]] = []
    eventually(lambda: found.extend(monitor.changes()) or bool(found), "a link changes")
    return found


def test_down_and_up_again(space: Space, watch: Callable[..., LinkMonitor]) -> None:
    monitor = watch("a0", "a1", "rail0", "no interface")
    assert monitor.changes() == []
    space.ip("link set a0 down")
    assert changes(monitor) == [("a0", False)]
    space.ip("link set a0 up")
    assert changes(monitor) == [("a0", True)]
    space.ip("link set b1 down")  # the far end: a1 loses its carrier
    assert changes(monitor) == [("a1", False)]
    space.ip("link del a0")
    assert changes(monitor) == [("a0", False)]
    assert monitor.changes() == []


def test_an_interface_that_comes_back_by_its_name(space: Space, watch: Callable[..., LinkMonitor]) -> None:
    monitor = watch("a0", "a1")
    space.ip("link del a1")
    assert changes(monitor) == [("a1", False)]
    space.ip("link add a1 type veth peer name b1")
    space.ip("link set b1 up")
    space.ip("link set a1 up")
    assert changes(monitor) == [("a1", True)]


def test_what_is_down_at_first_is_told(space: Space, watch: Callable[..., LinkMonitor]) -> None:
    space.ip("link set a1 down")
    monitor = watch("a0", "a1")
    assert changes(monitor) == [("a1", False)]
    assert monitor.changes() == []


def test_names_that_are_no_interfaces_are_not_watched() -> None:
    with nothing_left_behind():
        monitor = LinkMonitor(["rail0", "no interface", "x" * 40, ""])
        assert monitor.changes() == []
        monitor.close()
