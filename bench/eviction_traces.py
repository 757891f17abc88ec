"""The traces that eviction is measured on: generated ones, and public ones that do not come with pinyon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from pinyon_lab.caches.replay import CacheRequest
from pinyon_lab.papers import Workload
from pinyon_lab.traces import FORMATS, TraceFile
from pinyon_lab.traces.generate import generate, profile

SUFFIXES = (".jsonl.gz", ".jsonl")
WHOLE = "whole"
SECOND_HALF = "second half"


@dataclass(frozen=True)
class Generated:
    """A profile's requests by a seed; ``free`` has values of its free parameters."""

    profile: str
    seed: int
    free: tuple[tuple[str, float], ...] = ()
    users_share: float = 1.0
    """The share of users: each is as active as ever, so times between turns stay and requests per second fall alike."""
    duration_s: float = 0.0
    """The seconds of the trace; 0 means the profile's."""

    @property
    def name(self) -> str:
        parts = [self.profile, f"seed {self.seed}", *(f"{key} {value:g}" for key, value in self.free)]
        if self.users_share != 1:
            parts.append(f"{self.users_share:g} of the users")
        if self.duration_s:
            parts.append(f"{self.duration_s / 60:g} min")
        return ", ".join(parts)

    def workload(self) -> Workload:
        made = profile(self.profile, **dict(self.free))
        users = replace(made.users, number=max(1, round(made.users.number * self.users_share)))
        made = replace(made, users=users, per_s=made.per_s * self.users_share)
        made = replace(made, duration_s=self.duration_s or made.duration_s)
        rows = list(generate(made, self.seed))
        return Workload(self.name, rows, FORMATS[made.format].block_tokens, generated=True)


@dataclass(frozen=True)
class Public:
    """A file in ``folder``; ``stem`` is its name without one of :data:`SUFFIXES`."""

    stem: str
    folder: Path

    @property
    def name(self) -> str:
        return self.stem

    @property
    def missing(self) -> str:
        """The reason why there is no file; empty if there is one."""
        return "" if self._found() else f"no {self.stem}.jsonl[.gz] in {self.folder}"

    def _found(self) -> Path | None:
        candidates = (self.folder / f"{self.stem}{suffix}" for suffix in SUFFIXES)
        return next((path for path in candidates if path.is_file()), None)

    def workload(self) -> Workload:
        """Returns the file's requests. Raises :class:`pinyon.core.errors.PinyonError` if it cannot be read."""
        found = self._found()
        trace = TraceFile(found or self.folder / f"{self.stem}{SUFFIXES[0]}")
        return Workload(self.stem, trace.sorted_rows(), trace.format.block_tokens)


Trace = Generated | Public


@lru_cache(maxsize=1)
def requests_of(trace: Trace) -> Sequence[CacheRequest]:
    """Returns a trace's requests; the last trace's are kept, as a process measures it at several capacities."""
    return trace.workload().asked()


def part_of(requests: Sequence[CacheRequest], part: str) -> Sequence[CacheRequest]:
    """Returns ``WHOLE`` or ``SECOND_HALF``, which a policy that was tuned on the first half has not seen."""
    return requests[(len(requests) + 1) // 2 :] if part == SECOND_HALF else requests
