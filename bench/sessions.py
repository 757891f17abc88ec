"""The cost of a message in a session (docs/design/sessions.md): there and back between two processes, one at a time.

The caller dials a server within the event loop and one of grpcio, in turns. CPU is that of each process by the
scheduler's accounting, all threads, for each round trip; messages are equally large both ways."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import ExitStack, suppress
from typing import Any

import uvloop

from bench.load import cpu_seconds
from bench.report import Aim, Report, parser, progress, summary
from bench.sessions_echo import GRPCIO, LOOP, WRITE_S
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.errors import Cancelled
from pinyon.frontdoor.instances.worker_sessions import METHOD
from pinyon.runtime.duplex import Dialed

SIZES = (200, 4500)
"""The bytes of a message: those of a token, and those of a prompt of a few KB."""
SIDE_AIM_US = 40.0
"""The aim for a side and round trip, with both sides in their event loops: a third of what asyncio gRPC once took."""
ANSWER_S = 30.0


class Caller:
    """A client that makes round trips one after the other on one session."""

    def __init__(self, address: str) -> None:
        self._stream = Dialed(address, METHOD, WRITE_S)
        self._message = worker_pb2.SessionRequest()
        self._left = 0
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connected = asyncio.Event()
        self._task = asyncio.create_task(self._stream.run(self._take, self._messages()))

    async def _messages(self) -> AsyncGenerator[worker_pb2.SessionRequest, None]:
        self._connected.set()
        await asyncio.Event().wait()  # messages are sent where answers are taken
        yield worker_pb2.SessionRequest()

    def _take(self, _: worker_pb2.SessionResponse) -> Any:
        self._left -= 1
        if self._left:
            return self._stream.say(self._message)
        self._done.set_result(None)
        return None

    async def trips(self, count: int, size: int) -> None:
        async with asyncio.timeout(ANSWER_S):
            await self._connected.wait()
            self._message = worker_pb2.SessionRequest()
            self._message.submissions.add(prompt_tokens_le32=b"x" * size)
            self._left, self._done = count, asyncio.get_running_loop().create_future()
            await self._stream.write(self._message)
            await self._done

    async def close(self) -> None:
        self._stream.end(Cancelled("closed"))
        with suppress(Cancelled):
            await self._task


async def measure(addresses: dict[str, tuple[str, int]], quick: bool) -> dict[str, Any]:
    repetitions, count = (3, 500) if quick else (7, 2000)
    figures: dict[str, dict[str, list[float]]] = {}
    callers = {accepts: Caller(address) for accepts, (address, _) in addresses.items()}
    try:
        for each in callers.values():
            await each.trips(count, SIZES[0])
        for _, size, accepts in itertools.product(range(repetitions), SIZES, callers):
            pids = {"dials": os.getpid(), "accepts": addresses[accepts][1]}
            before, began_s = {who: cpu_seconds([pid]) for who, pid in pids.items()}, time.perf_counter()
            await callers[accepts].trips(count, size)
            found = figures.setdefault(f"{LOOP}_to_{accepts}_{size}_bytes", {})
            found.setdefault("round_trip_us", []).append((time.perf_counter() - began_s) / count * 1e6)
            for who, pid in pids.items():
                used_us = (cpu_seconds([pid]) - before[who]) / count * 1e6
                found.setdefault(f"{who}_cpu_us", []).append(used_us)
    finally:
        for each in callers.values():
            await each.close()
    return {name: {what: summary(each) for what, each in found.items()} for name, found in figures.items()}


async def run(quick: bool, seed: int) -> Report:
    report = Report("sessions", {"sizes_bytes": SIZES, "at_once": 1, "seed": seed, "quick": quick})
    with ExitStack() as stack:
        addresses = {}
        for accepts in (LOOP, GRPCIO):
            command = [sys.executable, "-m", "bench.sessions_echo", accepts]
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            addresses[accepts] = (process.stdout.readline().strip(), process.pid)
        report.results = await measure(addresses, quick)
    for name, found in report.results.items():
        dials_us, accepts_us, trip_us = (
            found[key]["median"] for key in ("dials_cpu_us", "accepts_cpu_us", "round_trip_us")
        )
        progress(f"{name}: CPU {dials_us:.0f} us dials, {accepts_us:.0f} us accepts; {trip_us:.0f} us there and back")
        if name.startswith(f"{LOOP}_to_{LOOP}"):
            report.aims.append(Aim(f"{name}: CPU of the dearer side, us", SIDE_AIM_US, max(dials_us, accepts_us)))
    return report


def main() -> None:
    arguments = parser(__doc__).parse_args()
    uvloop.run(run(arguments.quick, arguments.seed)).emit()


if __name__ == "__main__":
    main()
