"""The transfer engine of a service: its settings, its start, its metrics."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import Annotated, ClassVar, Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pinyon.core.address import is_loopback, parse_address
from pinyon.core.errors import InvalidArgument, Unavailable
from pinyon.core.request import check_geography
from pinyon.runtime.security import NO_SECURITY, Security
from pinyon.runtime.settings import Address, ServiceSettings, checked, setting
from pinyon.transfer import (
    LATENCY_BUCKETS_S,
    InvalidTransfer,
    Network,
    Nic,
    Topology,
    TransferEngine,
    TransferLimits,
    TransferStats,
    Transports,
)
from pinyon.transfer.host.discovery import configured_topology, discover, load_topology, rdma_nics, tcp_nics
from pinyon.transfer.types.topology import build_topology


class TransferSettings(ServiceSettings):
    """The settings of a service that moves KV blocks."""

    everyday: ClassVar[dict[str, str]] = {"transfer of KV": "transfer_listen transfer_nics"}
    further: ClassVar[dict[str, str]] = {
        "transfer of KV": "transfer_transports transfer_topology transfer_allow_shm transfer_checksum transfer_spin_us "
        "zone"
    }

    transfer_listen: Address = setting("127.0.0.1:0", "host:port of the transfer engine; port 0 takes a free one")
    transfer_transports: str = setting(
        "auto", "transports to reach peers by, best first, as in shm,rdma,tcp; or auto", max_length=64
    )
    transfer_nics: str = setting(
        "",
        "further NICs to use: names such as eth1,mlx5_0, or auto (all); empty: only --transfer-listen",
        max_length=2048,
    )
    transfer_topology: str = setting("", "which NIC is near which memory: JSON, or a file with it; empty: discovered")
    transfer_allow_shm: bool = setting(
        False, "with TLS, also use shared memory on one host: a process that may copy from another can read all of it"
    )
    zone: Annotated[str, checked(partial(check_geography, field="zone"))] = setting(
        "", "name of this place, such as a rack; of several copies of KV, those of the own zone are read first"
    )
    transfer_checksum: Literal["on", "off"] = setting("on", "whether tcp payloads have checksums")
    transfer_spin_us: int = setting(
        100,
        "time for which link threads poll before they sleep, except when a link is idle or cores are "
        "short; 0 saves CPU",
        ge=0,
        le=10_000,
    )

    def listeners(self) -> dict[str, str]:
        return {**super().listeners(), "transfer_listen": self.transfer_listen}

    @property
    def offers_shm(self) -> bool:
        return self.transfer_allow_shm or not self.has_tls


def start_transfer_engine(settings: TransferSettings, security: Security = NO_SECURITY) -> TransferEngine:
    """Starts an engine and returns it.

    Raises :class:`InvalidArgument` for a bad setting (``field`` names it), and :class:`Unavailable` if an address
    cannot be used."""
    host, port = parse_address(settings.transfer_listen)
    try:
        nics, topology = _network(settings)
        engine = TransferEngine(
            host,
            port,
            secret=security.secret or None,
            tls=security.transfer_tls(),
            network=Network(nics, topology, settings.advertise_host or None),
            transports=Transports(
                _transports(settings), offer_shm=settings.offers_shm, checksum=settings.transfer_checksum
            ),
            limits=TransferLimits(spin_s=settings.transfer_spin_us / 1e6),
        )
    except InvalidTransfer as error:
        raise InvalidArgument(error.message, field=f"transfer_{error.field or 'settings'}") from error
    try:
        engine.start()
    except OSError as error:
        raise Unavailable(f"cannot listen on {settings.transfer_listen}: {error.strerror}") from error
    return engine


def _transports(settings: TransferSettings) -> tuple[str, ...] | None:
    if settings.transfer_transports == "auto":
        return None
    names = tuple(name.strip() for name in settings.transfer_transports.split(","))
    if "shm" in names and not settings.offers_shm:
        raise InvalidTransfer(
            "with TLS, shm needs --transfer-allow-shm: whoever may copy from a process can read all of it",
            field="transports",
        )
    return ("local", *names)


def _network(settings: TransferSettings) -> tuple[tuple[Nic, ...], Topology | None]:
    given = load_topology(settings.transfer_topology) if settings.transfer_topology else configured_topology()
    wanted = settings.transfer_nics.strip()
    if not wanted:
        return (), given
    inventory = discover()
    names = () if wanted == "auto" else tuple(name.strip() for name in wanted.split(","))
    nics = (*rdma_nics(inventory, names), *tcp_nics(inventory, names))
    missing = set(names) - {nic.name for nic in nics}
    if missing:
        raise InvalidTransfer(f"no such NIC, or it has no address: {', '.join(sorted(missing))}", field="nics")
    if given is None:
        given = build_topology(inventory, "all", names)
    if not settings.has_tls and not settings.allow_insecure:
        for nic in nics:
            if nic.transport != "tcp" or not is_loopback(nic.address):
                raise InvalidTransfer(
                    f"{nic.name} is reached from elsewhere: give --tls-dir, or --allow-insecure to go without TLS",
                    field="nics",
                )
    return nics, given.restricted({nic.name for nic in nics})


# ---------------------------------------------------------------- metrics

_COUNTERS = {
    "read_bytes": "Bytes read from peers",
    "written_bytes": "Bytes written to peers",
    "served_read_bytes": "Bytes that this process sent to peers that read here (tcp; shm and RDMA reads pass it by)",
    "served_written_bytes": (
        "Bytes that this process took from peers that wrote here (tcp, shm; RDMA writes pass it by)"
    ),
    "protocol_errors": "Links closed because of what came over them",
    "auth_failures": "Links refused because of the cluster secret",
}
"""Counters of ``TransferStats`` and what they count."""
_GAUGES = (
    ("requests_in_flight", "Requests without a final status", "requests_now"),
    ("outbound_links", "Connections and queue pairs open towards peers", "outbound_connections_now"),
    ("inbound_links", "Links open from peers", "inbound_connections_now"),
    ("grants", "Keys to ranges of memory that peers hold now", "grants_now"),
)
"""Gauges, what they show, and their fields of ``TransferStats``."""
_PATH_LABELS = ("transport", "local_nic", "remote_nic")
_OF_PATHS = (
    ("bytes", "Bytes moved as initiator", "nbytes"),
    ("retries", "Chains that failed here and went on elsewhere", "retries"),
    ("short", "Chains that were one small request and went the short way, by their caller", "short"),
)
"""Counters of a path, what they count, and their fields of ``PathStats``."""


class _TransferCollector(Collector):
    """The engine's metrics, all read from one snapshot when they are scraped."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"pinyon_transfer_{name}", text, value=getattr(stats, name))
        for name, text, field in _GAUGES:
            yield GaugeMetricFamily(f"pinyon_transfer_{name}", text, value=getattr(stats, field))
        for name, text, label, counts in (
            ("requests", "Requests by final status", "status", stats.requests),
            ("failures", "Requests that did not complete, by reason", "reason", stats.failures),
            ("served_refusals", "Ranges and keys refused to peers, by reason", "reason", stats.served_refusals),
        ):
            labelled = CounterMetricFamily(f"pinyon_transfer_{name}", text, labels=[label])
            for value, count in counts.items():
                labelled.add_metric([value], count)
            yield labelled
        latency = HistogramMetricFamily(
            "pinyon_transfer_request_seconds", "From submission to final status of a request"
        )
        latency.add_metric([], _cumulative(stats.latency_buckets), stats.latency_sum_s)
        yield latency
        yield from _per_path(stats)
        usable = GaugeMetricFamily(
            "pinyon_transfer_avoided_paths", "Paths to peers that are avoided now", labels=_PATH_LABELS
        )
        avoided: dict[tuple[str, str, str], int] = {}
        for _, state in self._engine.paths():
            avoided[state.path] = avoided.get(state.path, 0) + (not state.usable)
        for path, count in avoided.items():
            usable.add_metric(path, count)
        yield usable


def _per_path(stats: TransferStats) -> Iterator[Metric]:
    for name, text, field in _OF_PATHS:
        counter = CounterMetricFamily(f"pinyon_transfer_path_{name}", text, labels=_PATH_LABELS)
        for one in stats.paths:
            counter.add_metric(one.path, getattr(one, field))
        yield counter
    failures = CounterMetricFamily(
        "pinyon_transfer_path_failures", "Chains that failed because of the path", labels=[*_PATH_LABELS, "reason"]
    )
    seconds = HistogramMetricFamily("pinyon_transfer_path_seconds", "Time of a chain on the path", labels=_PATH_LABELS)
    for one in stats.paths:
        for reason, count in one.failures.items():
            failures.add_metric([*one.path, reason], count)
        seconds.add_metric(one.path, _cumulative(one.latency_buckets), one.latency_sum_s)
    yield from (failures, seconds)


def _cumulative(buckets: list[int]) -> list[tuple[str, float]]:
    bounds = [str(bound) for bound in LATENCY_BUCKETS_S] + ["+Inf"]
    return list(zip(bounds, map(float, accumulate(buckets)), strict=True))


def register_transfer_metrics(registry: CollectorRegistry, engine: TransferEngine) -> None:
    """Adds the engine's counters to the registry as ``pinyon_transfer_*``."""
    registry.register(_TransferCollector(engine))
