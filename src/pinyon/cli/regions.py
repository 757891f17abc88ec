"""The ``pinyon regions`` command: the federation as the controller knows it, and changes to it."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rich.console import Console

from pinyon.api.controller.v1 import controller_pb2, controller_pb2_grpc
from pinyon.cli.channel import add_timeout, add_tls_dir, open_channel
from pinyon.cli.tables import table
from pinyon.federation.view import Cluster, Federation, LbState
from pinyon.messages.federation import federation_from_proto
from pinyon.runtime.identity import CONTROLLER

CONTROLLER_ADDRESS = "127.0.0.1:7100"

_DESCRIPTION = """\
Show the regions, their load balancers and who serves what, as the controller knows it. "add" and "remove" an instance:
an upstream by its base URL, or a worker by its id, which then gets nothing new from load balancers; the controller
remembers that. "forget" a load balancer that does not come back. With TLS it takes an admin's certificate, without it
changes are for processes of the controller's machine."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "regions", help="show and change regions and their load balancers", description=_DESCRIPTION
    )
    actions = parser.add_subparsers(dest="action")
    for action in ("add", "remove"):
        change = actions.add_parser(action, help=f"{action} an instance")
        change.add_argument("region")
        change.add_argument("instance", help="base URL of an upstream, or id of a worker")
        change.add_argument("--cluster", default="", help="default: the only one of the region")
    actions.add_parser("forget", help="forget a load balancer that is gone").add_argument("lb_id")
    for each in (parser, *actions.choices.values()):
        # Allowed before or after the action: the default after it must not undo a value before it.
        default = CONTROLLER_ADDRESS if each is parser else argparse.SUPPRESS
        each.add_argument(
            "--controller", default=default, metavar="HOST:PORT", help=f"its gRPC (default {CONTROLLER_ADDRESS})"
        )
    add_timeout(parser, 10.0)
    add_tls_dir(parser)
    parser.set_defaults(run=regions)


def regions(arguments: argparse.Namespace) -> int:
    """Applies the change, or prints the list."""
    with open_channel(arguments.controller, CONTROLLER, arguments.tls_dir) as channel:
        stub = controller_pb2_grpc.ControllerServiceStub(channel)
        if arguments.action is None:
            _print(stub.ListRegions(controller_pb2.ListRegionsRequest(), timeout=arguments.timeout_s))
            return 0
        if arguments.action == "forget":
            stub.ForgetLoadBalancer(
                controller_pb2.ForgetLoadBalancerRequest(lb_id=arguments.lb_id), timeout=arguments.timeout_s
            )
            sys.stdout.write(f"{arguments.lb_id} is forgotten\n")
            return 0
        where = {"region": arguments.region, "cluster": arguments.cluster, "instance": arguments.instance}
        if arguments.action == "add":
            done = stub.AddInstance(controller_pb2.AddInstanceRequest(**where), timeout=arguments.timeout_s)
        else:
            done = stub.RemoveInstance(controller_pb2.RemoveInstanceRequest(**where), timeout=arguments.timeout_s)
    said = f"{'is' if done.changed else 'was already'} {'added' if arguments.action == 'add' else 'removed'}"
    sys.stdout.write(f"{arguments.instance} {said}\n")
    return 0


def _print(reply: controller_pb2.ListRegionsResponse) -> None:
    federation = federation_from_proto(reply.federation)
    console = Console(highlight=False)
    members = []
    for member in federation.members:
        info = member.info
        load = reply.reports[info.lb_id].load if info.lb_id in reply.reports else None
        state = member.state.value
        if member.state is LbState.LIVE and not member.connected:
            state = "live, not connected"
        requests = "–" if load is None else f"{load.queue}+{load.in_flight}"
        members.append((info.region, info.lb_id, state, served(federation, info.lb_id), requests, info.http_url))
    columns = ("region", "load balancer", "state", "serves", "requests", "for clients")
    console.print(table(columns, members, f"version {federation.version}"))
    clusters = [
        (each.region, each.name, _instances(each), " ".join(each.owners), each.adopter, " ".join(each.removed))
        for each in federation.clusters
    ]
    console.print(table(("region", "cluster", "instances", "owners", "adopted by", "removed"), clusters))
    if reply.settling:
        console.print("The controller has just started: who it does not hear may live.", style="yellow")


def served(federation: Federation, lb_id: str) -> str:
    """Returns the names of the clusters that a load balancer serves; those that it has adopted have a star."""
    own = [each.name for each in federation.owned_by(lb_id)]
    return " ".join([*own, *[f"{each.region}/{each.name}*" for each in federation.adopted_by(lb_id)]])


def _instances(cluster: Cluster) -> str:
    return f"of conductor {cluster.conductor}" if cluster.conductor else " ".join(cluster.upstreams)
