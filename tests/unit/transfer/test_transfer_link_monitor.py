"""The link monitor, on interfaces of a separate network namespace."""

from __future__ import annotations

import ctypes
import queue
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest

from pinyon.transfer.host import link_monitor as module
from pinyon.transfer.host.link_monitor import LinkMonitor, link_is_up
from tests.unit.transfer.conftest import GENEROUS_S, eventually, nothing_left_behind, transfer_threads

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
        for name in ("a0", "a1"):
            eventually(lambda name=name: self.do(lambda: link_is_up(name)) is True, f"{name} is up")

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


class Watch:
    """A monitor inside the space, and its reports."""

    def __init__(self, space: Space, *names: str) -> None:
        self.told: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
        self.act: Callable[[], None] = lambda: None

        def start() -> LinkMonitor:
            monitor = LinkMonitor(names, self._changed)
            monitor.start()
            return monitor

        monitor = space.do(start)
        assert isinstance(monitor, LinkMonitor)
        self.monitor = monitor

    def _changed(self, name: str, up: bool) -> None:
        self.told.put((name, up))
        self.act()

    def next(self) -> tuple[str, bool]:
        return self.told.get(timeout=GENEROUS_S)


@pytest.fixture
def watch(space: Space) -> Iterator[Watch]:
    one = Watch(space, "a0", "a1", "rail0", "no interface")
    yield one
    one.monitor.close()
    assert not transfer_threads()


def test_down_and_up_again(space: Space, watch: Watch) -> None:
    space.ip("link set a0 down")
    assert watch.next() == ("a0", False)
    space.ip("link set a0 up")
    assert watch.next() == ("a0", True)
    space.ip("link set b1 down")  # the far end: a1 loses its carrier
    assert watch.next() == ("a1", False)
    space.ip("link del a0")
    assert watch.next() == ("a0", False)
    assert watch.told.empty()


def test_an_interface_that_comes_back_by_its_name(space: Space, watch: Watch) -> None:
    space.ip("link del a1")
    assert watch.next() == ("a1", False)
    space.ip("link add a1 type veth peer name b1")
    space.ip("link set b1 up")
    space.ip("link set a1 up")
    assert watch.next() == ("a1", True)


def test_what_is_down_at_first_is_told(space: Space) -> None:
    space.ip("link set a1 down")
    watch = Watch(space, "a0", "a1")
    assert watch.next() == ("a1", False)
    watch.monitor.close()
    assert watch.told.empty()


def test_failing_callbacks_and_scarce_descriptors_do_not_end_it(
    space: Space, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("a defect")

    watch.act = fail
    space.ip("link set a0 down")
    assert watch.next() == ("a0", False)
    asked = threading.Event()

    def no_more(name: str) -> bool:
        asked.set()
        raise OSError(24, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(module, "link_is_up", no_more)
        space.ip("link set a0 up")
        assert asked.wait(GENEROUS_S)
    assert watch.next() == ("a0", True)


def test_it_polls_where_netlink_cannot_be_had(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket

    def refuse(family: int = -1, *arguments: int, **keywords: int) -> socket.socket:
        if family == socket.AF_NETLINK:
            raise PermissionError(1, "not in this sandbox")
        return real(family, *arguments, **keywords)

    monkeypatch.setattr(module, "_POLL_S", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(module.socket, "socket", refuse)
        watch = Watch(space, "a0")
    space.ip("link set a0 down")
    assert watch.next() == ("a0", False)
    watch.monitor.close()


def test_close_leaves_nothing(space: Space) -> None:
    for _ in range(2):
        with nothing_left_behind():
            watch = Watch(space, "a0")
            assert transfer_threads() == ["pinyon-transfer-links"]
            watch.monitor.close()
            watch.monitor.close()
            assert not transfer_threads()
    space.ip("link set a0 down")
    assert watch.told.empty()


def test_names_that_are_no_interfaces_are_not_watched() -> None:
    with nothing_left_behind():
        monitor = LinkMonitor(["rail0", "no interface", "x" * 40, ""], lambda name, up: None)
        monitor.start()
        assert not transfer_threads()
        monitor.close()
        LinkMonitor(["lo"], lambda name, up: None).close()  # never started


def test_a_name_that_is_no_interface_is_down() -> None:
    assert not link_is_up("no interface")
    assert not link_is_up("x" * 40)
