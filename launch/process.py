"""Child processes, each with one owner that starts them, waits until they serve, restarts and ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

from launch.ports import is_free
from pinyon.core.errors import DeadlineExceeded, Unavailable
from pinyon.runtime.process import child_environment

ROOT = Path(__file__).resolve().parent.parent
START_S = 60.0
"""The time within which a service must serve after its start."""
LOG_END_BYTES = 2000
READY_LOOK_S = 0.01
"""The time between two checks whether processes serve."""
KILLED_S = 60.0
"""The time for the kernel to end a killed process, however busy the machine is."""


_LISTENING = {"grpc": "--listen", "admin": "--admin-listen", "metrics": "--metrics-listen", "http": "--http-listen"}
"""The options that set the addresses of a service's endpoints."""


Child = subprocess.Popen[bytes]
"""A started process. Tests replace it by objects with the same methods."""
Launch = Callable[..., Child]
"""A function that starts a module as a process in its own session; it takes the arguments of :func:`start_module`."""


def start_module(
    module: str,
    arguments: Sequence[str],
    log: BinaryIO | None,
    ready_fd: int,
    more_fds: Sequence[int] = (),
    inside: Sequence[str] = (),
) -> Child:
    """Starts ``python -m MODULE``, which inherits ``ready_fd`` (passed by ``--ready-fd``) and ``more_fds``.

    ``log`` takes its output; None sends it to the parent's output. ``inside`` is a command that replaces itself by the
    command after it (exec), such as ``ip netns exec NAME``."""
    return subprocess.Popen(
        [*inside, sys.executable, "-m", module, *arguments, "--ready-fd", str(ready_fd)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=None if log is None else subprocess.STDOUT,
        pass_fds=(ready_fd, *more_fds),
        env=child_environment(ROOT, os.getpid()),
        start_new_session=True,
    )


Progress = Callable[[str], None]
"""A callback that receives a line about each started service."""


class Process:
    """A child process, which a supervisor can start again."""

    def __init__(self, name: str, log_path: Path | None, start_s: float = START_S) -> None:
        """Takes the file of its log, if it has one, and the time within which it must serve after its start."""
        self.name = name
        self.log_path = log_path
        self.start_s = start_s
        self.process: Child | None = None
        self.restarts = 0
        """The number of starts after the first."""

    def __str__(self) -> str:
        return self.name

    @property
    def pid(self) -> int:
        if self.process is None:
            raise RuntimeError(f"{self.name} was not started")
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def shown(self) -> str:
        """The facts about a process that serves, for people."""
        return f"pid {self.pid}"

    def hangs(self, now_s: float) -> bool:
        """Returns whether the process lives but does nothing; subclasses that can tell override this."""
        return False

    def spawn(self) -> None:
        """Starts the process; :meth:`announced` says when it serves."""
        raise NotImplementedError

    def announced(self) -> bool:
        """Returns whether the process serves; to be called after each :meth:`spawn` until it does.

        Raises :class:`Unavailable` with the end of the log if the process has ended."""
        raise NotImplementedError

    def start_again(self) -> None:
        """Starts an ended process where it served before. Raises ``OSError``."""
        if self.alive:
            raise RuntimeError(f"{self.name} is still running")
        self.restarts += 1
        self.spawn()

    def signal(self, number: int) -> None:
        """Sends a signal if the process is alive."""
        if self.process is not None and self.alive:
            self.process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Waits up to ``timeout_s`` and returns whether the process has ended."""
        if self.process is None:
            return True
        try:
            self.process.wait(timeout=max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Kills the process and waits until it has ended."""
        self.signal(signal.SIGKILL)
        self.wait(KILLED_S)

    def log_end(self) -> str:
        """Returns the end of the log; empty without one."""
        if self.log_path is None or not self.log_path.exists():
            return ""
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_END_BYTES))
            return log.read().decode(errors="replace")

    def log_tail(self) -> str:
        """Returns the end of the log as a clause to append to a message; empty without a log."""
        text = self.log_end()
        return f"; its log ends with:\n{text}" if text else ""


class ServiceProcess(Process):
    """A service of the suite, which announces its endpoints on a pipe."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        log_path: Path | None,
        launch: Launch = start_module,
        *,
        moves: bool = False,
    ) -> None:
        """Takes ``log_path``, the file for its output; without it, the output goes to the parent's.

        A service that ``moves`` may have its gRPC at another port after a restart, because it registers anew."""
        super().__init__(name, log_path)
        self.module = module
        self.arguments = list(arguments)
        self._launch = launch
        self._yielding = ("metrics", "grpc") if moves else ("metrics",)
        """The endpoints that move to a free port if another process has taken theirs when this process restarts."""
        self.endpoints: dict[str, str] = {}
        self._ready_fd = -1
        self._announced = b""

    @property
    def serving(self) -> bool:
        """True if the process lives and has announced its endpoints."""
        return self.alive and self._announced.endswith(b"\n")

    @property
    def addresses(self) -> str:
        """The endpoints, for people."""
        return " ".join(f"{key}={value}" for key, value in self.endpoints.items())

    @property
    def shown(self) -> str:
        return f"{super().shown} {self.addresses}"

    def spawn(self) -> None:
        """Starts the process; :meth:`wait_ready` waits until it serves."""
        reader, writer = os.pipe()
        try:
            with nullcontext() if self.log_path is None else self.log_path.open("ab") as log:
                self.process = self._started(log, writer)
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        self.close_ready()
        os.set_blocking(reader, False)
        self._ready_fd, self._announced = reader, b""

    def _started(self, log: BinaryIO | None, ready_fd: int) -> Child:
        return self._launch(self.module, self.arguments, log, ready_fd)

    def start_again(self) -> None:
        """Starts an ended process, at its old addresses where they must stay the same; does not wait."""
        for endpoint, option in _LISTENING.items():
            if (address := self.endpoints.get(endpoint)) and option in self.arguments:
                port = int(address.rpartition(":")[2])
                last = len(self.arguments) - self.arguments[::-1].index(option)  # the last value of an option counts
                host = self.arguments[last].rpartition(":")[0]
                if endpoint in self._yielding and not is_free(host, port):
                    port = 0
                self.arguments[last] = f"{host}:{port}"
        super().start_again()

    def wait_ready(self, deadline: float) -> None:
        """Waits until this process has announced its endpoints, as :func:`await_ready` does."""
        await_ready([self], deadline)

    def announced(self) -> bool:
        """Returns whether the endpoints were announced; raises as the base class does."""
        while not self._announced.endswith(b"\n"):
            try:
                part = os.read(self._ready_fd, 65536)
            except BlockingIOError:
                return False
            if not part:
                self.close_ready()
                raise Unavailable(f"{self} ended while starting{self.log_tail()}")
            self._announced += part
        self.close_ready()
        announced = json.loads(self._announced)
        self.endpoints = {
            key: value for key, value in announced.items() if key not in ("service", "instance_id", "pid")
        }
        return True

    def close_ready(self) -> None:
        if self._ready_fd >= 0:
            os.close(self._ready_fd)
            self._ready_fd = -1

    def kill(self) -> None:
        super().kill()
        self.close_ready()


def end_all(processes: Sequence[Process], within_s: float) -> list[Process]:
    """Sends SIGTERM to all; kills and returns those that have not ended in time."""
    for process in processes:
        process.signal(signal.SIGCONT)  # a stopped process does not see SIGTERM
        process.signal(signal.SIGTERM)
    deadline = time.monotonic() + within_s
    late = [process for process in processes if not process.wait(deadline - time.monotonic())]
    for process in late:
        process.kill()
    return late


def await_ready(
    services: Sequence[ServiceProcess], deadline: float, told: Callable[[ServiceProcess], None] = lambda _: None
) -> None:
    """Waits until all processes have announced their endpoints; each is ``told`` at once.

    Raises :class:`Unavailable`, with the end of the log, as soon as one has ended, and :class:`DeadlineExceeded`. After
    an error none can be awaited any more."""
    waiting = list(services)
    try:
        while waiting:
            for service in [each for each in waiting if each.announced()]:
                waiting.remove(service)
                told(service)
            if waiting and time.monotonic() > deadline:
                raise DeadlineExceeded(f"{waiting[0].name} was not ready in time{waiting[0].log_tail()}")
            time.sleep(READY_LOOK_S)
    except BaseException:
        for service in services:
            service.close_ready()
        raise
