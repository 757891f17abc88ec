"""The whole suite as local processes, until Ctrl-C or for a demonstration."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from launch import vllm
from launch.cluster import ClusterSpec, LocalCluster, options
from launch.hints import hints
from launch.ports import port_faults
from launch.process import ServiceProcess
from launch.regions import LocalRegions, RegionsSpec
from launch.supervisor import LOOK_S, Supervisor
from pinyon.core.address import is_loopback
from pinyon.core.errors import PinyonError
from pinyon.runtime.arguments import Parser


def _add_up(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for name, option in options(ClusterSpec).items():
        add(f"--{name.replace('_', '-')}", **option)
    add(
        "--regions",
        default="",
        metavar="NAME,NAME,...",
        help="a whole suite for each of these regions, whose load balancers forward to each other; the ports are "
        "those of the first",
    )
    for name, option in options(RegionsSpec).items():
        add(f"--{name.replace('_', '-')}", **option)
    add("--log-dir", type=Path, default=None, help="keep the services' logs here; default: deleted at the end")


def use_vllm(arguments: argparse.Namespace) -> None:
    """Makes vLLM ready, and fills in what was not said: two servers, and a small checkpoint that is made here."""
    defaults = command_line().parse_args(["up"])
    if (arguments.prefill, arguments.decode) == (defaults.prefill, defaults.decode):
        arguments.prefill = arguments.decode = 0
        arguments.mixed = arguments.mixed or 2
    vllm.prepare()
    if not arguments.model:
        arguments.model = str(vllm.small_checkpoint())


def option_faults(arguments: argparse.Namespace) -> list[str]:
    """Returns a sentence for each option of ``up`` without effect, and one for a host that would be refused."""
    given, defaults = vars(arguments), vars(command_line().parse_args(["up"]))
    regions = given["regions"] != defaults["regions"]
    needs = {
        "engine_profile": ("--engine paced", given["engine"] == "paced"),
        "attention_kernel": ("--engine numpy", given["engine"] == "numpy"),
        "region_delay_ms": ("--regions", regions),
        "static_peers": ("--regions", regions),
        "controller_port": ("--regions, and without --static-peers", regions and not given["static_peers"]),
        "tls_dir": ("--tls", given["tls"]),
        "redis_url": ("--stores 1 or more", given["stores"]),
        "store_mib": ("--stores 1 or more", given["stores"]),
    }
    faults = [
        f"--{name.replace('_', '-')} is of use only with {need}"
        for name, (need, met) in needs.items()
        if given[name] != defaults[name] and not met
    ]
    host, needed = given["host"], {"--tls": given["tls"], "--api-keys-file": given["api_keys_file"]}
    if not is_loopback(host.strip("[]")) and not given["allow_insecure"] and not all(needed.values()):
        lacking = " and ".join(option for option, value in needed.items() if not value)
        faults.append(f"--host {host} needs {lacking}, or --allow-insecure: others reach it")
    return faults


def file_faults(spec: ClusterSpec) -> list[str]:
    """Returns a sentence for each file that services would refuse to start with."""
    from pinyon.model.card import load_card
    from pinyon.profiles.engine_profile import load_profile
    from pinyon.runtime.api_keys import read_api_keys

    checks: list[tuple[str, Callable[[str], object], str]] = [
        ("--model", load_card, spec.model),
        *(("--more-models", load_card, folder) for folder in spec.models.values()),
        ("--engine-profile", load_profile, spec.engine_profile),
        ("--api-keys-file", read_api_keys, spec.api_keys_file),
    ]
    faults: list[str] = []
    for option, read, name in checks:
        try:
            if name:
                read(name)
        except PinyonError as error:
            faults.append(f"{option}: {error.message}")
    return faults


def _show_services(console: Console, services: Iterable[ServiceProcess], title: str, prefix: str = "") -> None:
    columns = [Column(name, overflow="fold") for name in ("service", "pid", "gRPC", "other endpoints")]
    table = Table(*columns, title=title, title_justify="left")
    for service in services:
        others = " ".join(f"{key}={value}" for key, value in sorted(service.endpoints.items()) if key != "grpc")
        table.add_row(prefix + service.name, str(service.pid), service.endpoints.get("grpc", ""), others)
    console.print(table)


def _show(console: Console, cluster: LocalCluster, controller: ServiceProcess | None) -> None:
    for service in cluster.of_kind("lb")[1:]:
        places = " and ".join(
            f"{kind} at {service.endpoints[name]}" for name, kind in (("http", "HTTP"), ("grpc", "gRPC"))
        )
        console.print(f"{service.name} serves {places}", highlight=False)
    if not cluster.spec.stores:
        console.print("There is no KV store: what a worker has dropped is computed again.", style="yellow")
    console.print(f"logs: {cluster.log_dir}\n")
    console.print("Try it from another terminal:\n", style="bold")
    spec, access = cluster.spec, cluster.access
    for line in hints(
        cluster.http,
        cluster.conductor,
        spec.served_model_name or (Path(spec.model).resolve().name if spec.model else "pinyon-tiny"),
        authority=access.authority,
        admin=access.admin,
        api_keys_file=spec.api_keys_file,
        controller="" if controller is None else controller.endpoints["grpc"],
    ):
        # Rich would wrap these lines, which users copy.
        sys.stdout.write(f"  {line}\n\n")
    sys.stdout.flush()
    console.print("Ctrl-C stops everything.", style="dim")


def up(arguments: argparse.Namespace) -> int:
    """Starts the suite, shows its endpoints, restarts services that die, and stops everything at Ctrl-C.

    Returns the exit status: 0, 1 if the suite cannot start, 2 for invalid options or files."""
    console = Console()
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    if arguments.engine == "vllm":
        try:
            use_vllm(arguments)
        except PinyonError as error:
            say(f"pinyon: {error.message}", style="red")
            return 1
    faults = option_faults(arguments)
    stop = threading.Event()
    starting = False

    def end(*_: object) -> None:
        nonlocal starting
        stop.set()
        if starting:
            starting = False
            raise KeyboardInterrupt  # while starting, nothing looks at the event

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    whole: LocalCluster | LocalRegions | None = None
    try:
        spec = ClusterSpec(**{name: getattr(arguments, name) for name in options(ClusterSpec)})
        faults += file_faults(spec)
        if regions := [name.strip() for name in arguments.regions.split(",") if name.strip()]:
            chosen = {name: getattr(arguments, name) for name in options(RegionsSpec)}
            whole = LocalRegions(RegionsSpec(tuple(regions), spec, **chosen), arguments.log_dir)
        else:
            whole = LocalCluster(spec, arguments.log_dir)
        faults += port_faults(whole.ports)
    except PinyonError as error:
        faults.append(error.message)
    for fault in faults:
        say(f"pinyon: {fault}", style="red")
    if whole is None or faults:
        if whole is not None:
            whole.stop()
        return 2

    def say_of(name: str, line: str) -> None:
        say(f"{name}: {line}" if name else line)

    try:
        starting = True
        with console.status("starting …"):
            whole.start(say)
        starting = False
        supervisors = []
        for name, cluster in whole.clusters.items():
            title = f"the region {name}" if name else "pinyon is up"
            _show_services(console, cluster.services.values(), title, cluster.spec.prefix)
            supervisors.append(Supervisor(cluster.processes, partial(say_of, name), time.monotonic()))
        if whole.controller is not None:
            _show_services(console, [whole.controller], "of all regions")
            supervisors.append(Supervisor([whole.controller], say, time.monotonic()))
        _show(console, next(iter(whole.clusters.values())), whole.controller)
        while not stop.wait(LOOK_S):
            for supervisor in supervisors:
                supervisor.tick(time.monotonic())
        console.print("stopping …")
    except KeyboardInterrupt:
        console.print("stopped while starting")
        return 0
    except PinyonError as error:
        starting = False
        console.print(f"pinyon: {error.message}", style="red", markup=False)
        return 1
    finally:
        starting = False
        whole.stop()
    console.print("stopped")
    return 0


def command_line() -> argparse.ArgumentParser:
    """Returns the parser of both commands. ``./dev`` passes the name under which it was called."""
    prog = os.environ.get("PINYON_DEV") or "python -m launch"
    parser = Parser(prog=prog, description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_up(commands.add_parser("up", help="start a local cluster and keep it until Ctrl-C", allow_abbrev=False))
    demo_parser = commands.add_parser("demo", help="the main job on real input, with and without reuse")
    demo_parser.add_argument("--keep-logs", type=Path, default=None, metavar="DIR", help="keep the services' logs here")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = command_line().parse_args(argv)
    if caller := os.environ.pop("PINYON_CALLER_DIR", ""):
        os.chdir(caller)  # ./dev changed to the checkout; paths are relative to the caller's folder
    if arguments.command == "up":
        return up(arguments)
    from launch.demo import run_demo

    return run_demo(arguments.keep_logs)


if __name__ == "__main__":
    sys.exit(main())
