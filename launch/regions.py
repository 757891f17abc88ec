"""Several regions as processes on this machine, each a whole suite of its own: for ``up --regions`` and the tests."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from launch.access import SuiteAccess
from launch.cluster import ClusterSpec, LocalCluster, option
from launch.ports import HeldPorts, Port
from launch.process import START_S, Launch, Progress, ServiceProcess, start_module
from pinyon.api.controller.v1 import controller_pb2, controller_pb2_grpc
from pinyon.core.errors import DeadlineExceeded, InvalidArgument
from pinyon.core.request import check_geography
from pinyon.federation.view import Federation, LbState
from pinyon.messages.federation import federation_from_proto
from pinyon.runtime.identity import CONTROLLER, check_region_name

REGIONS_MAX = 8


@dataclass(frozen=True)
class RegionsSpec:
    """The regions, each with a suite like ``cluster``.

    The load balancers have free ports, except the first region's. ``delays_ms`` are round trips between two regions,
    keyed ``"one:other"`` in either order; ``region_delay_ms`` applies to all other pairs."""

    names: tuple[str, ...]
    cluster: ClusterSpec = field(default_factory=ClusterSpec)
    region_delay_ms: float = option(
        0.0, "round trip added between two regions; each message is delayed by half of it (default 0)", metavar="MS"
    )
    delays_ms: Mapping[str, float] = field(default_factory=dict)
    controller_port: int = option(
        0,
        "gRPC of the regions' controller (default 7100; 0: a free one): it tells load balancers of each other, and who "
        "stands in for one that fails",
        up=7100,
    )
    static_peers: bool = option(False, "no controller: load balancers learn only at their start where the others are")
    controller_arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.cluster.lbs != 1:
            raise InvalidArgument("each of these regions has one load balancer", field="lbs")
        if not 0 <= self.region_delay_ms <= 5000:
            raise InvalidArgument("a delay is from 0 to 5000 ms", field="region_delay_ms")
        if not 2 <= len(self.names) <= REGIONS_MAX or len(set(self.names)) < len(self.names):
            raise InvalidArgument(
                f"there must be 2 to {REGIONS_MAX} regions, each with a name of its own", field="regions"
            )
        for name in self.names:
            check_geography(name, "regions")
            if self.cluster.tls:
                check_region_name(name, "regions")

    def delay(self, one: str, other: str) -> float:
        """Returns the round trip between two regions in ms."""
        found = self.delays_ms.get(f"{one}:{other}", self.delays_ms.get(f"{other}:{one}"))
        return self.region_delay_ms if found is None else found


class LocalRegions:
    """The suites of all regions: use it as a context manager, or call :meth:`stop` in any case."""

    def __init__(self, spec: RegionsSpec, log_dir: Path | None = None, launch: Launch = start_module) -> None:
        self.spec = spec
        self._owned = ExitStack()
        """The temporary folder and the held ports, until the regions are stopped."""
        root = Path(self._owned.enter_context(tempfile.TemporaryDirectory(prefix="pinyon-regions-")))
        free_port = self._owned.enter_context(HeldPorts()).take
        self._log_dir = log_dir or root
        host, tls, metrics_port = spec.cluster.host, spec.cluster.tls, spec.cluster.metrics_base_port
        clusters: dict[str, ClusterSpec] = {}
        for number, name in enumerate(spec.names):
            # The controller's metrics port comes first, then those of the regions in order.
            following = metrics_port and metrics_port + 1 + number * len(spec.cluster.names)
            clusters[name] = each = replace(spec.cluster, metrics_base_port=following)
            if number or not each.lb_port:
                clusters[name] = replace(each, lb_port=free_port(host), http_port=free_port(host), conductor_port=0)
        tls_dir = spec.cluster.tls_dir or str(root / "tls")
        self.controller: ServiceProcess | None = None
        address = ""
        if not spec.static_peers:
            address = f"{host}:{spec.controller_port or free_port(host)}"
            arguments = [
                *("--instance-id", CONTROLLER, "--listen", address, "--http-listen", f"{host}:0"),
                # The state is in a file, so that it outlives restarts.
                *("--metrics-listen", f"{host}:{metrics_port}", "--state-file", str(root / "controller.json")),
                *(("--allow-insecure",) if spec.cluster.allow_insecure else ()),
                *("--log-level", spec.cluster.log_level, "--log-format", spec.cluster.log_format),
                *spec.controller_arguments,
            ]
            log = self._log_dir / f"{CONTROLLER}.log"
            self.controller = ServiceProcess(CONTROLLER, "services.controller", arguments, log, launch)
        # With TLS, other load balancers connect to the admin port, which demands certificates.
        doors = {name: free_port(host) if tls else each.lb_port for name, each in clusters.items()}
        self.clusters: dict[str, LocalCluster] = {}
        for name, each in clusters.items():
            others = [other for other in spec.names if other != name]
            peers = ",".join(f"{other}={host}:{doors[other]}" for other in others)
            delays = ",".join(f"{other}={spec.delay(name, other) / 2:g}" for other in others if spec.delay(name, other))
            extra = dict(each.extra)
            extra["lb"] = (
                *("--region", name, "--test-region-delays-ms", delays),
                *(("--controller", address) if address else ("--peers", peers)),
                *(("--admin-listen", f"{host}:{doors[name]}") if tls else ()),
                *extra.get("lb", ()),
            )
            # The controller and the certificates tell instances apart by id; one authority signs for all regions.
            own = replace(each, extra=extra, prefix=f"{name}-", region=name, tls_dir=tls_dir if tls else "")
            self.clusters[name] = LocalCluster(own, None if log_dir is None else log_dir / name, launch)

    def __enter__(self) -> LocalRegions:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def ports(self) -> list[Port]:
        """The ports of the suites and the controller that options can choose, see :attr:`ClusterSpec.ports`."""
        host, controller = self.spec.cluster.host, []
        if self.controller is not None:
            controller = [
                Port("the controller's gRPC", "--controller-port", host, self.spec.controller_port),
                Port("the metrics of the controller", "--metrics-base-port", host, self.spec.cluster.metrics_base_port),
            ]
        return [*controller, *(port for each in self.clusters.values() for port in each.spec.ports)]

    def start(self, progress: Progress = lambda _: None) -> None:
        """Starts the regions one after the other; on any failure stops what was started."""
        try:
            for cluster in self.clusters.values():
                cluster.make_folders()
                cluster.make_certificates()
            if self.controller is not None:
                access = next(iter(self.clusters.values())).access
                if (tls_dir := access.folder(CONTROLLER, CONTROLLER)) is not None:
                    self.controller.arguments += ["--tls-dir", str(tls_dir)]
                self._log_dir.mkdir(parents=True, exist_ok=True)
                self.controller.spawn()
                self.controller.wait_ready(time.monotonic() + START_S)
                progress(f"{CONTROLLER} {self.controller.addresses}")
            for name, cluster in self.clusters.items():
                cluster.start(lambda line, name=name: progress(f"{name}: {line}"))  # type: ignore[misc]
            if self.controller is not None:
                self._wait_known()
        except BaseException:
            self.stop()
            raise

    def listed(self) -> controller_pb2.ListRegionsResponse:
        """Returns the controller's list of regions. Raises :class:`RuntimeError` if there is no controller."""
        if self.controller is None:
            raise RuntimeError("these regions have no controller")
        # The controller's id has no region prefix.
        access = SuiteAccess(next(iter(self.clusters.values())).access.root)
        with access.channel(self.controller) as channel:
            stub = controller_pb2_grpc.ControllerServiceStub(channel)
            reply: controller_pb2.ListRegionsResponse = stub.ListRegions(
                controller_pb2.ListRegionsRequest(), timeout=START_S, wait_for_ready=True
            )
        return reply

    def federation(self) -> Federation:
        """Returns the federation as the controller knows it."""
        return federation_from_proto(self.listed().federation)

    def _wait_known(self) -> None:
        deadline = time.monotonic() + START_S
        while [each.state for each in self.federation().members] != [LbState.LIVE] * len(self.clusters):
            if time.monotonic() > deadline:
                raise DeadlineExceeded("the controller does not know all load balancers")
            time.sleep(0.02)  # a poll with a deadline: the controller has no event for outsiders

    def stop(self) -> None:
        if self.controller is not None:
            # All at once: nothing is kept, and no load balancer should take over from others that end now.
            self.controller.kill()
        for cluster in self.clusters.values():
            cluster.stop()
        self._owned.close()
