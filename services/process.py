"""One service as a child process: started, told when it serves, ended."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pinyon.core.errors import DeadlineExceeded, Unavailable

__all__ = ["ROOT", "ServiceProcess"]

ROOT = Path(__file__).resolve().parent.parent


class ServiceProcess:
    """One child process of the suite."""

    def __init__(
        self, name: str, module: str, arguments: Sequence[str], log_path: Path, inside: Sequence[str] = ()
    ) -> None:
        """``inside``: a command that becomes the one after it, such as ``ip netns exec NAME``."""
        self.name = name
        self.module = module
        self.arguments = list(arguments)
        self.log_path = log_path
        self._inside = tuple(inside)
        self.endpoints: dict[str, str] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self._ready_fd = -1

    @property
    def pid(self) -> int:
        if self.process is None:
            raise RuntimeError(f"{self.name} was not started")
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def spawn(self) -> None:
        """Start it; :meth:`wait_ready` waits until it serves."""
        reader, writer = os.pipe()
        environment = {
            **os.environ,
            "PINYON_PARENT_PID": str(os.getpid()),
            "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", ""))),
            "PYTHONUNBUFFERED": "1",
        }
        command = [*self._inside, sys.executable, "-m", self.module, *self.arguments, "--ready-fd", str(writer)]
        try:
            with self.log_path.open("ab") as log:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(writer,),
                    env=environment,
                    start_new_session=True,
                )
        except OSError:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        self._ready_fd = reader

    def wait_ready(self, deadline: float) -> None:
        """Wait for the endpoints. Raises :class:`Unavailable` with the end of the log if the process ends first."""
        line = b""
        try:
            while not line.endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([self._ready_fd], [], [], left)[0]:
                    raise DeadlineExceeded(f"{self.name} was not ready in time{self._log_tail()}")
                part = os.read(self._ready_fd, 65536)
                if not part:
                    raise Unavailable(f"{self.name} ended while starting{self._log_tail()}")
                line += part
        finally:
            os.close(self._ready_fd)
            self._ready_fd = -1
        announced = json.loads(line)
        self.endpoints = {
            key: value for key, value in announced.items() if key not in ("service", "instance_id", "pid")
        }

    def signal(self, number: int) -> None:
        """Send a signal, if it is alive."""
        if self.process is not None and self.alive:
            self.process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended within the time."""
        if self.process is None:
            return True
        try:
            self.process.wait(timeout=max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait(5)

    def _log_tail(self) -> str:
        text = self.log_path.read_text(errors="replace")[-2000:] if self.log_path.exists() else ""
        return f"; its log ends with:\n{text}" if text else ""
