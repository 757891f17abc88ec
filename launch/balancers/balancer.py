"""A load balancer process of a group, whose heartbeat is read and whose metrics are fetched."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from typing import BinaryIO, Final

from launch.process import Child, Launch, ServiceProcess, start_module
from pinyon.core.address import parse_address
from pinyon.core.errors import Unavailable

ASK_S: Final = 2.0
"""The time between two looks for a heartbeat: several times the interval of the heartbeats."""
MISSED_MAX: Final = 5
"""The number of looks in a row without a heartbeat after which a process counts as hanging."""
PAGE_BYTES_MAX: Final = 16 << 20
ANSWER_S: Final = 2.0
"""The timeout for a page of metrics."""
PIPE_BYTES: Final = 1 << 16


class Balancer(ServiceProcess):
    """A load balancer process, which prints to the output of its parent."""

    def __init__(self, number: int, arguments: Sequence[str], launch: Launch = start_module) -> None:
        super().__init__(f"process {number}", "services.lb", arguments, None, launch)
        self.number = number
        self.missed = 0
        """The number of looks in a row without a heartbeat; unlike a clock, it does not grow while we are held up."""
        self._asked_s = 0.0
        self._beats = -1

    def __str__(self) -> str:
        return self.name if self.process is None else f"{self.name} (pid {self.pid})"

    @property
    def answers(self) -> bool:
        """True if the process serves and the last look, if any, did not miss its heartbeat."""
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
        """Returns whether the process hangs: it keeps its share of the connections without answering any."""
        if now_s - self._asked_s >= ASK_S:
            self._asked_s = now_s
            self.ask()
        return self.missed >= MISSED_MAX

    def ask(self) -> None:
        """Looks once whether there was a heartbeat."""
        try:
            heard = bool(os.read(self._beats, PIPE_BYTES))
        except BlockingIOError:
            heard = False
        self.missed = 0 if heard else self.missed + 1

    def metrics(self) -> str:
        """Returns the page of metrics; waits ``ANSWER_S`` at most for each piece. Raises :class:`Unavailable`."""
        address = self.endpoints.get("metrics", "")
        if not address or not self.serving:
            raise Unavailable(f"{self} does not serve")
        if self.missed:
            raise Unavailable(f"{self} does not show its metrics: it hangs")
        host, port = parse_address(address)
        try:
            with closing(HTTPConnection(host, port, timeout=ANSWER_S)) as connection:
                connection.request("GET", "/metrics")
                answer = connection.getresponse()
                page = answer.read(PAGE_BYTES_MAX + 1)
        except (OSError, HTTPException) as error:
            raise Unavailable(f"{self} does not show its metrics: {error}") from None
        if answer.status != 200 or len(page) > PAGE_BYTES_MAX:
            raise Unavailable(f"{self} does not show its metrics: status {answer.status}, {len(page)} bytes")
        return page.decode("utf-8", "replace")

    def close(self) -> None:
        """Closes the heartbeat pipe, which tells the process that nobody listens any more."""
        if self._beats >= 0:
            os.close(self._beats)
            self._beats = -1
