"""The parent of several load balancers: holds their port, starts and keeps them, shows the metrics of all, and ends
them. It serves no request."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from launch.balancers.balancer import Balancer
from launch.balancers.held_port import HeldPort
from launch.balancers.merged import Merged
from launch.balancers.shares import check_processes, process_arguments
from launch.process import START_S, ServiceProcess, end_all
from launch.supervisor import LOOK_S, Supervisor
from pinyon.core.errors import Unavailable
from pinyon.frontdoor.auth import load_api_keys
from pinyon.runtime.logging import get_logger
from pinyon.runtime.service import ServiceContext, run_service
from services.lb.settings import LbSettings

FAREWELL_S: Final = 10.0
"""For a process to end beyond the times that it was given to drain; then it is killed."""
QUICK_DEATHS_MAX: Final = 4
CERTIFICATE: Final = "pinyon_certificate_not_after_seconds"
"""The parent shows its own, which is that of all."""

_log = get_logger("lb.processes")


class Group(Collector):
    """Load balancers: ``start`` → ``keep`` → ``close``. As a collector it is what all of them say."""

    def __init__(
        self,
        balancers: Sequence[Balancer],
        drain_s: float,
        start_s: float = START_S,
        quick_deaths_max: int = QUICK_DEATHS_MAX,
    ) -> None:
        """``drain_s`` is how long a process may take from SIGTERM to its end. After ``quick_deaths_max`` quick deaths
        of one in a row, one more ends all."""
        self.balancers = balancers
        self.services = {each.name: each for each in balancers}
        self.redis = None
        self.start_s = start_s
        """For a process to serve, from its start."""
        self._drain_s = drain_s
        self._quick_deaths_max = quick_deaths_max
        self._restarts = 0
        self._merged = Merged()
        self._merged_pids: dict[int, int] = {}
        self._lock = threading.Lock()
        """Whoever asks for metrics does so from a thread."""

    async def start(self, stopping: asyncio.Event) -> bool:
        """Returns when all serve, or it is to stop: whether they do. Raises :class:`Unavailable` if one does not; then
        some may run, see :meth:`close`."""
        deadline_s = time.monotonic() + self.start_s
        for each in self.balancers:
            try:
                each.spawn()
            except OSError as error:
                raise Unavailable(f"{each} cannot be started: {error}") from None
        waiting = list(self.balancers)
        while waiting := [each for each in waiting if not each.announced(0)]:
            if time.monotonic() >= deadline_s:
                raise Unavailable(f"{waiting[0]} was not ready within {self.start_s:g} s")
            if await _is_set(stopping, LOOK_S / 4):
                return False
        return True

    def endpoints(self) -> dict[str, str]:
        """Of the first process as they are called there; of others what is their own, with their number."""
        first, *others = [each.endpoints for each in self.balancers]
        found = {name: address for name, address in first.items() if name != "metrics"}
        for number, endpoints in enumerate(others, 1):
            found |= {f"{name}-{number}": endpoints[name] for name in endpoints if name not in ("http", "metrics")}
        return found

    async def keep(self, stopping: asyncio.Event) -> None:
        """Until ``stopping``. Raises :class:`Unavailable` when a process dies again and again."""
        supervisor = Supervisor(
            self, _log.warning, stopping.is_set, time.monotonic(), self.start_s, self._quick_deaths_max
        )
        while not await _is_set(stopping, LOOK_S):
            supervisor.tick(time.monotonic())
            if supervisor.given_up:
                raise Unavailable(supervisor.given_up[0])

    def restart(self, name: str, wait: bool = False) -> ServiceProcess:
        """For the supervisor. Where it served is known to others, so that is where it does."""
        self._restarts += 1
        balancer = self.services[name]
        balancer.start_again(self.start_s if wait else None)
        return balancer

    async def close(self) -> None:
        """SIGTERM to all, and SIGKILL to who has not ended when all of the time is over."""
        for each in await asyncio.to_thread(end_all, self.balancers, self._drain_s):
            _log.error("%s had not ended within %g s: killed", each, self._drain_s)
        for each in self.balancers:
            each.close()

    # -- metrics, in a thread of whoever asks

    def describe(self) -> Iterator[Metric]:
        """Nothing: what there will be is for the processes to say."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            self._ask()
            families = [each for each in self._merged.families() if each.name != CERTIFICATE]
        alive = GaugeMetricFamily("pinyon_lb_processes", "Processes that serve")
        alive.add_metric([], sum([each.answers for each in self.balancers]))
        restarts = CounterMetricFamily("pinyon_lb_process_restarts", "Starts of processes in place of those that ended")
        restarts.add_metric([], self._restarts)
        return iter([alive, restarts, *families])

    def _ask(self) -> None:
        """All at once, but those that hang."""
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
    """Waits so long for that."""
    try:
        async with asyncio.timeout(within_s):
            return await event.wait()
    except TimeoutError:
        return False


async def _serve(settings: LbSettings, context: ServiceContext, arguments: Sequence[str]) -> None:
    tls = context.security.tls
    check_processes(settings, context.instance_id, "" if tls is None else tls.identity.instance_id)
    load_api_keys(settings.api_keys_file, shared=True)
    with closing(HeldPort(settings.http_listen)) as held:
        group = Group(
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
    """Serve until told to stop. ``arguments`` are the command line."""
    # Of their parent there is nothing to show: what metrics there are is for its processes to say.
    run_service(settings, partial(_serve, arguments=arguments), CollectorRegistry)
