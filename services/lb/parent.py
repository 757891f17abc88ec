"""The parent of several load balancers: holds their address, starts them, starts again what died, shows the metrics of
all, and ends them. It serves no request."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pinyon.core.errors import Unavailable
from pinyon.frontdoor.auth import load_api_keys
from pinyon.runtime.logging import get_logger
from pinyon.runtime.restarts import Restarts
from pinyon.runtime.service import ServiceContext
from services.lb.child import Child, command_of
from services.lb.held_port import HeldPort
from services.lb.merged import Merged
from services.lb.settings import LbSettings
from services.lb.shares import check_clients, check_processes, process_arguments, same_ports

__all__ = ["Family", "run_processes"]

START_S: Final = 60.0
FAREWELL_S: Final = 10.0
"""For a process to end beyond the times that it was given to drain; then it is killed."""
KILLED_S: Final = 5.0
"""For the kernel to end who was killed."""
QUICK_DEATHS_MAX: Final = 4
ASK_S: Final = 2.0
"""Between two looks whether a process was heard of: several times as long as it takes from one beat to the next."""
MISSED_MAX: Final = 5
"""Who was not heard of at so many in a row hangs."""
CERTIFICATE: Final = "pinyon_certificate_not_after_seconds"
"""The parent shows its own, which is that of all."""

_log = get_logger("lb.processes")


class Family(Collector):
    """All processes: ``start`` → ``watch`` → ``close``. As a collector it is what all of them say."""

    def __init__(
        self,
        children: Sequence[Child],
        drain_s: float,
        start_s: float = START_S,
        quick_deaths_max: int = QUICK_DEATHS_MAX,
        ask_s: float = ASK_S,
    ) -> None:
        """``drain_s`` is how long a process may take from SIGTERM to its end, ``ask_s`` the time between two looks
        whether it hangs. After ``quick_deaths_max`` deaths of one
        within half a minute of its start each, in a row, one more ends all."""
        self.children = children
        self._drain_s = drain_s
        self.start_s = start_s
        """For a process to serve, from its start."""
        self._quick_deaths_max = quick_deaths_max
        self._ask_s = ask_s
        self._restarts = 0
        self._merged = Merged()
        self._lock = threading.Lock()
        """Whoever asks for metrics does so from a thread."""

    async def start(self) -> None:
        """Returns when all serve. Raises :class:`Unavailable` if one does not; then some may run, see :meth:`close`."""
        starting = [asyncio.ensure_future(child.start(self.start_s)) for child in self.children]
        try:
            await asyncio.gather(*starting)
        finally:
            for each in starting:
                each.cancel()
            await asyncio.gather(*starting, return_exceptions=True)

    def endpoints(self) -> dict[str, str]:
        """Of the first process as they are called there; of others what is their own, with their number."""
        first, *others = [child.endpoints for child in self.children]
        found = {name: address for name, address in first.items() if name != "metrics"}
        for number, endpoints in enumerate(others, 1):
            found |= {f"{name}-{number}": endpoints[name] for name in endpoints if name not in ("http", "metrics")}
        return found

    async def watch(self, stopping: asyncio.Event) -> None:
        """Until ``stopping``. Raises :class:`Unavailable` when a process dies again and again."""
        watching = [asyncio.ensure_future(self._keep(child)) for child in self.children]
        stop = asyncio.ensure_future(stopping.wait())
        try:
            await asyncio.wait([stop, *watching], return_when=asyncio.FIRST_COMPLETED)
        finally:
            given_up = [task for task in watching if task.done()]
            for task in (stop, *watching):
                task.cancel()
            await asyncio.gather(stop, *watching, return_exceptions=True)
        for task in given_up:
            task.result()

    async def _keep(self, child: Child) -> None:
        """Alive. Raises :class:`Unavailable`."""
        restarts = Restarts(time.monotonic(), self._quick_deaths_max)
        how, served = await self._end_of(child), True
        while True:
            pause_s = restarts.died(time.monotonic(), served)
            if pause_s is None:
                before = f"{self._quick_deaths_max} start{'' if self._quick_deaths_max == 1 else 's'}"
                raise Unavailable(f"{how}, as it had soon after {before} before: given up")
            _log.warning("%s: started again in %g s", how, pause_s)
            await asyncio.sleep(pause_s)
            self._restarts += 1
            restarts.started(time.monotonic())
            try:
                await child.start(self.start_s)
            except Unavailable as error:
                how, served = error.message, False
                continue
            _log.info("%s is back", child)
            how, served = await self._end_of(child), True

    async def _end_of(self, child: Child) -> str:
        who = str(child)
        asking = asyncio.ensure_future(self._kill_if_it_hangs(child))
        try:
            how = await child.ended()
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await asyncio.to_thread(self._forget, child)
        return f"{who} {how}"

    async def _kill_if_it_hangs(self, child: Child) -> None:
        """It keeps its part of the connections, and answers none."""
        missed = 0
        while missed < MISSED_MAX:
            await asyncio.sleep(self._ask_s)
            missed = child.ask()
        _log.error("%s hangs: not heard of for %g s, killed", child, MISSED_MAX * self._ask_s)
        child.kill()

    def _forget(self, child: Child) -> None:
        with self._lock:
            self._merged.ended(child.number)

    async def close(self) -> None:
        """SIGTERM to all, and SIGKILL to who has not ended when all of the time is over."""
        running = [child for child in self.children if child.alive]
        for child in running:
            child.signal(signal.SIGTERM)
        ends = [asyncio.ensure_future(child.ended()) for child in running]
        if not ends:
            return
        try:
            await asyncio.wait(ends, timeout=self._drain_s)
        finally:
            for child in running:
                if child.alive:
                    _log.error("%s has not ended within %g s: killed", child, self._drain_s)
                    child.kill()
        await asyncio.wait(ends, timeout=KILLED_S)

    # -- metrics, in a thread of whoever asks

    def describe(self) -> Iterator[Metric]:
        """Nothing: what there will be is for the processes to say."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            self._ask()
            families = [each for each in self._merged.families() if each.name != CERTIFICATE]
        alive = GaugeMetricFamily("pinyon_lb_processes", "Processes that serve")
        alive.add_metric([], sum([child.answers for child in self.children]))
        restarts = CounterMetricFamily("pinyon_lb_process_restarts", "Starts of processes in place of those that ended")
        restarts.add_metric([], self._restarts)
        return iter([alive, restarts, *families])

    def _ask(self) -> None:
        """All at once, but those that hang."""
        with ThreadPoolExecutor(len(self.children)) as pool:
            asked = [(child, pool.submit(child.metrics)) for child in self.children]
        for child, page in asked:
            try:
                self._merged.told(child.number, page.result())
            except (Unavailable, ValueError) as error:
                self._merged.silent(child.number)
                if child.endpoints:
                    _log.warning("%s", error)


async def run_processes(settings: LbSettings, context: ServiceContext, arguments: Sequence[str]) -> None:
    """Serve until told to stop. ``arguments`` are the command line."""
    tls = context.security.tls
    check_processes(settings, context.instance_id, "" if tls is None else tls.identity.instance_id)
    check_clients(load_api_keys(settings.api_keys_file).clients)
    held = HeldPort(settings.http_listen)
    try:
        family = Family(
            [
                Child(
                    number,
                    command_of([*arguments, *process_arguments(settings, context.instance_id, number, held.address)]),
                    partial(same_ports, settings),
                )
                for number in range(settings.processes)
            ],
            settings.lame_duck_s + settings.drain_s + FAREWELL_S,
        )
        context.registry.register(family)
        try:
            await _start(family, context.stopping)
            if not context.stopping.is_set():
                context.ready(family.endpoints())
                await family.watch(context.stopping)
        finally:
            await family.close()
    finally:
        held.close()


async def _start(family: Family, stopping: asyncio.Event) -> None:
    """Unless it is to stop before all serve."""
    starting = asyncio.ensure_future(family.start())
    stop = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait([starting, stop], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.cancel()
        if not starting.done():
            starting.cancel()
            with suppress(asyncio.CancelledError):
                await starting
    if not starting.cancelled():
        starting.result()
