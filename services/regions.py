"""Several regions as processes on this machine, each a whole suite of its own: for ``up --regions`` and the tests."""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pinyon.api.controller.v1 import controller_pb2, controller_pb2_grpc
from pinyon.core.errors import DeadlineExceeded, InvalidArgument, Unavailable
from pinyon.core.request import check_geographies
from pinyon.federation.members import LbState
from pinyon.federation.view import Federation
from pinyon.messages.federation import federation_from_proto
from services.cluster import START_S, ClusterSpec, LocalCluster
from services.free_port import is_free
from services.process import INTERPRETER, Launch, ServiceProcess

__all__ = ["LocalRegions", "RegionsSpec"]

REGIONS_MAX = 8
OUR_PORTS = range(20_000, 32_768)
"""Below those that Linux chooses for connections."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class RegionsSpec:
    """``cluster`` is what there is in each region; its load balancers have free ports, but for the first region's.

    ``delays_ms``: there and back between two regions, by ``"one:other"`` in either order; ``delay_ms`` for all others.
    ``clusters``: what is otherwise in one of them. ``controller``: it says who the load balancers are, and who serves
    the instances of one that failed; else each is told of the others when it starts."""

    names: tuple[str, ...]
    cluster: ClusterSpec = field(default_factory=ClusterSpec)
    clusters: Mapping[str, ClusterSpec] = field(default_factory=dict)
    delay_ms: float = 0.0
    delays_ms: Mapping[str, float] = field(default_factory=dict)
    controller: bool = True
    geography: Mapping[str, object] | None = None
    """See :func:`pinyon.routing.geography.parse_geography`."""

    def __post_init__(self) -> None:
        if self.cluster.lbs != 1:
            raise InvalidArgument("each of these regions has one load balancer", field="lbs")
        if not 0 <= self.delay_ms <= 5000:
            raise InvalidArgument("a delay is from 0 to 5000 ms", field="region_delay_ms")
        if not 2 <= len(self.names) <= REGIONS_MAX or len(set(self.names)) < len(self.names):
            raise InvalidArgument(
                f"there must be 2 to {REGIONS_MAX} regions, each with a name of its own", field="regions"
            )
        for name in self.names:
            check_geographies((name,), "regions")

    def delay(self, one: str, other: str) -> float:
        """There and back, in ms."""
        found = self.delays_ms.get(f"{one}:{other}", self.delays_ms.get(f"{other}:{one}"))
        return self.delay_ms if found is None else found


class LocalRegions:
    """Starts and stops them. Use as a context manager, or call :meth:`stop` in any case."""

    def __init__(self, spec: RegionsSpec, log_dir: Path | None = None, launch: Launch = INTERPRETER) -> None:
        self.spec = spec
        self._folder = tempfile.TemporaryDirectory(prefix="pinyon-regions-")
        root = Path(self._folder.name)
        secret = root / "federation-secret"
        descriptor = os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(os.urandom(32).hex())
        arguments = ["--federation-secret-file", str(secret)]
        told = ["--state-file", str(root / "controller.json")]
        if spec.geography is not None:
            policy = root / "geography.json"
            policy.write_text(json.dumps(spec.geography))
            arguments += ["--geography-file", str(policy)]
            told += ["--geography", str(policy)]
        clusters = {name: spec.clusters.get(name, spec.cluster) for name in spec.names}
        for number, (name, each) in enumerate(clusters.items()):
            if number or not each.lb_port:
                clusters[name] = replace(
                    each, lb_port=free_port(each.host), http_port=free_port(each.host), conductor_port=0
                )
        tls = spec.cluster.tls
        tls_dir = spec.cluster.tls_dir or str(root / "tls")
        # With TLS, other load balancers come to the door of those who have certificates.
        doors = {name: free_port(each.host) if tls else each.lb_port for name, each in clusters.items()}
        first = clusters[spec.names[0]]
        controller = f"{first.host}:{first.controller_port or free_port(first.host)}" if spec.controller else ""
        self.clusters: dict[str, LocalCluster] = {}
        for name, each in clusters.items():
            others = [other for other in spec.names if other != name]
            peers = "" if controller else ",".join(f"{other}={each.host}:{doors[other]}" for other in others)
            delays = ",".join(f"{other}={spec.delay(name, other) / 2:g}" for other in others if spec.delay(name, other))
            extra = dict(each.extra)
            extra["lb"] = (
                *("--region", name, "--peers", peers, "--controller", controller),
                *("--test-region-delays-ms", delays, *arguments),
                *(("--admin-listen", f"{each.host}:{doors[name]}") if tls else ()),
                *extra.get("lb", ()),
            )
            own = replace(each, extra=extra, prefix=f"{name}-", tls_dir=tls_dir if tls else "")
            if controller and each is first:
                extra["controller"] = (*told, *extra.get("controller", ()))
                own = replace(own, controller=True, controller_port=int(controller.rpartition(":")[2]))
            self.clusters[name] = LocalCluster(own, None if log_dir is None else log_dir / name, launch)

    def __enter__(self) -> LocalRegions:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, progress: Progress = lambda _: None) -> None:
        """All of them, one after the other; on any failure stop what was started."""
        try:
            for name, cluster in self.clusters.items():
                cluster.start(lambda line, name=name: progress(f"{name}: {line}"))  # type: ignore[misc]
            if self.spec.controller:
                self._wait_known()
        except BaseException:
            self.stop()
            raise

    @property
    def controller(self) -> ServiceProcess:
        """Raises :class:`KeyError` if there is none."""
        return self.clusters[self.spec.names[0]].services["controller"]

    def federation(self) -> Federation:
        """As the controller knows it."""
        return federation_from_proto(self.listed().federation)

    def listed(self) -> controller_pb2.ListRegionsResponse:
        """What the controller says to who asks."""
        with self.clusters[self.spec.names[0]].access.channel(self.controller) as channel:
            stub = controller_pb2_grpc.ControllerServiceStub(channel)
            reply: controller_pb2.ListRegionsResponse = stub.ListRegions(
                controller_pb2.ListRegionsRequest(), timeout=START_S, wait_for_ready=True
            )
            return reply

    def _wait_known(self) -> None:
        deadline = time.monotonic() + START_S
        while [each.state for each in self.federation().members] != [LbState.LIVE] * len(self.clusters):
            if time.monotonic() > deadline:
                raise DeadlineExceeded("the controller does not know all load balancers")
            time.sleep(0.02)  # a poll with a deadline: it has no event for outsiders

    def stop(self) -> None:
        for cluster in self.clusters.values():
            cluster.stop()
        self._folder.cleanup()


def free_port(host: str) -> int:
    """One that nobody has now, and that the system gives nobody by itself: it is taken only a while later."""
    for port in random.SystemRandom().sample(OUR_PORTS, 256):
        if is_free(host, port):
            return port
    raise Unavailable(f"no port of {OUR_PORTS.start} to {OUR_PORTS.stop - 1} is free")
