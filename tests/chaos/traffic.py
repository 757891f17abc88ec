"""Clients that send a new request every period, regardless of earlier ones; each client has its own period."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.balancer import Balancer, NotServed, Trace, WithIt
from tests.chaos.http_exchange import text_of
from tests.chaos.jobs import Jobs

ENDED_S = 60.0
"""A request that takes longer counts as failed."""
OPEN_MAX = 64
"""Concurrent requests per client; at the limit the client waits, as a person would."""
TICK_S = 0.02


@dataclass(frozen=True)
class ClientKind:
    """A kind of client: ``period_s`` between two of its requests, with seeded jitter of a fifth."""

    size: str
    stream: bool
    period_s: float


@dataclass
class Record:
    """One request, with times of the monotonic clock.

    ``outcome`` is ok, failed, wrong (another text), died (with its load balancer), or empty while it runs."""

    client: int
    size: str
    stream: bool
    started_s: float
    ended_s: float = 0.0
    outcome: str = ""
    detail: str = ""
    door: str = ""
    tries: int = 0
    began_s: float | None = None
    """The time at which the first byte of its answer arrived, if one did."""

    @property
    def seconds(self) -> float:
        return self.ended_s - self.started_s


class Traffic:
    """The clients, as an async context manager; at its end all requests have ended."""

    def __init__(self, balancer: Balancer, jobs: Jobs, kinds: Sequence[ClientKind], seed: str) -> None:
        self._balancer = balancer
        self._jobs = jobs
        self._kinds = kinds
        self._seed = seed
        self._kick = asyncio.Event()
        self._clients: list[asyncio.Task[None]] = []
        self._open: set[asyncio.Task[None]] = set()
        self.records: list[Record] = []
        self.lag_s = 0.0
        """The longest delay of this process's own timer."""

    async def __aenter__(self) -> Traffic:
        self._clients = [
            *(asyncio.create_task(self._client(number, kind)) for number, kind in enumerate(self._kinds)),
            asyncio.create_task(self._watch()),
        ]
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._end(self._clients)
        if any(error):  # after an error nobody reads the answers
            await self._end(list(self._open))
        elif self._open:
            await asyncio.wait(self._open)  # each has its own deadline

    @staticmethod
    async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def clients(self) -> int:
        return len(self._kinds)

    def kick(self) -> None:
        """Makes every client send its next request now, as the first after an event."""
        self._kick.set()
        self._kick = asyncio.Event()

    async def _watch(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_S)
            self.lag_s = max(self.lag_s, time.monotonic() - before - TICK_S)

    async def _client(self, number: int, kind: ClientKind) -> None:
        random_ = random.Random(f"{self._seed} {number}")
        pause_s = kind.period_s * random_.random()
        mine: set[asyncio.Task[None]] = set()
        while True:
            try:
                async with asyncio.timeout(pause_s):
                    await self._kick.wait()
            except TimeoutError:
                pass
            while len(mine) >= OPEN_MAX:
                await asyncio.wait(mine, return_when=asyncio.FIRST_COMPLETED)
            task = asyncio.create_task(self._request(number, kind, random_))
            for tasks in (mine, self._open):
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            pause_s = kind.period_s * random_.uniform(0.8, 1.2)

    async def _request(self, number: int, kind: ClientKind, random_: random.Random) -> None:
        job = self._jobs.make(random_, kind.size, kind.stream)
        record, trace = Record(number, kind.size, kind.stream, time.monotonic()), Trace()
        self.records.append(record)
        try:
            async with asyncio.timeout(ENDED_S):
                reply = await self._balancer.send(job.body, trace)
            text = text_of(reply)
            record.outcome = "ok" if text == job.text else "wrong"
            if text != job.text:
                record.detail = f"got {text[:80]!r} ({len(text)}), expected {job.text[:80]!r} ({len(job.text)})"
        except WithIt as error:
            record.outcome, record.detail = "died", str(error)
        except (NotServed, ValueError) as error:
            record.outcome, record.detail = "failed", str(error)
        except TimeoutError:
            record.outcome, record.detail = "failed", f"no answer within {ENDED_S:g} s"
        finally:
            record.ended_s = time.monotonic()
            record.door, record.tries, record.began_s = trace.door, trace.tries, trace.began_s
