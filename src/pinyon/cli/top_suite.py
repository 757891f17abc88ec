"""The view of one suite in ``pinyon top``, as lines of text. Pure: samples and the terminal's size in, lines out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample as MetricSample
from rich.text import Text

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.cli.top_frame import NOTHING, Column, fit, table
from pinyon.core.errors import Unavailable
from pinyon.core.request import Role
from pinyon.messages.enums import role_from_proto

TTFT, TBT = "pinyon_lb_ttft_seconds", "pinyon_lb_tbt_seconds"
REQUESTS = "requests_total"
PERCENTS = (50, 90, 99)
WELL = ("stop", "length", "answered", "cancelled")
"""The ends of requests that did not fail; every other end is a failure."""
BOUND_CHARS = 64
"""The characters of an invalid bucket bound that a message shows."""
LAST_S = 60.0
"""The seconds that the middle row covers at most."""

ORDER: dict[Role | None, int] = {Role.PREFILL: 0, Role.MIXED: 1, Role.DECODE: 2, Role.STORE: 3}

RATES = (
    *(Column("", least=11), Column("TOKENS/s", True), Column("PROMPT/s", True), Column("REQUESTS/s", True)),
    *(Column("FAILED/s", True), Column("HITS", True)),
)
TIMES = (
    *(Column("", least=11), Column("TTFT P50", True), Column("P90", True, 7), Column("P99", True, 7)),
    *(Column("TBT P50", True), Column("P90", True, 7), Column("P99", True, 7)),
)
INSTANCES = (
    *(Column("INSTANCE"), Column("ROLE"), Column("PENDING", True), Column("RUNNING", True)),
    *(
        Column("TOKENS/s", True),
        Column("TBT", True, 7),
        Column("KV USED", True),
        Column("CACHED", True),
        Column("STATE"),
    ),
)


class Door(NamedTuple):
    """A load balancer's metrics, with labels summed."""

    values: Mapping[str, float]
    """The values of counters and gauges, by name."""
    failed: float
    """The number of requests that failed or were refused."""
    histograms: Mapping[str, Mapping[float, float]]
    """The cumulative counts of :data:`TTFT` and :data:`TBT`, by upper bound in seconds."""

    def value(self, name: str) -> float:
        return self.values.get(f"pinyon_lb_{name}", 0.0)

    @property
    def tokens(self) -> float:
        """The number of tokens generated so far, including those of requests that still run."""
        return self.value("generated_tokens_total") + self.value("unfinished_tokens")


class SuiteSample(NamedTuple):
    """A sample at ``at_s`` by a monotonic clock. A source without an answer is None, and ``failures`` says why."""

    at_s: float
    door: Door | None
    instances: Sequence[conductor_pb2.Instance] | None
    failures: tuple[str, ...] = ()


def pinyon_samples(page: str) -> Iterator[MetricSample]:
    """Yields a page's Prometheus samples named ``pinyon_...``. Raises :class:`Unavailable` if it is no page."""
    try:
        for family in text_string_to_metric_families(page):
            yield from [sample for sample in family.samples if sample.name.startswith("pinyon_")]
    except ValueError as error:
        raise Unavailable(f"this is no page of metrics: {error}") from None


def door_of(page: str) -> Door:
    """Parses a load balancer's page of metrics. Raises :class:`Unavailable` if it is none."""
    values: dict[str, float] = {}
    histograms: dict[str, dict[float, float]] = {TTFT: {}, TBT: {}}
    failed = 0.0
    for sample in pinyon_samples(page):
        name, value = sample.name, sample.value
        bounds = histograms.get(name.removesuffix("_bucket"))
        if bounds is not None and "le" in sample.labels:
            bound = _bound(sample.labels["le"])
            bounds[bound] = bounds.get(bound, 0.0) + value
            continue
        values[name] = values.get(name, 0.0) + value
        if name == "pinyon_lb_refused_total" or (
            name == "pinyon_lb_requests_total" and sample.labels.get("finish") not in WELL
        ):
            failed += value
    if "pinyon_lb_queue_requests" not in values:
        raise Unavailable("this is no load balancer's page of metrics")
    return Door(values, failed, histograms)


def _bound(text: str) -> float:
    try:
        bound = float(text)
    except ValueError:
        bound = math.nan
    if math.isnan(bound):
        raise Unavailable(f"this is no page of metrics: a bucket up to {text[:BOUND_CHARS]!r}")
    return bound


def suite_frame(samples: Sequence[SuiteSample], width: int, height: int, title: str) -> list[Text]:
    """Returns the lines for these samples, the oldest first.

    They show how things are now, and rates and percentiles since the sample before, over the last minute, and since the
    load balancer's start."""
    now = samples[-1]
    lines = [Text(title, "bold")]
    lines += [Text(failure, "red") for failure in now.failures]
    lines.append(Text(_summary(now)))
    if now.door is not None:
        rows = _rows(samples)
        lines += [Text(""), *table(RATES, [_rates(*row) for row in rows], [""] * len(rows))]
        lines += [Text(""), *table(TIMES, [_times(*row) for row in rows], [""] * len(rows))]
    if now.instances:
        lines += [Text(""), *_instances(now.instances)]
    return fit(lines, width, height)


def _summary(now: SuiteSample) -> str:
    parts = []
    if now.instances is not None:
        models = sorted({each.info.model for each in now.instances if each.info.model})
        engines = [each for each in now.instances if role_from_proto(each.info.role) is not Role.STORE]
        free = sum([each.schedulable and not each.load.draining for each in engines])
        parts.append(f"serving {', '.join(models) or 'nothing yet'}")
        parts.append(f"{free} of {len(engines)} instances take requests")
    if now.door is not None:
        queued = now.door.value("queue_requests")
        parts.append(f"{now.door.value('in_flight_requests'):.0f} in flight, {queued:.0f} queued")
    return "; ".join(parts)


Row = tuple[str, Door, Door | None, float]
"""A row: its name, the newer and the older counts, and the seconds between them."""


def _rows(samples: Sequence[SuiteSample]) -> list[Row]:
    """Returns the rows. Samples without the load balancer's answer are left out."""
    answered = [(each.at_s, each.door) for each in samples if each.door is not None]
    at_s, now = answered[-1]
    rows: list[Row] = []
    since: list[tuple[float, Door]] = []
    """The earlier samples, the newest first."""
    for then_s, then in reversed(answered[:-1]):
        newer = since[-1][1] if since else now
        if at_s - then_s > LAST_S or then.value(REQUESTS) > newer.value(REQUESTS):
            break  # a load balancer that has started anew counts from zero
        since.append((then_s, then))
    for then_s, then in [*since[:1], *since[1:][-1:]]:
        rows.append((f"last {at_s - then_s:.0f} s", now, then, at_s - then_s))
    rows.append(("since start", now, None, 0.0))
    return rows


def _rates(name: str, now: Door, before: Door | None, seconds: float) -> tuple[str, ...]:
    def grown(count: float, was: float | None) -> str:
        return NOTHING if was is None or seconds <= 0 else f"{max(0.0, count - was) / seconds:.1f}"

    def counted(total: str) -> str:
        return grown(now.value(total), None if before is None else before.value(total))

    hit, asked = [
        now.value(total) - (0.0 if before is None else before.value(total))
        for total in ("cached_tokens_total", "prompt_tokens_total")
    ]
    return (
        name,
        grown(now.tokens, None if before is None else before.tokens),
        counted("prompt_tokens_total"),
        counted(REQUESTS),
        grown(now.failed, None if before is None else before.failed),
        f"{min(1.0, max(0.0, hit / asked)):.0%}" if asked > 0 else NOTHING,
    )


def _times(name: str, now: Door, before: Door | None, seconds: float) -> tuple[str, ...]:
    cells = [name]
    for histogram in (TTFT, TBT):
        counts = dict(now.histograms[histogram])
        if before is not None:
            for bound, count in before.histograms[histogram].items():
                counts[bound] = counts.get(bound, 0.0) - count
        cells += [_seconds(percentile(counts, percent / 100)) for percent in PERCENTS]
    return tuple(cells)


def percentile(counts: Mapping[float, float], share: float) -> float | None:
    """Returns the percentile at ``share`` of a histogram with cumulative counts by upper bound.

    Within a bucket, values count as spread evenly. The result is infinite beyond the last bound, and None without
    counts."""
    bounds = sorted(counts)
    if not bounds or counts[bounds[-1]] <= 0:
        return None
    wanted = share * counts[bounds[-1]]
    below, least = 0.0, 0.0
    for bound in bounds:
        if counts[bound] >= wanted:
            within = counts[bound] - below
            return bound if math.isinf(bound) or within <= 0 else least + (bound - least) * (wanted - below) / within
        below, least = counts[bound], bound
    return math.inf


def _seconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    if math.isinf(value):
        return "over"
    if value >= 1:
        return f"{value:.1f} s"
    return f"{value * 1e3:.0f} ms" if value >= 0.01 else f"{value * 1e3:.1f} ms"


def _instances(instances: Sequence[conductor_pb2.Instance]) -> list[Text]:
    rows, styles = [], []
    found = [(role_from_proto(each.info.role), each) for each in instances]
    for role, each in sorted(found, key=lambda pair: (ORDER.get(pair[0], len(ORDER)), pair[1].info.instance_id)):
        info, load = each.info, each.load
        store = role is Role.STORE
        state = "draining" if load.draining else ("" if each.schedulable or store else "away")
        styles.append({"draining": "yellow", "away": "red"}.get(state, ""))
        tbt_s = load.mean_tbt_ms / 1e3
        batch = load.mean_batch or load.running_requests
        rows.append(
            (
                *(info.instance_id, str(role or "unspecified")),
                *((NOTHING, NOTHING) if store else (str(load.pending_requests), str(load.running_requests))),
                f"{batch / tbt_s:.1f}" if tbt_s > 0 else NOTHING,
                _seconds(tbt_s or None),
                *(_share(blocks, info.capacity_blocks) for blocks in (load.used_blocks, load.cached_blocks)),
                state,
            )
        )
    return table(INSTANCES, rows, styles)


def _share(blocks: int, capacity: int) -> str:
    return f"{blocks / capacity:.0%}" if capacity else NOTHING
