"""``pinyon admin`` changes nothing in a process of another role than the named one."""

from __future__ import annotations

import pytest

from pinyon.api.admin.v1 import admin_pb2, admin_pb2_grpc
from pinyon.cli import main


class Admin(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self) -> None:
        self.asked: list[dict[str, str]] = []

    def Apply(self, request, context):
        self.asked.append({each.name: each.value for each in request.settings})
        return admin_pb2.ApplyResponse(changes=[admin_pb2.Change(name="routing", before="a", after="b")])


@pytest.fixture
def balancer(serve) -> tuple[str, Admin]:
    """The address of a load balancer that is not ready, and its admin servicer."""
    admin = Admin()
    return serve(admin_pb2_grpc.add_AdminServiceServicer_to_server, admin, ready=False)[0], admin


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
