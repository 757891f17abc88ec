"""The command lines of several processes, and their metrics merged into those of one."""

from __future__ import annotations

import asyncio
import json
import select
import socket
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

from launch.balancers.merged import SUMMED, Merged
from launch.balancers.shares import DIVIDED, check_processes, process_arguments
from launch.ports import HeldPort
from pinyon.core.errors import InvalidArgument, Unavailable
from pinyon.frontdoor.auth import load_api_keys
from pinyon.runtime.service import ServiceContext
from pinyon.runtime.setting_sources import load_settings
from pinyon.runtime.telemetry import Telemetry
from services.lb.app import Lb
from services.lb.settings import LbSettings
from services.lb.upstream_app import UpstreamLb

UPSTREAM = ["--upstream", "http://127.0.0.1:1"]


def settings_of(*words: str) -> LbSettings:
    return load_settings(LbSettings, words, {})


def children_of(*words: str) -> list[LbSettings]:
    """Returns the settings that each process reads from its command line."""
    settings = settings_of(*words)
    return [
        settings_of(*words, *process_arguments(settings, "lb", number, "127.0.0.1:8000"))
        for number in range(settings.processes)
    ]


@given(count=st.integers(2, 64), limit=st.integers(64, 1 << 16), name=st.sampled_from(DIVIDED))
def test_all_processes_together_hold_what_one_would(count: int, limit: int, name: str) -> None:
    settings = LbSettings(upstream=UPSTREAM[1], processes=count, **{name: limit})
    words = [process_arguments(settings, "lb", number, "127.0.0.1:8000") for number in range(count)]
    total = sum(int(each[each.index(f"--{name.replace('_', '-')}") + 1]) for each in words)
    assert limit <= total < limit + count


def test_each_process_has_a_name_ports_and_a_journal_of_its_own() -> None:
    words = ["--processes", "3", "--listen", "127.0.0.1:7000", "--journal", "/j", "--http-listen", "127.0.0.1:0"]
    children = children_of(*words)
    assert [child.instance_id for child in children] == ["lb-0", "lb-1", "lb-2"]
    assert [child.listen for child in children] == [f"127.0.0.1:{port}" for port in (7000, 7001, 7002)]
    assert [child.journal for child in children] == ["/j.0", "/j.1", "/j.2"]
    for child in children:
        assert (child.processes, child.http_listen, child.http_reuse_port) == (1, "127.0.0.1:8000", True)
        assert (child.metrics_listen, child.admin_listen) == ("127.0.0.1:0", "127.0.0.1:0")
    assert [child.upstream_sharers for child in children_of(*words, *UPSTREAM)] == [3, 3, 3]
    assert children_of("--processes", "2", "--listen", "[::1]:7000")[1].listen == "[::1]:7001"
    assert children_of("--processes", "2", "--metrics-listen", "")[1].metrics_listen == ""


@pytest.mark.parametrize(
    ("words", "certified", "says"),
    [
        ([], "lb", "the certificate is that of the load balancer lb"),
        (["--tenant-rpm", "9"], "", "counted by each process by itself"),
        (["--tenant-tpm", "9"], "", "counted by each process by itself"),
        (["--listen", "127.0.0.1:65534"], "", "--listen is the first of 3 ports, and there are none after 65535"),
        (["--admin-listen", "127.0.0.1:65534"], "", "--admin-listen is the first of 3 ports"),
        (["--bodies-limit-mib", "16"], "", "leaves each process less than two bodies"),
    ],
)
def test_what_they_cannot_keep_is_refused(words: list[str], certified: str, says: str) -> None:
    check_processes(settings_of("--processes", "3"), "lb", "")
    with pytest.raises(InvalidArgument, match=says) as refused:
        check_processes(settings_of("--processes", "3", *words), "lb", certified)
    assert refused.value.field == "processes"


def test_an_id_needs_room_for_the_number() -> None:
    check_processes(settings_of("--processes", "10"), "l" * 62, "")
    with pytest.raises(InvalidArgument, match="64 characters are the most"):
        check_processes(settings_of("--processes", "11"), "l" * 62, "")


def test_keys_with_limits_per_minute_are_refused(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text('{"k": "a", "l": {"tenant": "b", "rpm": 0, "tpm": 0}}')
    loaded = load_api_keys(str(keys), shared=True)
    assert [loaded.client(f"Bearer {key}").tenant for key in "kl"] == ["a", "b"]
    for limit in ("rpm", "tpm"):
        keys.write_text(json.dumps({"k": "a", "l": {"tenant": "b", limit: 1}}))
        loaded = load_api_keys(str(keys))
        assert [loaded.client(f"Bearer {key}").tenant for key in "kl"] == ["a", "b"]
        with pytest.raises(InvalidArgument, match="API keys file"):
            load_api_keys(str(keys), shared=True)


# ---------------------------------------------------------------- the port


@pytest.mark.parametrize("reuse_port", [False, True])
def test_a_port_that_is_taken_is_not_shared(reuse_port: bool) -> None:
    with (
        closing(socket.create_server(("127.0.0.1", 0), reuse_port=reuse_port)) as taken,
        pytest.raises(Unavailable, match=r"cannot listen on 127\.0\.0\.1:.*in use"),
    ):
        HeldPort(f"127.0.0.1:{taken.getsockname()[1]}")


def test_a_port_has_one_holder() -> None:
    """The port is held even before any process listens there."""
    with HeldPort("127.0.0.1:0") as held, pytest.raises(Unavailable, match="in use"):
        HeldPort(held.address)


def test_who_asks_for_it_may_listen_at_a_port_that_is_held() -> None:
    with HeldPort("127.0.0.1:0") as held:
        port = int(held.address.rpartition(":")[2])
        with (
            closing(socket.create_server(("127.0.0.1", port), reuse_port=True)) as one,
            closing(socket.create_server(("127.0.0.1", port), reuse_port=True)) as other,
        ):
            with pytest.raises(Unavailable):
                HeldPort(held.address)
            clients = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(8)]
            for _ in clients:  # no connection goes to the holder
                ready, _, _ = select.select([one, other], [], [], 60)
                ready[0].accept()[0].close()
            for client in clients:
                client.close()


# ---------------------------------------------------------------- metrics


class Process:
    """The counts of one process, by the Prometheus library."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("pinyon_lb_requests", "Requests", ("model",), registry=self.registry)
        self.latency = Histogram("pinyon_lb_e2e_seconds", "Latency", buckets=(0.1, 1.0), registry=self.registry)
        self.held = Gauge("pinyon_lb_in_flight_requests", "Held", registry=self.registry)
        self.state = Gauge("pinyon_lb_conductor_connected", "State", registry=self.registry)

    @property
    def page(self) -> str:
        return generate_latest(self.registry).decode()


class _All(Collector):
    def __init__(self, merged: Merged) -> None:
        self.collect = merged.families  # type: ignore[method-assign]


def value(merged: Merged, name: str, **labels: str) -> float | None:
    registry = CollectorRegistry()
    registry.register(_All(merged))
    assert generate_latest(registry).decode().count(f"# TYPE {name.removesuffix('_total')} ") <= 1
    return registry.get_sample_value(name, labels)


STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(("count", "scrape", "end")), st.integers(1, 5)), max_size=40
)


@given(steps=STEPS)
def test_counters_are_summed_and_never_fall(steps: list[tuple[int, str, int]]) -> None:
    """The sum matches one registry that counts for all: no count that a scrape saw is lost; an unseen one may be."""
    merged, processes = Merged(), [Process() for _ in range(3)]
    seen = dict.fromkeys(range(3), 0)
    past = 0
    for number, what, amount in steps:
        if what == "count":
            processes[number].requests.labels("m").inc(amount)
            for _ in range(amount):
                processes[number].latency.observe(0.5)
        elif what == "scrape":
            for each, process in enumerate(processes):
                merged.told(each, process.page)
                seen[each] = int(process.registry.get_sample_value("pinyon_lb_e2e_seconds_count") or 0)
        else:
            merged.ended(number)
            past, seen[number] = past + seen[number], 0
            processes[number] = Process()
        total = past + sum(seen.values())
        assert (value(merged, "pinyon_lb_requests_total", model="m") or 0) == total
        assert (value(merged, "pinyon_lb_e2e_seconds_count") or 0) == total
        assert (value(merged, "pinyon_lb_e2e_seconds_bucket", le="1.0") or 0) == total
        assert (value(merged, "pinyon_lb_e2e_seconds_bucket", le="0.1") or 0) == 0


def test_gauges_are_summed_or_told_apart_by_what_they_mean() -> None:
    merged, processes = Merged(), [Process(), Process()]
    for number, process in enumerate(processes):
        process.held.set(3 + number)
        process.state.set(number)
        merged.told(number, process.page)
    assert value(merged, "pinyon_lb_in_flight_requests") == 7
    assert value(merged, "pinyon_lb_conductor_connected", process="0") == 0
    assert value(merged, "pinyon_lb_conductor_connected", process="1") == 1
    merged.silent(0)
    assert value(merged, "pinyon_lb_in_flight_requests") == 4
    assert value(merged, "pinyon_lb_conductor_connected", process="0") is None
    merged.told(0, 'a_info{b="c"} 1.0\n')
    merged.told(1, 'a_info{b="c"} 1.0\n')
    assert value(merged, "a_info", b="c") == 1.0


def test_what_is_no_page_changes_nothing() -> None:
    merged, process = Merged(), Process()
    process.requests.labels("m").inc(2)
    merged.told(0, process.page)
    with pytest.raises(ValueError, match="many"):
        merged.told(0, 'pinyon_lb_requests_total{model="m"} many\n')
    assert value(merged, "pinyon_lb_requests_total", model="m") == 2


APART = {
    *("pinyon_lb_conductor_connected", "pinyon_lb_instances", "pinyon_lb_unconfirmed_instances"),
    *(f"pinyon_lb_upstream_{each}" for each in ("capacity", "live", "models", "pending", "running")),
}
"""Gauges that all processes know alike, or that describe a state: each process's is shown."""


async def test_each_gauge_is_summed_or_told_apart() -> None:
    """The gauges that are summed exist in load balancers, and of all others somebody has said that they are not."""
    names: set[str] = set()
    for settings, make in ((settings_of(*UPSTREAM), UpstreamLb), (settings_of(), Lb)):
        registry = CollectorRegistry(auto_describe=True)
        lb = make(settings, ServiceContext("lb", "lb", Telemetry("lb", "lb"), registry, asyncio.Event()))
        names |= {family.name for family in registry.collect() if family.type == "gauge"}
        lb.off_loop.close()
    assert {name for name in names if name.startswith("pinyon_")} == APART | {
        name for name in SUMMED if name.startswith("pinyon_")
    }
