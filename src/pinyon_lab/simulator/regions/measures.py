"""The measures of a run of several regions, in a window of closed-loop time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pinyon_lab.simulator.regions.calls import CallOutcome
from pinyon_lab.simulator.regions.world import RegionsWorld

SAMPLE_S = 1.0


class Spread(NamedTuple):
    """The spread of times in seconds, as in the box plots of SkyWalker's Fig. 8."""

    p10: float
    p25: float
    p50: float
    p75: float
    p90: float
    mean: float


class Measured(NamedTuple):
    """The measures of the requests that ended in the window; shares are from 0 to 1."""

    requests: int
    requests_per_s: float
    output_tokens_per_s: float
    ttft: Spread
    e2e: Spread
    hits: float
    """The hit ratio by prompt tokens, at the first instance of each request."""
    forwarded: float
    """The share of requests that went to another region."""
    used: float
    """The share of all instances' KV memory that requests hold, in the mean over time."""
    uneven: float
    """The ratio of requests at the busiest instance to those at the idlest, each in the mean over time."""
    waiting: float
    """The requests at all instances that wait for KV blocks, in the mean over time."""
    waiting_max: int
    """The largest number of such requests at one instance."""
    queued: float
    """The requests in load balancers' queues, in the mean over time."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the measures as a row: each time under a name of its own."""
        flat = self._asdict()
        for name in ("ttft", "e2e"):
            flat |= {f"{name}_{key}_s": value for key, value in flat.pop(name)._asdict().items()}
        return flat


class Samples:
    """The samples of a run, taken every second from ``warm_s`` on."""

    def __init__(self, world: RegionsWorld, warm_s: float) -> None:
        self._world = world
        self.outstanding: list[tuple[int, ...]] = []
        """The requests at each instance, in order of the instances' names."""
        self.used: list[tuple[float, ...]] = []
        """The used share of each instance's KV memory."""
        self.waiting: list[tuple[int, ...]] = []
        self.queued: list[int] = []
        world.time.at(warm_s, self._take)

    def _take(self) -> None:
        world = self._world
        if world.over:
            return
        instances, names = world.instances, sorted(world.home)
        self.outstanding.append(tuple([instances.outstanding(name) for name in names]))
        self.used.append(tuple([instances.used(name) for name in names]))
        self.waiting.append(tuple([instances.waiting(name) for name in names]))
        self.queued.append(sum([door.queued for door in world.doors.values()]))
        world.time.after(SAMPLE_S, self._take)


def measured(world: RegionsWorld, samples: Samples, warm_s: float, until_s: float, region: str = "") -> Measured:
    """Returns the measures of requests from the clients of ``region`` ("": all regions), and of all instances. Raises
    ``ValueError`` if no request ended in the window."""
    served = [
        each
        for each in world.served
        if warm_s <= each.sent_s + each.e2e_s <= until_s and each.ttft_s >= 0 and region in ("", each.region)
    ]
    if not served:
        raise ValueError("no request has ended in the window")
    seconds = until_s - warm_s
    prompts = sum([each.tokens for each in served])
    return Measured(
        len(served),
        len(served) / seconds,
        sum([each.output_tokens for each in served]) / seconds,
        spread(served, lambda each: each.ttft_s),
        spread(served, lambda each: each.e2e_s),
        sum([each.hit_tokens for each in served]) / prompts,
        sum([each.forwarded for each in served]) / len(served),
        _mean([_mean(each) for each in samples.used]),
        _uneven(samples.outstanding),
        _mean([sum(each) for each in samples.waiting]),
        max([max(each) for each in samples.waiting], default=0),
        _mean(samples.queued),
    )


def spread(served: Sequence[CallOutcome], value: Callable[[CallOutcome], float]) -> Spread:
    """Returns the spread of a value over requests, of which there is at least one."""
    values = sorted([value(each) for each in served])
    return Spread._make([*[values[len(values) * percent // 100] for percent in (10, 25, 50, 75, 90)], _mean(values)])


def _uneven(outstanding: Sequence[Sequence[int]]) -> float:
    """Returns the ratio of the busiest to the idlest instance, whose mean counts as at least 0.01 requests."""
    means = [_mean(each) for each in zip(*outstanding, strict=True)]
    return max(means) / max(0.01, min(means)) if means else 1.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
