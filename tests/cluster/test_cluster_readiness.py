"""A load balancer is ready when a request would be served now, and otherwise says what is missing."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from launch.cluster import LocalCluster
from launch.scrape import Scrape
from tests.cluster.asking import ask, complete
from tests.cluster.specs import cluster_spec, start_again
from tests.forks import forked
from tests.waiting import WAIT_S, wait_until

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def running(tmp_path) -> Iterator[LocalCluster]:
    with LocalCluster(cluster_spec(prefill=1, decode=2, stores=0), tmp_path, forked) as running:
        yield running


def ready(cluster: LocalCluster) -> tuple[int, str]:
    """Returns the status and text of ``/health/ready``."""
    answer = ask(cluster, "/health/ready")
    return answer.status, answer.body.decode()


def served(cluster: LocalCluster) -> bool:
    """Returns whether a completion is answered; its answer is shown if not."""
    answer = complete(cluster)
    print(answer.body)
    return answer.status == 200


def health(cluster: LocalCluster) -> set[int]:
    """Returns the states that the gRPC health service reports for the whole service and for the front door."""
    with cluster.access.channel(cluster.services["lb-0"]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        names = ("", "pinyon.api.lb.v1.LbService")
        return {stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=WAIT_S).status for name in names}


def wait_ready(cluster: LocalCluster, status: int) -> str:
    """Waits until HTTP and then gRPC report the status; returns the text."""
    states = {SERVING if status == 200 else NOT_SERVING}
    wait_until(lambda: ready(cluster)[0] == status and health(cluster) == states, f"both say {status}")
    return ready(cluster)[1]


def wait_metric(cluster: LocalCluster, name: str, value: float) -> None:
    wait_until(lambda: Scrape(cluster).total(name) == value, f"{name} is {value}")


def test_without_a_conductor_the_instances_are_asked(running):
    wait_ready(running, 200)
    assert health(running) == {SERVING}
    wait_metric(running, "pinyon_lb_instances", 3)  # without a conductor it learns of no further instance
    running.services["conductor"].kill()
    wait_metric(running, "pinyon_lb_conductor_connected", 0)
    # Two rounds of probes: a live instance is not taken for dead.
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        assert served(running)
    wait_ready(running, 200)  # an instance that had no time to answer is heard in the next round
    running.services["decode-0"].kill()
    assert served(running), "one is left"
    wait_ready(running, 200)
    running.services["decode-1"].kill()
    text = wait_ready(running, 503)
    assert "generates tokens" in text
    assert "1 that compute prompts" in text
    assert "conductor does not answer" in text
    running.services["prefill-0"].kill()
    wait_until(lambda: "No instance of pinyon-tiny is available" in ready(running)[1], "nobody is left")
    for name in ("conductor", "prefill-0", "decode-1"):
        start_again(running, name)
    wait_ready(running, 200)
    assert served(running)


def test_with_a_conductor_its_list_counts(running):
    wait_ready(running, 200)
    wait_metric(running, "pinyon_lb_instances", 3)
    running.services["prefill-0"].kill()
    text = wait_ready(running, 503)
    assert "computes prompts" in text
    assert "2 that generate tokens" in text
    assert "conductor does not" not in text
    start_again(running, "prefill-0")
    wait_ready(running, 200)
    for name in ("decode-0", "decode-1"):
        running.services[name].kill()
    assert "generates tokens" in wait_ready(running, 503)
    start_again(running, "decode-0")
    wait_ready(running, 200)
    assert served(running)
