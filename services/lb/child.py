"""One of several load balancers, as a process: started, waited for, asked for its metrics, ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Final

from pinyon.core.address import parse_address
from pinyon.core.errors import Unavailable
from pinyon.runtime.process import child_environment
from pinyon.runtime.restarts import how_it_ended
from services.lb.heartbeat import HeartbeatReceiver

__all__ = ["Child", "command_of"]

ROOT: Final = Path(__file__).resolve().parents[3]
"""The folder of ``services``."""
PAGE_BYTES_MAX: Final = 16 << 20
ANSWER_S: Final = 2.0
"""For a page of metrics."""


class Child:
    """``start`` → ``ended``; and again. What it prints goes where ours does."""

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        again: Callable[[Mapping[str, str]], Sequence[str]] = lambda _: (),
    ) -> None:
        """``command`` is without ``--ready-fd`` and ``--heartbeat-fd``; ``again`` makes of the first endpoints what
        comes after it at later starts."""
        self.number = number
        self._command = list(command)
        self._again: Callable[[Mapping[str, str]], Sequence[str]] | None = again
        self._process: asyncio.subprocess.Process | None = None
        self._heartbeat = HeartbeatReceiver()
        self._heartbeats: asyncio.BaseTransport | None = None
        self.endpoints: dict[str, str] = {}
        """Where it serves; empty while it does not."""

    def __str__(self) -> str:
        return f"process {self.number}" + (f" (pid {self.pid})" if self.pid else "")

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def answers(self) -> bool:
        """It serves, and was heard of lately."""
        return bool(self.endpoints) and not self._heartbeat.missed

    def ask(self) -> int:
        """How often in a row nothing was heard of it between two such calls."""
        return self._heartbeat.ask()

    async def start(self, within_s: float) -> None:
        """Returns when it serves. Raises :class:`Unavailable` if it ends before that, or is not ready in time; then it
        has ended, or been killed."""
        self.endpoints = {}
        self._deaf()
        beats, beat = os.pipe()
        reader, writer = os.pipe()
        try:
            # In a session of its own: a terminal's Ctrl-C is for the parent, who passes it on.
            self._process = await asyncio.create_subprocess_exec(
                *self._command, "--heartbeat-fd", str(beat), "--ready-fd", str(writer),
                stdin=asyncio.subprocess.DEVNULL, pass_fds=(beat, writer),
                env=child_environment(ROOT, os.getpid()), start_new_session=True,
            )  # fmt: skip
        except BaseException as error:
            os.close(reader)
            os.close(beats)
            if isinstance(error, OSError):
                raise Unavailable(f"{self} cannot be started: {error}") from None
            raise
        finally:
            os.close(writer)
            os.close(beat)
        try:
            await self._listen(beats)
            async with asyncio.timeout(within_s):
                line = await _line(reader)
                if not line:
                    raise Unavailable(f"{self} {await self.ended()} before it served")
        except TimeoutError:
            self.kill()
            await self.ended()
            raise Unavailable(f"{self} was not ready within {within_s:g} s") from None
        except asyncio.CancelledError:
            self.signal(signal.SIGTERM)
            raise
        said = json.loads(line)
        self.endpoints = {name: said[name] for name in said if name not in ("service", "instance_id", "pid")}
        if self._again is not None:
            self._command += self._again(self.endpoints)
            self._again = None

    async def _listen(self, beats: int) -> None:
        self._heartbeat = heartbeat = HeartbeatReceiver()
        pipe = os.fdopen(beats, "rb", buffering=0)
        self._heartbeats, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: heartbeat, pipe)

    def _deaf(self) -> None:
        if self._heartbeats is not None:
            self._heartbeats.close()
            self._heartbeats = None

    async def ended(self) -> str:
        """How it did, when it has."""
        assert self._process is not None
        code = await self._process.wait()
        self.endpoints = {}
        self._deaf()
        return how_it_ended(code)

    def signal(self, number: int) -> None:
        if self._process is not None and self.alive:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def metrics(self) -> str:
        """Its page. Blocks, for ``ANSWER_S`` between two pieces of it at most. Raises :class:`Unavailable`."""
        address = self.endpoints.get("metrics", "")
        if not address:
            raise Unavailable(f"{self} does not serve")
        if not self.answers:
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


def command_of(arguments: Sequence[str]) -> list[str]:
    """That runs a load balancer."""
    return [sys.executable, "-m", "services.lb", *arguments]


async def _line(reader: int) -> bytes:
    """The first line of a pipe, which is closed then; what there is of it where it ends before."""
    loop = asyncio.get_running_loop()
    stream = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reader, "rb", buffering=0)
    )
    try:
        line = await stream.readline()
        return line if line.endswith(b"\n") else b""
    finally:
        transport.close()
