"""One of several load balancers, as a process whose heart is listened to, and which is asked for its metrics."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from typing import BinaryIO, Final

from launch.process import INTERPRETER, Child, Launch, ServiceProcess
from pinyon.core.address import parse_address
from pinyon.core.errors import Unavailable

ASK_S: Final = 2.0
"""Between two looks whether a process was heard of: several times as long as it takes from one beat to the next."""
MISSED_MAX: Final = 5
"""Who was not heard of at so many in a row hangs."""
PAGE_BYTES_MAX: Final = 16 << 20
ANSWER_S: Final = 2.0
"""For a page of metrics."""
PIPE_BYTES: Final = 1 << 16


class Balancer(ServiceProcess):
    """What it prints goes where ours does."""

    def __init__(
        self, number: int, arguments: Sequence[str], launch: Launch = INTERPRETER, ask_s: float = ASK_S
    ) -> None:
        """``ask_s`` is the time between two looks whether it hangs."""
        super().__init__(f"process {number}", "services.lb", arguments, None, launch)
        self.number = number
        self.missed = 0
        """Looks in a row before which nothing had been heard of it. Silence is counted in looks, not by a clock: if we
        were held up ourselves, it is not long."""
        self._ask_s = ask_s
        self._asked_s = 0.0
        self._beats = -1

    def __str__(self) -> str:
        return self.name if self.process is None else f"{self.name} (pid {self.pid})"

    @property
    def answers(self) -> bool:
        """It serves, and was heard of lately."""
        return self.serving and not self.missed

    def _started(self, log: BinaryIO | None, ready_fd: int) -> Child:
        self.close()
        self._beats, beat = os.pipe()
        os.set_blocking(self._beats, False)
        self.missed, self._asked_s = 0, time.monotonic()
        try:
            return self._launch(self.module, [*self.arguments, "--heartbeat-fd", str(beat)], log, ready_fd, (beat,))
        finally:
            os.close(beat)

    def hangs(self, now_s: float) -> bool:
        """It keeps its part of the connections, and answers none."""
        if now_s - self._asked_s >= self._ask_s:
            self._asked_s = now_s
            self.ask()
        return self.missed >= MISSED_MAX

    def ask(self) -> None:
        """Looks once whether anything was heard of it."""
        try:
            heard = bool(os.read(self._beats, PIPE_BYTES))
        except BlockingIOError:
            heard = False
        self.missed = 0 if heard else self.missed + 1

    def metrics(self) -> str:
        """Its page. Blocks, for ``ANSWER_S`` between two pieces of it at most. Raises :class:`Unavailable`."""
        address = self.endpoints.get("metrics", "")
        if not address or not self.serving:
            raise Unavailable(f"{self} does not serve")
        if self.missed:
            raise Unavailable(f"{self} does not show its metrics: it hangs")
        host, port = parse_address(address)
        connection = HTTPConnection(host, port, timeout=ANSWER_S)
        try:
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            page = answer.read(PAGE_BYTES_MAX + 1)
        except (OSError, HTTPException) as error:
            raise Unavailable(f"{self} does not show its metrics: {error}") from None
        finally:
            connection.close()
        if answer.status != 200 or len(page) > PAGE_BYTES_MAX:
            raise Unavailable(f"{self} does not show its metrics: status {answer.status}, {len(page)} bytes")
        return page.decode("utf-8", "replace")

    def close(self) -> None:
        """Listens to it no more: then it knows that nobody does."""
        if self._beats >= 0:
            os.close(self._beats)
            self._beats = -1
