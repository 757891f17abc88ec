"""The share of the machine that other processes took during a measurement, which then distorts its times."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence

import psutil

LOOK_S = 3.0


class Contention:
    """The contention since its construction. ``pids`` are this process's running children; ended ones count anyway."""

    def __init__(self, pids: Callable[[], Sequence[int]]) -> None:
        self._pids = pids
        self._begun = self._now()

    def share(self) -> float:
        """Returns the share (0 to 1) of processor time since then that neither this process nor its children used."""
        begun, now = self._begun, self._now()
        wall_s, busy_s, own_s = (after - before for before, after in zip(begun, now, strict=True))
        return max(0.0, busy_s - own_s) / (wall_s * len(os.sched_getaffinity(0)) or 1.0)

    def _now(self) -> tuple[float, float, float]:
        """Returns seconds of wall time, of all processors' busy time, and of our own processor time."""
        busy, own_s = psutil.cpu_times(), sum(os.times()[:4])
        for pid in self._pids():
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended, so our children's time has its own from now on
                own_s += sum(psutil.Process(pid).cpu_times()[:2])
        return time.monotonic(), busy.user + busy.nice + busy.system + busy.irq + busy.softirq, own_s


async def quiet(share: float, pids: Callable[[], Sequence[int]], timeout_s: float) -> bool:
    """Waits until others take no more than ``share`` of the machine; returns whether that came in time."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        contention = Contention(pids)
        await asyncio.sleep(LOOK_S)
        if contention.share() <= share:
            return True
        if time.monotonic() >= deadline_s:
            return False
