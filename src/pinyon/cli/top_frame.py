"""The views of ``pinyon top`` as lines of text. Pure: samples in, lines out, cut to the size of a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample as MetricSample
from rich.text import Text

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.api.controller.v1 import controller_pb2
from pinyon.cli.regions import served
from pinyon.core.errors import Unavailable
from pinyon.core.request import Role
from pinyon.federation.view import Federation, LbState
from pinyon.messages.enums import role_from_proto
from pinyon.messages.federation import federation_from_proto

LEAST_WIDTH = 20
LEAST_HEIGHT = 4
NOTHING = "-"


class ControllerSample(NamedTuple):
    """The controller's reply at ``at_s`` by a monotonic clock."""

    at_s: float
    reply: controller_pb2.ListRegionsResponse


# Titles of columns. A column is at least as wide as its title; ">" before a title aligns the cells to the right.
MEMBERS = ("REGION", "LB", "STATE", ">QUEUE", ">FLIGHT", ">FREE", ">HITS", ">OUT/s", ">IN/s", "SERVES")
INSTANCES = ("LB", "INSTANCE", ">PEND", ">RUN", ">SENT", "FREE")
METRICS = ("METRIC", ">VALUE", ">PER s")
RATES = (" " * 11, ">TOKENS/s", ">PROMPT/s", ">REQUESTS/s", ">FAILED/s", ">HITS")
TIMES = (" " * 11, ">TTFT P50", ">    P90", ">    P99", ">TBT P50", ">    P90", ">    P99")
WORKERS = ("INSTANCE", "ROLE", ">PENDING", ">RUNNING", ">TOKENS/s", ">    TBT", ">KV USED", ">CACHED", "STATE")


def controller_frame(now: ControllerSample, before: ControllerSample, title: str) -> list[Text]:
    """Returns regions, load balancers, and the instances, the busiest first."""
    federation = federation_from_proto(now.reply.federation)
    live = sum([member.state is LbState.LIVE for member in federation.members])
    adopted = sum([bool(cluster.adopter) for cluster in federation.clusters])
    settling = ", settling" if now.reply.settling else ""
    head = (
        f"{title}  version {federation.version}: {_count(len(federation.regions), 'region')}, "
        f"{live} of {_count(len(federation.members), 'load balancer')} live, {adopted} adopted{settling}"
    )
    lines = [Text(head, "bold"), *_members(now, before, federation)]
    instances = _instances(now.reply.reports)
    if instances:
        lines += [Text(""), *instances]
    return lines


def metrics_frame(now: Mapping[str, float], before: Mapping[str, float], seconds: float, title: str) -> list[Text]:
    """Returns one process's own figures by name, and the rate of each figure whose name ends in ``_total``."""
    rows = []
    for name, value in sorted(now.items()):
        counted = name in before and name.endswith("_total")
        rows.append((name, f"{value:g}", per_second(value - before[name], seconds) if counted else NOTHING))
    return [Text(title, "bold"), *table(METRICS, rows)]


def _members(now: ControllerSample, before: ControllerSample, federation: Federation) -> list[Text]:
    rows, styles = [], []
    for member in sorted(federation.members, key=lambda each: (each.info.region, each.info.lb_id)):
        lb_id = member.info.lb_id
        state = member.state.value
        if member.state is LbState.LIVE and not member.connected:
            state = "cut off"
        styles.append({LbState.FAILED: "red", LbState.LEFT: "dim", LbState.DRAINING: "yellow"}.get(member.state, ""))
        serves = served(federation, lb_id) if member.state is LbState.LIVE else ""
        if lb_id not in now.reply.reports:
            rows.append((member.info.region, lb_id, state, *[NOTHING] * 6, serves))
            continue
        load = now.reply.reports[lb_id].load
        seconds, last = 0.0, load
        if lb_id in before.reply.reports:
            seconds, last = now.at_s - before.at_s, before.reply.reports[lb_id].load
        rows.append(
            (
                *(member.info.region, lb_id, state, str(load.queue), str(load.in_flight)),
                f"{load.available_instances}/{load.instances}",
                _hits(load, last),
                per_second(load.forwarded_total - last.forwarded_total, seconds),
                per_second(load.accepted_total - last.accepted_total, seconds),
                serves,
            )
        )
    return table(MEMBERS, rows, styles)


def _hits(load: controller_pb2.LoadBalancerLoad, last: controller_pb2.LoadBalancerLoad) -> str:
    """Returns the share of hits since the last sample, or since the process's start if there was none."""
    hit, asked = load.hit_chunks_total, load.asked_chunks_total
    if asked > last.asked_chunks_total:
        hit, asked = hit - last.hit_chunks_total, asked - last.asked_chunks_total
    return share(hit, asked)


def share(part: float, whole: float) -> str:
    return f"{min(1.0, max(0.0, part / whole)):.0%}" if whole > 0 else NOTHING


def per_second(grown: float, seconds: float) -> str:
    """Returns the rate of a counter; a counter below its last value belongs to a restarted process."""
    return f"{max(0.0, grown) / seconds:.1f}" if seconds > 0 else NOTHING


def _instances(reports: Mapping[str, controller_pb2.LoadBalancerReport]) -> list[Text]:
    found = [(each, lb_id) for lb_id, report in reports.items() for each in report.load.per_instance]
    found.sort(key=lambda pair: (-pair[0].pending, -pair[0].outstanding, pair[1], pair[0].name))
    rows = [
        (lb_id, each.name, *map(str, (each.pending, each.running, each.outstanding)), "yes" if each.available else "no")
        for each, lb_id in found
    ]
    return table(INSTANCES, rows) if rows else []


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], styles: Iterable[str] = repeat("")) -> list[Text]:
    """Returns a table: a head, and a line for each row in its style."""
    titles = [column.removeprefix(">") for column in columns]
    clean = [[plain(cell) for cell in row] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(titles, *clean, strict=True)]

    def line(cells: Sequence[str]) -> str:
        parts = [
            cell.rjust(width) if column.startswith(">") else cell.ljust(width)
            for cell, width, column in zip(cells, widths, columns, strict=True)
        ]
        return "  ".join(parts).rstrip()

    head = Text(line(titles), "dim")
    return [head, *[Text(line(row), style) for row, style in zip(clean, styles, strict=False)]]


def plain(text: str) -> str:
    """Returns text from outside without anything that moves the cursor; each character is one cell wide."""
    return "".join([each if " " <= each <= "~" else "?" for each in text])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def fit(lines: Sequence[Text], width: int, height: int) -> list[Text]:
    """Returns the lines that fit the terminal's width and height."""
    width, height = max(LEAST_WIDTH, width), max(LEAST_HEIGHT, height)
    shown = list(lines)
    if len(shown) > height:
        left = len(shown) - height + 1
        shown = [*shown[: height - 1], Text(f"... {left} more", "dim")]
    texts = [plain(line.plain) for line in shown]
    clipped = [text if len(text) <= width else text[: width - 1] + ">" for text in texts]
    return [Text(text, line.style, no_wrap=True, overflow="crop") for text, line in zip(clipped, shown, strict=True)]


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


class BalancerPage(NamedTuple):
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


START = BalancerPage({}, 0.0, {TTFT: {}, TBT: {}})
"""The metrics of a load balancer at its start."""


class SuiteSample(NamedTuple):
    """A sample at ``at_s`` by a monotonic clock. A source without an answer is None, and ``failures`` says why."""

    at_s: float
    door: BalancerPage | None
    instances: Sequence[conductor_pb2.Instance] | None
    failures: tuple[str, ...] = ()


def pinyon_samples(page: str) -> Iterator[MetricSample]:
    """Yields a page's Prometheus samples named ``pinyon_...``. Raises :class:`Unavailable` if it is no such page."""
    try:
        for family in text_string_to_metric_families(page):
            yield from [sample for sample in family.samples if sample.name.startswith("pinyon_")]
    except ValueError as error:
        raise Unavailable(f"this is no page of metrics: {error}") from None


def door_of(page: str) -> BalancerPage:
    """Parses a load balancer's page of metrics. Raises :class:`Unavailable` if it is no such page."""
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
    return BalancerPage(values, failed, histograms)


def _bound(text: str) -> float:
    try:
        bound = float(text)
    except ValueError:
        bound = math.nan
    if math.isnan(bound):
        raise Unavailable(f"this is no page of metrics: a bucket up to {text[:BOUND_CHARS]!r}")
    return bound


def suite_frame(samples: Sequence[SuiteSample], title: str) -> list[Text]:
    """Returns the lines for these samples, the oldest first.

    The lines show the present state. They show rates and percentiles since the sample before, over the last minute, and
    since the load balancer's start."""
    now = samples[-1]
    lines = [Text(title, "bold")]
    lines += [Text(failure, "red") for failure in now.failures]
    lines.append(Text(_summary(now)))
    if now.door is not None:
        rows = _rows(samples)
        lines += [Text(""), *table(RATES, [_rates(*row) for row in rows])]
        lines += [Text(""), *table(TIMES, [_times(*row) for row in rows])]
    if now.instances:
        lines += [Text(""), *_suite_instances(now.instances)]
    return lines


def _summary(now: SuiteSample) -> str:
    parts = []
    if now.instances is not None:
        engines = [each for each in now.instances if role_from_proto(each.info.role) is not Role.STORE]
        free = sum([each.schedulable and not each.load.draining for each in engines])
        parts += [serving(now.instances), f"{free} of {len(engines)} instances take requests"]
    if now.door is not None:
        queued = now.door.value("queue_requests")
        parts.append(f"{now.door.value('in_flight_requests'):.0f} in flight, {queued:.0f} queued")
    return "; ".join(parts)


def serving(instances: Iterable[conductor_pb2.Instance]) -> str:
    models = sorted({each.info.model for each in instances if each.info.model})
    return f"serving {', '.join(models) or 'nothing yet'}"


def state_of(instance: conductor_pb2.Instance) -> str:
    """Returns an instance's state; an empty text if there is nothing to say."""
    if instance.load.draining:
        return "draining"
    return "" if instance.schedulable or role_from_proto(instance.info.role) is Role.STORE else "away"


Row = tuple[str, BalancerPage, BalancerPage, float]
"""A row: its name, the newer and the older counts, and the seconds between them; 0: no rates are shown."""


def _rows(samples: Sequence[SuiteSample]) -> list[Row]:
    """Returns the rows. Samples without the load balancer's answer are left out."""
    answered = [(each.at_s, each.door) for each in samples if each.door is not None]
    at_s, now = answered[-1]
    rows: list[Row] = []
    since: list[tuple[float, BalancerPage]] = []
    """The earlier samples, the newest first."""
    for then_s, then in reversed(answered[:-1]):
        newer = since[-1][1] if since else now
        if at_s - then_s > LAST_S or then.value(REQUESTS) > newer.value(REQUESTS):
            break  # a load balancer that has started anew counts from zero
        since.append((then_s, then))
    for then_s, then in [*since[:1], *since[1:][-1:]]:
        rows.append((f"last {at_s - then_s:.0f} s", now, then, at_s - then_s))
    rows.append(("since start", now, START, 0.0))
    return rows


def _rates(name: str, now: BalancerPage, before: BalancerPage, seconds: float) -> tuple[str, ...]:
    prompt = now.value("prompt_tokens_total") - before.value("prompt_tokens_total")
    cached = now.value("cached_tokens_total") - before.value("cached_tokens_total")
    requests = now.value(REQUESTS) - before.value(REQUESTS)
    grown = (now.tokens - before.tokens, prompt, requests, now.failed - before.failed)
    return (name, *[per_second(each, seconds) for each in grown], share(cached, prompt))


def _times(name: str, now: BalancerPage, before: BalancerPage, seconds: float) -> tuple[str, ...]:
    cells = [name]
    for histogram in (TTFT, TBT):
        counts = dict(now.histograms[histogram])
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


def _suite_instances(instances: Sequence[conductor_pb2.Instance]) -> list[Text]:
    rows, styles = [], []
    found = [(role_from_proto(each.info.role), each) for each in instances]
    for role, each in sorted(found, key=lambda pair: (ORDER.get(pair[0], len(ORDER)), pair[1].info.instance_id)):
        info, load = each.info, each.load
        store = role is Role.STORE
        state = state_of(each)
        styles.append({"draining": "yellow", "away": "red"}.get(state, ""))
        tbt_s = load.mean_tbt_ms / 1e3
        batch = load.mean_batch or load.running_requests
        rows.append(
            (
                *(info.instance_id, str(role or "unspecified")),
                *((NOTHING, NOTHING) if store else (str(load.pending_requests), str(load.running_requests))),
                f"{batch / tbt_s:.1f}" if tbt_s > 0 else NOTHING,
                _seconds(tbt_s or None),
                *(share(blocks, info.capacity_blocks) for blocks in (load.used_blocks, load.cached_blocks)),
                state,
            )
        )
    return table(WORKERS, rows, styles)
