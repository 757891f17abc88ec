"""Restarts of failed load balancers: a command in the background, with a longer pause each time, and a limit."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from pinyon.federation.view import LbInfo
from pinyon.runtime.logging import get_logger
from pinyon.runtime.tasks import ended

FIRST_PAUSE_S = 10.0
MAX_PAUSE_S = 300.0
AT_ONCE = 8
OUTPUT_BYTES = 4096

_log = get_logger("controller.restarts")


@dataclass(slots=True, eq=False)
class LbRestarts:
    """The restarts of each load balancer, from ``failed`` to ``back``. Without a command, nothing happens."""

    command: str
    timeout_s: float
    attempts: int
    counted: Callable[[bool], None] = lambda _: None
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE), init=False)
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict, init=False)

    def failed(self, info: LbInfo) -> None:
        task = self._tasks.get(info.lb_id)
        if self.command.strip() and (task is None or task.done()):
            self._tasks[info.lb_id] = asyncio.create_task(self._restart(info), name=f"restart {info.lb_id}")

    def back(self, lb_id: str) -> None:
        """Ends the restarts of a load balancer that serves again or will be forgotten."""
        task = self._tasks.pop(lb_id, None)
        if task is not None:
            task.cancel()

    @property
    def restarting(self) -> tuple[str, ...]:
        return tuple(self._tasks)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        self._tasks.clear()
        await ended(*tasks)

    async def _restart(self, info: LbInfo) -> None:
        pause_s = FIRST_PAUSE_S
        for attempt in range(1, self.attempts + 1):
            async with self._turns:
                self.counted(await self._run(info, attempt))
            await self.sleep(pause_s)
            pause_s = min(MAX_PAUSE_S, 2 * pause_s)
        _log.error("%s is not started again any more: %d attempts", info.lb_id, self.attempts)

    async def _run(self, info: LbInfo, attempt: int) -> bool:
        environment = {
            **os.environ,
            "PINYON_FAILED_LB_ID": info.lb_id,
            "PINYON_FAILED_REGION": info.region,
            "PINYON_FAILED_GRPC_ADDRESS": info.grpc_address,
            "PINYON_FAILED_HTTP_URL": info.http_url,
            "PINYON_FAILED_ATTEMPT": str(attempt),
        }
        _log.info("starting %s of %s again, attempt %d", info.lb_id, info.region, attempt)
        # No pipe: what the hook has started may hold the other end, and write to it, after we are gone.
        with tempfile.TemporaryFile() as output:
            try:
                process = await asyncio.create_subprocess_exec(
                    *shlex.split(self.command),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                _log.error("the restart hook cannot be run: %s", error.strerror or error)
                return False
            try:
                async with asyncio.timeout(self.timeout_s):
                    code = await process.wait()
            except TimeoutError:
                _log.error("the restart hook for %s took longer than %g s", info.lb_id, self.timeout_s)
                return False
            finally:
                if process.returncode is None:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    await _reaped(process)
            output.seek(max(0, output.seek(0, os.SEEK_END) - OUTPUT_BYTES))
            said = output.read(OUTPUT_BYTES).decode(errors="replace").strip()
        log = _log.info if code == 0 else _log.error
        log("the restart hook for %s ended with %d: %s", info.lb_id, code, said)
        return code == 0


async def _reaped(process: asyncio.subprocess.Process) -> None:
    """Waits for a killed process, and passes a cancellation on once it is gone."""
    waiting = asyncio.ensure_future(process.wait())
    cancelled = False
    while not waiting.done():
        try:
            await asyncio.wait((waiting,))
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
