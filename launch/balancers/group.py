"""The parent of several load balancers: holds their port, runs them, shows their metrics. It serves no request."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from launch.balancers.balancer import Balancer
from launch.balancers.merged import Merged
from launch.balancers.shares import check_processes, process_arguments
from launch.ports import HeldPort
from launch.process import end_all
from launch.supervisor import LOOK_S, Supervisor
from pinyon.core.errors import Unavailable
from pinyon.frontdoor.auth import load_api_keys
from pinyon.runtime.logging import get_logger
from pinyon.runtime.service import ServiceContext, run_service
from services.lb.settings import LbSettings

FAREWELL_S: Final = 10.0
"""The time to end that a process gets beyond its draining times; then it is killed."""
CERTIFICATE: Final = "pinyon_certificate_not_after_seconds"
"""The metric of which only the parent's own value is shown, as it is the same for all processes."""

_log = get_logger("lb.processes")


class BalancerGroup(Collector):
    """The load balancer processes: ``start`` → ``keep`` → ``close``. As a collector it yields the metrics of all."""

    def __init__(self, balancers: Sequence[Balancer], drain_s: float) -> None:
        """Takes ``drain_s``, the time that a process may take from SIGTERM to its end.

        A process that its supervisor gives up ends the group."""
        self.balancers = balancers
        self._drain_s = drain_s
        self._merged = Merged()
        self._merged_pids: dict[int, int] = {}
        self._lock = threading.Lock()
        """A lock for collecting metrics, which happens in threads of the callers."""

    async def start(self, stopping: asyncio.Event) -> bool:
        """Starts all processes; returns True when all serve, or False if ``stopping`` is set first.

        Raises :class:`Unavailable` if a process does not serve; others may still run then, see :meth:`close`."""
        started_s = time.monotonic()
        for each in self.balancers:
            try:
                each.spawn()
            except OSError as error:
                raise Unavailable(f"{each} cannot be started: {error}") from None
        waiting = list(self.balancers)
        while waiting := [each for each in waiting if not each.announced()]:
            if time.monotonic() >= started_s + waiting[0].start_s:
                raise Unavailable(f"{waiting[0]} was not ready within {waiting[0].start_s:g} s")
            if await _is_set(stopping, LOOK_S / 4):
                return False
        return True

    def endpoints(self) -> dict[str, str]:
        """Returns the first process's endpoints under their names, and the others' own endpoints with their number."""
        first, *others = [each.endpoints for each in self.balancers]
        found = {name: address for name, address in first.items() if name != "metrics"}
        for number, endpoints in enumerate(others, 1):
            found |= {f"{name}-{number}": endpoints[name] for name in endpoints if name not in ("http", "metrics")}
        return found

    async def keep(self, stopping: asyncio.Event) -> None:
        """Restarts processes until ``stopping`` is set. Raises :class:`Unavailable` when one dies again and again."""
        supervisor = Supervisor(self.balancers, _log.warning, time.monotonic())
        while not await _is_set(stopping, LOOK_S):
            supervisor.tick(time.monotonic())
            if supervisor.given_up:
                raise Unavailable(supervisor.given_up[0])

    async def close(self) -> None:
        """Sends SIGTERM to all, and SIGKILL to those that have not ended within the draining time."""
        for each in await asyncio.to_thread(end_all, self.balancers, self._drain_s):
            _log.error("%s had not ended within %g s: killed", each, self._drain_s)
        for each in self.balancers:
            each.close()

    # -- metrics, in a thread of the caller

    def describe(self) -> Iterator[Metric]:
        """Yields nothing, because only the processes know which metrics there will be."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            self._ask()
            families = [each for each in self._merged.families() if each.name != CERTIFICATE]
        alive = GaugeMetricFamily("pinyon_lb_processes", "Processes that serve")
        alive.add_metric([], sum([each.answers for each in self.balancers]))
        restarts = CounterMetricFamily("pinyon_lb_process_restarts", "Starts of processes in place of those that ended")
        restarts.add_metric([], sum([each.restarts for each in self.balancers]))
        return iter([alive, restarts, *families])

    def _ask(self) -> None:
        """Fetches the metrics of all processes at the same time, except those that hang."""
        with ThreadPoolExecutor(len(self.balancers)) as pool:
            started = [each for each in self.balancers if each.process is not None]
            asked = [(each, each.pid, pool.submit(each.metrics)) for each in started]
        for each, pid, page in asked:
            if pid != self._merged_pids.setdefault(each.number, pid):
                self._merged.ended(each.number)
                self._merged_pids[each.number] = pid
            try:
                text = page.result()
                if each.pid != pid:
                    raise Unavailable(f"{each} is another one by now")
                self._merged.told(each.number, text)
            except (Unavailable, ValueError) as error:
                self._merged.silent(each.number)
                if each.serving:
                    _log.warning("%s", error)


async def _is_set(event: asyncio.Event, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            return await event.wait()
    except TimeoutError:
        return False


async def _serve(settings: LbSettings, context: ServiceContext, arguments: Sequence[str]) -> None:
    tls = context.security.tls
    check_processes(settings, context.instance_id, "" if tls is None else tls.material.identity.instance_id)
    load_api_keys(settings.api_keys_file, shared=True)
    with HeldPort(settings.http_listen) as held:
        group = BalancerGroup(
            [
                Balancer(number, [*arguments, *process_arguments(settings, context.instance_id, number, held.address)])
                for number in range(settings.processes)
            ],
            settings.lame_duck_s + settings.drain_s + FAREWELL_S,
        )
        context.registry.register(group)
        try:
            if await group.start(context.stopping):
                context.ready(group.endpoints())
                await group.keep(context.stopping)
        finally:
            await group.close()


def run(settings: LbSettings, arguments: Sequence[str]) -> None:
    """Serves until told to stop; ``arguments`` are the command line."""
    # The parent's default metrics are not shown: metrics come from its processes.
    run_service(settings, partial(_serve, arguments=arguments), CollectorRegistry)
