"""The state of the paths to one peer, and the choice of a path for the next chain (Mooncake §3.2.3). Pure.

Preferred paths come first, weighted by measured rate and queue. A failed path is avoided with growing pauses until a
probe or a transfer succeeds on it. The caller serialises the calls; ``now`` is monotonic seconds."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from pinyon.transfer.types.nic import Path, Tiers

PAUSE_MIN_S = 0.1
PAUSE_MAX_S = 30.0
PAUSE_GROWTH = 2.0
"""Each failure in a row makes the pause longer by this factor."""
PAUSE_JITTER = 0.2
"""Largest random share by which a pause is shortened: paths that failed together must not come back together."""
MAX_PATHS = 1024
"""Paths that are remembered; those that carry chains are never forgotten."""
_PRIOR_RATES = {"local": 8e9, "shm": 8e9, "rdma": 1e10, "tcp": 2e9}
"""Assumed bytes per second of each transport until something is measured; 1e9 for others."""
_SAMPLE_BYTES = 256 << 10
"""The smallest chain that is measured: smaller ones say more about latency than about the rate."""
_RATE_WEIGHT = 0.2
"""The weight of a new sample in the moving average."""
_RATE_STEP = 4.0
"""A sample counts for at most this many times more or less than the average, once that is settled."""
_SETTLED_SAMPLES = 8
"""The number of samples after which an average is settled."""
_TIE = 0.1
"""Paths whose estimates are this close take turns."""


class PathState(NamedTuple):
    """A path as an operator sees it."""

    path: Path
    usable: bool
    queued_bytes: int
    """Bytes given to the path that are not finished."""
    rate: float
    """Bytes per second; the transport's average while the path itself was not measured."""
    failures: int
    """Failures in a row."""
    pause_ends: float
    """The time from which an avoided path may be tried; ``-inf`` if the path is not avoided."""


@dataclass(slots=True, eq=False)
class _Rate:
    """A moving average of a rate that begins at a prior."""

    bytes_s: float
    samples: int = 0

    def add(self, sample: float) -> None:
        if self.samples >= _SETTLED_SAMPLES:
            # One hiccup, or one burst of late completions, must not decide where the next thousand chains go.
            sample = min(max(sample, self.bytes_s / _RATE_STEP), self.bytes_s * _RATE_STEP)
        weight = max(_RATE_WEIGHT, 1 / (self.samples + 2))
        self.bytes_s += weight * (sample - self.bytes_s)
        self.samples += 1


@dataclass(slots=True, eq=False)
class _Record:
    path: Path
    transport: _Rate
    rate: _Rate
    """The path's own rate once it is measured, until then the transport's."""
    down: bool
    usable: bool
    avoided: bool = False
    queued: int = 0
    chains: int = 0
    turn: int = 0
    """The turn in which the path was chosen last."""
    failures: int = 0
    pause_s: float = 0.0
    pause_ends: float = -inf
    failed_at: float = -inf
    """The time of the last failure: a chain that began before it says nothing new when it ends."""
    probing: bool = False
    probe_began: float = -inf
    busy_until: float = -inf
    busy_bytes: int = 0
    """Bytes completed since the last sample."""
    busy_s: float = 0.0
    """Time since the last sample in which the path carried something."""
    longest_s: float = 0.0
    """The longest time that a chain took since the last sample."""

    def set_state(self, *, avoided: bool, down: bool) -> None:
        self.avoided = avoided
        self.down = down
        self.usable = not avoided and not down
        if not avoided:
            self.pause_ends = -inf


class PathBoard:
    """The paths to one peer. Exactly one of ``completed``, ``aborted`` and ``failed`` follows each ``started``."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._records: dict[Path, _Record] = {}
        self._transports: dict[str, _Rate] = {}
        self._down: set[str] = set()
        self._turns = 0

    # ------------------------------------------------------------ choosing a path

    def choose(self, tiers: Tiers, nbytes: int) -> Path | None:
        """Returns the path for a chain of ``nbytes``, or None if none is usable.

        It is the one with the least estimated finish time in the first tier that has a usable path; ties take turns."""
        records = self._records
        usable: list[_Record] = []
        for tier in tiers:
            usable = [record for path in tier if (record := records.get(path) or self._record(path)).usable]
            if usable:
                break
        if not usable:
            return None
        chosen = usable[0] if len(usable) == 1 else self._quickest(usable, nbytes)
        self._turns += 1
        chosen.turn = self._turns
        return chosen.path

    def choose_any(self, tiers: Tiers, nbytes: int, now: float) -> Path | None:
        """Chooses like ``choose``, but if nothing is usable, takes the avoided path whose pause ends first.

        So a new request is tried, not refused. None means that there is no path."""
        chosen = self.choose(tiers, nbytes)
        if chosen is not None:
            return chosen
        records = [self._record(path) for tier in tiers for path in tier]
        if not records:
            return None
        least = min(records, key=lambda one: (one.down, max(now, one.pause_ends), one.queued, one.turn))
        self._turns += 1
        least.turn = self._turns
        return least.path

    def _quickest(self, usable: list[_Record], nbytes: int) -> _Record:
        """Returns the path with the least finish time, (queued + new bytes) / rate; close ones take turns."""
        estimates = [(record.queued + nbytes) / record.rate.bytes_s for record in usable]
        limit = min(estimates) * (1 + _TIE)
        close = (record for record, estimate in zip(usable, estimates, strict=True) if estimate <= limit)
        return min(close, key=lambda record: record.turn)

    # ------------------------------------------------------------ chains and their outcomes

    def started(self, path: Path, nbytes: int) -> None:
        """Notes that a chain was given to the path."""
        record = self._record(path)
        record.queued += nbytes
        record.chains += 1

    def completed(self, path: Path, nbytes: int, ran_s: float, now: float) -> None:
        """Takes back a completed chain. ``ran_s`` counts since its transport began, without the path's queue."""
        record = self._ended(path, nbytes)
        if now - ran_s >= record.failed_at:
            record.failures = 0
            record.pause_s = 0.0
            if record.avoided:
                record.set_state(avoided=False, down=record.down)
        if nbytes >= _SAMPLE_BYTES:
            self._measure(record, nbytes, ran_s, now)

    def _measure(self, record: _Record, nbytes: int, ran_s: float, now: float) -> None:
        """Measures the path's rate: bytes per time in which it carried something, however many chains shared it.

        One sample spans at least the longest of its chains: several that end together would else count as a burst."""
        record.busy_bytes += nbytes
        record.longest_s = max(record.longest_s, ran_s)
        if now > record.busy_until:
            record.busy_s += now - max(now - ran_s, record.busy_until)
            record.busy_until = now
        if record.busy_s <= 0 or record.busy_s < 0.9 * record.longest_s:  # 0.9: the two differ by rounding
            return
        sample = record.busy_bytes / record.busy_s
        record.busy_bytes = 0
        record.busy_s = record.longest_s = 0.0
        if record.rate is record.transport:
            record.rate = _Rate(record.transport.bytes_s)
        record.rate.add(sample)
        record.transport.add(sample)

    def aborted(self, path: Path, nbytes: int) -> None:
        """Takes back a chain that was cancelled, or failed for a reason that is not the path's: no verdict."""
        self._ended(path, nbytes)

    def failed(self, path: Path, nbytes: int, held_s: float, now: float) -> float:
        """Takes back a chain that the path failed, and avoids the path; returns the seconds until it may be tried.

        ``held_s`` is the time since ``started``. Chains that the path held when it failed before count with that."""
        record = self._ended(path, nbytes)
        self._fail(record, now - held_s, now)
        return max(0.0, record.pause_ends - now)

    def _ended(self, path: Path, nbytes: int) -> _Record:
        record = self._records.get(path)
        if record is None or not record.chains or nbytes > record.queued:
            raise ValueError(f"no such chain was started on {path}")
        record.queued -= nbytes
        record.chains -= 1
        return record

    def _fail(self, record: _Record, began: float, now: float) -> None:
        if began < record.failed_at:
            return
        record.failures += 1
        record.failed_at = now
        record.pause_s = min(PAUSE_MAX_S, max(PAUSE_MIN_S, record.pause_s * PAUSE_GROWTH))
        record.pause_ends = now + record.pause_s * (1 - PAUSE_JITTER * self._rng.random())
        record.set_state(avoided=True, down=record.down)

    # ------------------------------------------------------------ recovery

    def usable(self, path: Path) -> bool:
        """Returns whether the path is neither avoided nor over a NIC that is down."""
        record = self._records.get(path)
        return path.local_nic not in self._down if record is None else record.usable

    def begin_probes(self, now: float, most: int) -> list[Path]:
        """Returns up to ``most`` avoided paths to probe; ``probe_failed`` or ``recovered`` follows for each.

        Their pause is over, the NIC is up and no probe was under way."""
        due = [
            record
            for record in self._records.values()
            if record.avoided and not record.down and not record.probing and record.pause_ends <= now
        ][:most]
        for record in due:
            record.probing, record.probe_began = True, now
        return [record.path for record in due]

    def probe_failed(self, path: Path, now: float) -> None:
        """Makes the pause longer, unless a chain has succeeded meanwhile."""
        record = self._record(path)
        record.probing = False
        if record.avoided:
            self._fail(record, record.probe_began, now)

    def recovered(self, path: Path) -> None:
        """Makes a path usable because a probe succeeded.

        The next pause still grows until a chain completes, because some paths answer small messages only."""
        record = self._record(path)
        record.probing = False
        record.set_state(avoided=False, down=record.down)

    def nic_down(self, name: str) -> None:
        """Makes the paths over this local NIC unusable, because the link monitor saw it go down."""
        self._down.add(name)
        for record in self._records.values():
            if record.path.local_nic == name:
                record.set_state(avoided=record.avoided, down=True)

    def nic_up(self, name: str, now: float) -> None:
        """Makes the paths of a NIC that is back due for a probe at once. Does nothing if the NIC was not down."""
        if name not in self._down:
            return
        self._down.remove(name)
        for record in self._records.values():
            if record.path.local_nic == name:
                record.failed_at = record.pause_ends = now
                record.set_state(avoided=True, down=False)

    # ------------------------------------------------------------ books

    def snapshot(self) -> list[PathState]:
        return [
            PathState(one.path, one.usable, one.queued, one.rate.bytes_s, one.failures, one.pause_ends)
            for one in self._records.values()
        ]

    def _record(self, path: Path) -> _Record:
        record = self._records.get(path)
        if record is None:
            if len(self._records) >= MAX_PATHS:
                self._forget_one()
            transport = self._transports.get(path.transport)
            if transport is None:
                transport = self._transports[path.transport] = _Rate(_PRIOR_RATES.get(path.transport, 1e9))
            down = path.local_nic in self._down
            record = self._records[path] = _Record(path, transport, transport, down, not down)
        return record

    def _forget_one(self) -> None:
        """Forgets the path not chosen for longest that carries nothing; an avoided one only if there is no other."""
        quiet = [one for one in self._records.values() if not one.chains and not one.probing]
        if quiet:
            del self._records[min(quiet, key=lambda one: (one.avoided, one.turn)).path]
