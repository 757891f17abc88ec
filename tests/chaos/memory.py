"""The memory that processes hold, and whether it grows: resident sets from ``/proc``, and a line fitted to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, linear_regression

import psutil

PER_REQUESTS = 10_000
GROWTH_MAX = 0.01
"""The share of its resident set by which a warm process may grow in :data:`PER_REQUESTS` requests."""
WARM_SHARE = 0.25
"""The share of the run whose allocations, caches and filling do not count."""


_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def held_bytes(pid: int) -> dict[str, int]:
    """Returns the kernel's ``smaps_rollup`` of a process, in bytes. Raises OSError when the process has ended.

    The added ``asked_huge`` counts huge pages that the process asked for: tables use them and take 2 MiB more whenever
    they grow a little."""
    held = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, value = line.partition(":")
        held[name] = int(value.split()[0]) * 1024
    if not held:
        raise OSError(f"process {pid} has no resident set")
    only_who_asks = _HUGE_PAGES.exists() and "[madvise]" in _HUGE_PAGES.read_text()
    return held | {"asked_huge": held["AnonHugePages"] if only_who_asks else 0}


def resident_bytes(pid: int) -> int:
    """Returns the resident set less the huge pages that were asked for. Raises OSError when the process has ended."""
    held = held_bytes(pid)
    return held["Rss"] - held["asked_huge"]


@dataclass(frozen=True)
class Growth:
    """The growth of one process. ``per_10k`` is a share of its resident set after the warm-up."""

    name: str
    warm_bytes: int
    last_bytes: int
    bytes_per_request: float
    per_10k: float
    files: tuple[int, int]
    """Open files after the warm-up and at the end."""

    @property
    def good(self) -> bool:
        return self.per_10k <= GROWTH_MAX

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "good": self.good}


def growth(name: str, requests: Sequence[int], resident: Sequence[int], files: Sequence[int] = ()) -> Growth:
    """Fits a least-squares line through ``resident`` bytes over ``requests`` served, without the first quarter."""
    warm = next(place for place, count in enumerate(requests) if count >= WARM_SHARE * requests[-1])
    xs, ys = requests[warm:], resident[warm:]
    if len(xs) < 3:
        raise ValueError(f"{len(xs)} samples after the warm-up are no line")
    slope = linear_regression(xs, ys).slope
    counts = (files[warm], files[-1]) if files else (0, 0)
    return Growth(name, ys[0], ys[-1], slope, slope * PER_REQUESTS / fmean(ys), counts)


class Samples:
    """Resident sets and open files of named processes, sampled while requests are served."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self.requests: list[int] = []
        self.resident: dict[str, list[int]] = {name: [] for name in pids}
        self.files: dict[str, list[int]] = {name: [] for name in pids}

    def take(self, requests: int) -> None:
        """Takes a sample after so many ``requests``."""
        self.requests.append(requests)
        for name, pid in self._pids.items():
            self.resident[name].append(resident_bytes(pid))
            self.files[name].append(psutil.Process(pid).num_fds())

    def growths(self) -> list[Growth]:
        return [growth(name, self.requests, self.resident[name], self.files[name]) for name in self._pids]
