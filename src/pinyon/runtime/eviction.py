"""Eviction in a service: its metrics, and the thread in which its policies learn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pinyon.eviction.evictor import Evictor
from pinyon.eviction.fit import Fit
from pinyon.runtime.logging import get_logger

CATEGORIES_MAX = 32
"""The number of series by category, which is limited since clients name kinds and turns."""
OTHER = "other"


def show_eviction(registry: CollectorRegistry, service: str, things: str, evictor: Evictor[Any]) -> None:
    """Adds the metrics to the registry as ``pinyon_<service>_...``; ``things`` names what is evicted there."""
    registry.register(_Eviction(f"pinyon_{service}", things, evictor))


class _Eviction(Collector):
    """Figures read by the metrics server's thread; each is a number or a mapping that is never changed."""

    def __init__(self, prefix: str, things: str, evictor: Evictor[Any]) -> None:
        self._prefix = prefix
        self._things = things
        self._evictor = evictor

    def collect(self) -> Iterator[Metric]:
        prefix, things, evictor = self._prefix, self._things, self._evictor
        regrets = evictor.regrets
        yield CounterMetricFamily(f"{prefix}_evicted_{things}", f"{things.title()} evicted.", value=evictor.evicted)
        text = f"{things.title()} that came back before as many had been evicted after them as are held."
        yield CounterMetricFamily(f"{prefix}_regretted_{things}", text, value=regrets.keys)
        text = "Seconds between their eviction and their coming back, together."
        yield CounterMetricFamily(f"{prefix}_regretted_seconds", text, value=regrets.seconds)
        share = GaugeMetricFamily(
            f"{prefix}_eviction_reuse_share",
            f"Share of {things} that are used again, as the eviction policy believes, by category of request.",
            labels=("category",),
        )
        mean_s = GaugeMetricFamily(
            f"{prefix}_eviction_reuse_mean_seconds", "Mean time until then, as it believes.", labels=("category",)
        )
        for category, belief in shown(evictor.beliefs()).items():
            share.add_metric((category,), belief.share)
            mean_s.add_metric((category,), belief.mean_s)
        yield from (share, mean_s)


def shown(beliefs: Mapping[str, Fit]) -> dict[str, Fit]:
    """Returns the beliefs with the largest shares, and the mean of the rest."""
    order = sorted(beliefs.items(), key=lambda each: (-each[1].share, each[0]))
    if len(order) <= CATEGORIES_MAX:
        return dict(order)
    kept, rest = order[: CATEGORIES_MAX - 1], [belief for _, belief in order[CATEGORIES_MAX - 1 :]]
    share, mean_s = (sum(values) / len(rest) for values in zip(*rest, strict=True))
    return {**dict(kept), OTHER: Fit(share, mean_s)}


CLOSE_S = 5.0

_log = get_logger("refit")


class RefitThread:
    """A :data:`pinyon.eviction.interface.Refit` of an event loop, which adopts the results.

    Work that comes while the work of all ``policies`` is under way is dropped, as newer work comes soon."""

    def __init__(self, policies: int = 1) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="refit")
        self._policies = policies
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def __call__(self, work: Callable[[], Any], adopt: Callable[[Any], object]) -> None:
        if len(self._tasks) < self._policies and not self._closed:
            task = asyncio.get_running_loop().create_task(self._run(work, adopt), name="refit")
            self._tasks.add(task)

    async def _run(self, work: Callable[[], Any], adopt: Callable[[Any], object]) -> None:
        try:
            fit = await asyncio.get_running_loop().run_in_executor(self._executor, work)
            if not self._closed:
                adopt(fit)
        except Exception:  # a bug; the policy goes on with what it knew
            _log.exception("a refit failed")
        finally:
            self._tasks.difference_update((asyncio.current_task(),))

    async def close(self) -> None:
        """Ends the adoption of results, and waits for running work, up to a limit."""
        self._closed = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        self._executor.shutdown(wait=False, cancel_futures=True)
