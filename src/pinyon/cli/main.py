"""The ``pinyon`` command: looks into a running suite and sends it a prompt."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence

from rich.console import Console

from pinyon.api.conductor.v1 import conductor_pb2, conductor_pb2_grpc
from pinyon.api.lb.v1 import lb_pb2, lb_pb2_grpc
from pinyon.cli import admin, certs, explain, journal, kv, regions, top, topology, transfer_commands
from pinyon.cli.called import called_as, has_dev
from pinyon.cli.channel import add_api_key, add_conductor, add_timeout, add_tls_dir, authorization, open_channel
from pinyon.cli.failures import printable
from pinyon.cli.tables import table
from pinyon.cli.top_frame import serving, state_of
from pinyon.core.compiled import version_line
from pinyon.core.errors import PinyonError
from pinyon.core.request import Role, SamplingParams
from pinyon.messages.enums import role_from_proto
from pinyon.messages.sampling import sampling_to_proto
from pinyon.runtime.arguments import Parser
from pinyon.runtime.identity import CONDUCTOR, LB

LAB = "pinyon_lab"
"""The laboratory's package. No import statement names it, because the serving code knows nothing of it."""
LAB_COMMANDS = ("compare", "plan", "replay", "reproduce", "simulate", "simulate-cache", "trace")
"""The laboratory's commands, for the message that it is not installed."""

_DESCRIPTION = """\
Send a prompt to a running suite, look into it, change it{and_lab}. COMMAND --help tells more.
The easiest first request to a suite{of_dev} is: generate "A prompt"."""


def instances(arguments: argparse.Namespace) -> int:
    """Shows the conductor's instances."""
    with open_channel(arguments.conductor, CONDUCTOR, arguments.tls_dir) as channel:
        stub = conductor_pb2_grpc.ConductorServiceStub(channel)
        reply = stub.ListInstances(conductor_pb2.ListInstancesRequest(), timeout=arguments.timeout_s)
    rows = []
    for instance in reply.instances:
        info, load = instance.info, instance.load
        role = role_from_proto(info.role)
        requests = "–" if role is Role.STORE else f"{load.pending_requests}/{load.running_requests}"
        blocks = f"{load.used_blocks}+{load.cached_blocks}/{info.capacity_blocks or '–'}"
        rows.append((info.instance_id, role or "unspecified", info.address, requests, blocks, state_of(instance)))
    columns = ("instance", "role", "address", "pending/running", "KV used+cached/total", "")
    Console().print(table(columns, rows, serving(reply.instances), right=columns[3:5], whole=True))
    return 0


def generate(arguments: argparse.Namespace) -> int:
    """Sends one prompt over gRPC and prints the text as it comes."""
    request = lb_pb2.GenerateRequest(
        model=arguments.model,
        prompt=arguments.prompt,
        sampling=sampling_to_proto(
            SamplingParams(arguments.max_tokens, temperature=arguments.temperature, seed=arguments.seed).checked()
        ),
    )
    metadata = authorization(arguments.api_key)
    with open_channel(arguments.lb, LB, arguments.tls_dir) as channel:
        stub = lb_pb2_grpc.LbServiceStub(channel)
        usage = None
        for reply in stub.Generate(request, timeout=arguments.timeout_s, metadata=metadata):
            sys.stdout.write(reply.text)
            sys.stdout.flush()
            if reply.HasField("usage"):
                usage = reply.usage
    sys.stdout.write("\n")
    if usage is not None:
        sys.stderr.write(
            f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} reused), {usage.completion_tokens} generated\n"
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    lab = importlib.util.find_spec(LAB) is not None
    description = _DESCRIPTION.format(
        and_lab="; make, replay and simulate traces" if lab else "",
        of_dev=" that `./dev up` has started" if has_dev() else "",
    )
    parser = Parser(prog=called_as(), description=description)
    parser.add_argument("--version", action="version", version=version_line())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    told = "Show the instances that the conductor knows: role, address, requests that wait and run, and KV blocks."
    show = commands.add_parser("instances", help="show instances, their roles and load", description=told)
    add_conductor(show)
    add_timeout(show)
    add_tls_dir(show)
    show.set_defaults(run=instances)

    told = "Send one prompt to a load balancer over gRPC, and print the text as it comes: the easiest first request."
    send = commands.add_parser("generate", help="send a prompt and print the answer", description=told)
    add = send.add_argument
    add("prompt", metavar="PROMPT", help="one argument: quote it")
    add("--lb", default="127.0.0.1:8001", metavar="HOST:PORT", help="the load balancer's gRPC (default 127.0.0.1:8001)")
    add("--model", default="", metavar="NAME", help="its name as served (default: the only one)")
    add("--max-tokens", type=int, default=64, metavar="N", help="most tokens to generate (default 64)")
    add("--temperature", type=float, default=0.0, metavar="T", help="sampling temperature (default 0: greedy)")
    add("--seed", type=int, default=0, metavar="N", help="sampling seed (default 0)")
    add_timeout(send, 120.0)
    add_api_key(send)
    add_tls_dir(send)
    send.set_defaults(run=generate)

    for command in (admin, certs, explain, journal, kv, regions, top, topology, transfer_commands):
        command.add_command(commands)
    # Researchers' commands: the library knows only that they may be installed.
    if lab:
        importlib.import_module(f"{LAB}.cli").add_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns its exit status, which is 1 if the suite refuses or does not answer."""
    parser = _parser()
    words = sys.argv[1:] if argv is None else argv
    if words and words[0] in LAB_COMMANDS and importlib.util.find_spec(LAB) is None:
        parser.error(f"{words[0]} is a command of the laboratory, the package {LAB}, which is not installed here")
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        status: int = arguments.run(arguments)
    except PinyonError as error:
        sys.stderr.write(f"pinyon: {printable(error.message)}\n")
        return 1
    except BrokenPipeError:  # the reader has closed the pipe (``| head``): nothing may be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    return status
