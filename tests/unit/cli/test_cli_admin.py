"""``pinyon admin`` changes nothing in a process of another role than the named one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pinyon.api.admin.v1 import admin_pb2, admin_pb2_grpc
from pinyon.api.lb.v1 import lb_pb2
from pinyon.cli import main


class Admin(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self) -> None:
        self.asked: list[dict[str, str]] = []

    def Apply(self, request, context):
        self.asked.append({each.name: each.value for each in request.settings})
        return admin_pb2.ApplyResponse(changes=[admin_pb2.Change(name="routing", before="a", after="b")])


@pytest.fixture
def balancer() -> Iterator[tuple[str, Admin]]:
    """Yields the address of a server that its health service calls a load balancer, and its admin servicer."""
    pool, admin, names = ThreadPoolExecutor(2), Admin(), health.HealthServicer()
    names.set(lb_pb2.DESCRIPTOR.services_by_name["LbService"].full_name, health_pb2.HealthCheckResponse.NOT_SERVING)
    server = grpc.server(pool)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, server)
    health_pb2_grpc.add_HealthServicer_to_server(names, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", admin
    server.stop(None).wait()
    pool.shutdown()


@pytest.mark.parametrize(
    ("role", "named"), [("conductor", "conductor"), ("kvstore", "store node"), ("worker", "worker")]
)
def test_another_role_is_refused(balancer, role, named, capsys):
    address, admin = balancer
    assert main(["admin", role, address, "routing=b"]) == 1
    assert capsys.readouterr().err == f"pinyon: what answers at {address} is no {named}\n"
    assert not admin.asked


def test_options_may_stand_before_changes(balancer, capsys):
    address, admin = balancer
    assert main(["admin", "lb", address, "--timeout-s", "20", "routing=b"]) == 0
    assert admin.asked == [{"routing": "b"}]
    assert "routing" in capsys.readouterr().out
