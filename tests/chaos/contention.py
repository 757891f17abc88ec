"""The share of the machine that other processes took during a measurement, which then distorts its times."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path

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
        tick = os.sysconf("SC_CLK_TCK")
        user, nice, system, _, _, irq, softirq, *_ = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        own_s = 0.0
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
            usage = resource.getrusage(who)
            own_s += usage.ru_utime + usage.ru_stime
        for pid in self._pids():
            try:
                times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended, so RUSAGE_CHILDREN includes it from now on
                continue
            own_s += (int(times[11]) + int(times[12])) / tick
        return time.monotonic(), sum(map(int, (user, nice, system, irq, softirq))) / tick, own_s


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
