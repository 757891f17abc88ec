"""Services, and peers that tests drive, forked from a process that has already imported them.

A service needs a second of processor time until it serves, nearly all of it for imports, and the tests start hundreds.
A peer with a transfer engine needs a quarter of a second.

A forked child runs the same ``main`` with the same arguments, in a session of its own, and ends with the process that
forked it. The tests of ``launch up``, of containers and of network namespaces, and ``./dev demo``, show that ``python
-m services.NAME`` starts as well."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from launch.process import ROOT, Child
from pinyon.runtime.process import child_environment
from tests.processes import OWNER, UnownedPopen

MODULES = ("services.conductor", "services.controller", "services.kvstore", "services.lb", "services.worker")
MESSAGE_BYTES_MAX = 65_536
ANSWER_S = 60.0
CLONE_NEWNS, CLONE_NEWNET, MS_REC, MS_SLAVE, MNT_DETACH = 0x20000, 0x40000000, 0x4000, 0x80000, 2
"""Constants of ``sched.h`` and ``sys/mount.h``."""


class ForkedChild:
    """A process whose parent is the fork server, which reports the exit status on ``status_fd``."""

    def __init__(self, pid: int, status_fd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status_fd = status_fd
        self._process_fd = os.pidfd_open(pid)  # a signal never reaches another process that got the same number
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._ended(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return status

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process_fd, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ValueError, OSError):  # another thread has seen the end and closed the descriptor
                select.select([self._status_fd], [], [], timeout_s)
        with self._lock:
            if self.returncode is None and select.select([self._status_fd], [], [], 0)[0]:
                said = os.read(self._status_fd, 64)
                # A killed fork server reports nothing, and the kernel then ends what it forked.
                self.returncode = int(said) if said else -signal.SIGKILL
                os.close(self._status_fd)
                os.close(self._process_fd)
            return self.returncode


def until_stopped(pid: int) -> None:
    """Waits until SIGSTOP has reached every thread. (``waitid`` tells that to the parent only.)"""
    end, tick = time.monotonic() + ANSWER_S, threading.Event()
    while {stat.read_text().rpartition(") ")[2][0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")} != {"T"}:
        assert time.monotonic() < end, f"process {pid} does not stop"
        tick.wait(0.001)


class DrivenChild(ForkedChild):
    """A child that reads the pipe ``stdin`` and writes the pipe ``stdout``; closing either ends it."""

    def __init__(self, pid: int, status_fd: int, stdin: BinaryIO, stdout: BinaryIO) -> None:
        super().__init__(pid, status_fd)
        self.stdin, self.stdout = stdin, stdout


class Driven:
    """A test's hold on a process that it drives, freezes, thaws and kills; its ``_process`` comes from the heir."""

    _process: DrivenChild | subprocess.Popen[bytes]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(ANSWER_S)

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        until_stopped(self._process.pid)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self._process.poll() is None:
            self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(BrokenPipeError):  # a command that was never read
                stream.close()


class ForkServer:
    """A fork server that starts at first use and ends with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def __call__(self, module: str, arguments: Sequence[str], log: BinaryIO, ready_fd: int) -> Child:
        return self._child("service", module, arguments, log, ready_fd)

    def with_small_model(self, module: str, arguments: Sequence[str], log: BinaryIO, ready_fd: int) -> Child:
        """Starts a service whose built-in model is the smaller one of :mod:`tests.small_model`."""
        return self._child("small", module, arguments, log, ready_fd)

    def _child(self, kind: str, module: str, arguments: Sequence[str], log: BinaryIO, ready_fd: int) -> Child:
        child = ForkedChild(*self._forked(kind, module, arguments, (log.fileno(), ready_fd)))
        OWNER.add(child, f"{module} {' '.join(arguments)}")
        return child

    def driven(self, module: str, arguments: Sequence[str], netns: str = "") -> DrivenChild:
        """Starts a module's ``main(arguments)``, in a network namespace as ``ip netns exec`` would."""
        stdin, ours_in = os.pipe()
        ours_out, stdout = os.pipe()
        try:
            pid, status_fd = self._forked(f"driven {netns}", module, arguments, (stdout, stdin))
        except BaseException:
            os.close(ours_in)
            os.close(ours_out)
            raise
        finally:
            os.close(stdin)
            os.close(stdout)
        child = DrivenChild(pid, status_fd, os.fdopen(ours_in, "wb"), os.fdopen(ours_out, "rb"))
        OWNER.add(child, f"{module} {' '.join(arguments)}")
        return child

    def _forked(self, kind: str, module: str, arguments: Sequence[str], fds: tuple[int, int]) -> tuple[int, int]:
        """Returns the new process's id and the descriptor on which its exit status arrives."""
        reader, writer = os.pipe()
        try:
            with self._lock:
                asked = self._started()
                environment = child_environment(ROOT, self._process.pid if self._process else 0)
                message = json.dumps([kind, module, list(arguments), environment]).encode()
                socket.send_fds(asked, [message], [*fds, writer])
                answer = asked.recv(64)
            if not answer:
                raise RuntimeError("the fork server ended")
            return int(answer), reader
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)

    def _started(self) -> socket.socket:
        if self._socket is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.settimeout(ANSWER_S)
            with theirs:
                self._process = UnownedPopen(
                    [sys.executable, "-m", "tests.forks", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    env=child_environment(ROOT, 0) | {"OPENBLAS_NUM_THREADS": "1"},
                    start_new_session=True,  # Ctrl-C reaches the tests, which end what they started
                    cwd=ROOT,
                )
            self._socket = ours
            atexit.register(self._close)
        return self._socket

    def _close(self) -> None:
        if self._socket is not None and self._process is not None:
            self._socket.close()
            self._process.wait(ANSWER_S)


forked = ForkServer()
"""The launcher for :class:`launch.cluster.LocalCluster` and :class:`launch.process.ServiceProcess`."""


def serve(asked: socket.socket) -> Callable[[], None] | None:
    """Forks what is asked for until nobody can ask; returns None, or in a child the function to run."""
    status_fds: dict[int, int] = {}
    wake_reader, wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([asked, wake_reader], [], [])
        if wake_reader in ready:
            os.read(wake_reader, 4096)
            reap(status_fds)
        if asked not in ready:
            continue
        message, fds, _, _ = socket.recv_fds(asked, MESSAGE_BYTES_MAX, 3)
        if not message:
            return None
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in (*status_fds.values(), fds[2], wake_reader, wake_writer, asked.detach()):
                os.close(fd)
            kind, *what = json.loads(message)
            kind, _, netns = kind.partition(" ")
            if netns:
                enter(netns)
            if kind == "small":
                # Imported here because a fork server that only forks programs, as in a virtual machine, may lack the
                # model's packages.
                from tests.small_model import use_small_model

                use_small_model()
            return (driven if kind == "driven" else service)(*what, *fds[:2])
        status_fds[pid] = fds[2]
        os.close(fds[0])
        os.close(fds[1])
        asked.send(b"%d" % pid)


def reap(status_fds: dict[int, int]) -> None:
    while status_fds:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        fd = status_fds.pop(pid)
        with contextlib.suppress(BrokenPipeError):  # the process that asked for this child has ended
            os.write(fd, b"%d" % os.waitstatus_to_exitcode(status))
        os.close(fd)


def child(module: str, arguments: list[str], environment: dict[str, str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    Path("/proc/self/comm").write_text(module.rpartition(".")[2])  # the name that ps and top show


def move(fd: int, *targets: int) -> None:
    for target in targets:
        os.dup2(fd, target)
    os.close(fd)


def enter(netns: str) -> None:
    """Enters a network namespace as ``ip netns exec`` does, with a ``/sys`` that shows its devices."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {netns}")

    with open(f"/run/netns/{netns}", "rb") as namespace:
        check(libc.setns(namespace.fileno(), CLONE_NEWNET))
    check(libc.unshare(CLONE_NEWNS))
    check(libc.mount(b"", b"/", b"none", MS_SLAVE | MS_REC, None))
    libc.umount2(b"/sys", MNT_DETACH)
    check(libc.mount(netns.encode(), b"/sys", b"sysfs", 0, None))


def service(
    module: str, arguments: list[str], environment: dict[str, str], log_fd: int, ready_fd: int
) -> Callable[[], None]:
    child(module, arguments, environment)
    move(log_fd, 1, 2)
    main = importlib.import_module(f"{module}.__main__").main
    return lambda: main([*arguments, "--ready-fd", str(ready_fd)])


def driven(
    module: str, arguments: list[str], environment: dict[str, str], stdout_fd: int, stdin_fd: int
) -> Callable[[], None]:
    child(module, arguments, environment)
    move(stdout_fd, 1)
    move(stdin_fd, 0)
    main = importlib.import_module(module).main
    return lambda: main(arguments)


def prepared() -> None:
    """Imports all that services import, without starting a thread."""
    for module in MODULES:
        for part in ("__main__", "app", "settings"):
            importlib.import_module(f"{module}.{part}")
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1, threading.enumerate()


if __name__ == "__main__":
    # This process ends with its socket. ``die_with_parent`` would end it with the thread that used it first.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    prepared()
    run = serve(socket.socket(fileno=int(sys.argv[1])))
    if run is not None:
        run()
