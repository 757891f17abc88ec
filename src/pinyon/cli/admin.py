"""The ``pinyon admin`` command: shows what can be changed in a running process, and changes it."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from pinyon.api.admin.v1 import admin_pb2, admin_pb2_grpc
from pinyon.cli.channel import add_timeout, add_tls_dir, check_role, open_channel
from pinyon.cli.tables import table
from pinyon.core.errors import InvalidArgument
from pinyon.runtime.identity import CONDUCTOR, KVSTORE, LB, WORKER

_DESCRIPTION = """\
Show the settings that a service can change while it runs, and change them: "draining=true" (a worker takes nothing new,
a load balancer says that it is not ready), "placement=POLICY" of a conductor, "routing=POLICY" of a load balancer,
"eviction=POLICY" of a worker or a store node, which keeps its contents. A change lasts until the process ends, and is
logged there. With TLS, this command needs an admin's certificate (--tls-dir)."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "admin", help="show and change settings of a running process", description=_DESCRIPTION
    )
    add = parser.add_argument
    add("role", choices=(CONDUCTOR, WORKER, KVSTORE, LB), metavar="ROLE", help="conductor, worker, kvstore or lb")
    add("address", metavar="HOST:PORT", help="its gRPC address (with TLS: a load balancer's --admin-listen)")
    add("changes", metavar="NAME=VALUE", nargs="*", help="a change; without any, the settings are shown")
    add("--instance-id", default="", help="with TLS: talk to no other instance than this")
    add_timeout(parser)
    add_tls_dir(parser)
    parser.set_defaults(run=admin)


def admin(arguments: argparse.Namespace) -> int:
    """Applies the changes, and shows every setting that can be changed."""
    settings = []
    for change in arguments.changes:
        name, equals, value = change.partition("=")
        if not equals:
            raise InvalidArgument(f"{change!r} is not NAME=VALUE", field="changes")
        settings.append(admin_pb2.Setting(name=name, value=value))
    with open_channel(arguments.address, arguments.role, arguments.tls_dir, arguments.instance_id) as channel:
        check_role(channel, arguments.address, arguments.role, arguments.timeout_s)
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        reply = stub.Apply(admin_pb2.ApplyRequest(settings=settings), timeout=arguments.timeout_s)
    changes = [(each.name, each.before, each.after) for each in reply.changes]
    Console().print(table(("setting", "before", "now"), changes))
    return 0
