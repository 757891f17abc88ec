"""Obstacles to a suite's start are found before anything is started."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from launch import ports
from launch.__main__ import command_line, file_faults, main, option_faults
from launch.cluster import ClusterSpec, LocalCluster
from launch.ports import Port, port_faults
from launch.process import ServiceProcess, await_ready
from launch.regions import LocalRegions, RegionsSpec
from pinyon.core.errors import InvalidArgument, Unavailable


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def http(port: int) -> Port:
    return Port("HTTP", "--http-port", "127.0.0.1", port)


def test_a_taken_port_names_its_holder_and_the_option(taken):
    (fault,) = port_faults([http(0), http(taken)])
    assert f"port {taken} for HTTP is taken by pid {os.getpid()} (" in fault
    assert "--http-port N takes another one" in fault


def test_holder_is_the_listener_on_the_address_asked_for(taken, monkeypatch):
    monkeypatch.setattr(ports, "_process_with", lambda inode: inode)
    with socket.create_server(("127.0.0.2", taken)) as other, socket.create_server(("127.0.0.3", taken)) as third:
        for host, listening in (("127.0.0.2", other), ("127.0.0.3", third)):
            assert ports.holder(taken, host) == str(os.fstat(listening.fileno()).st_ino)


def test_ports_that_nobody_has_are_no_faults(free_ports):
    assert port_faults([http(0), http(0), http(free_ports(1))]) == []


def test_one_port_for_two_is_a_fault(free_ports):
    port = free_ports(1)
    (fault,) = port_faults([http(port), Port("gRPC", "--lb-port", "127.0.0.1", port)])
    assert f"port {port} for gRPC is wanted for HTTP, too; --lb-port" in fault


def test_a_port_or_address_that_is_none_is_a_fault(free_ports):
    assert "is none" in port_faults([http(70_000)])[0]
    (fault,) = port_faults([Port("HTTP", "--http-port", "192.0.2.1", free_ports(1))])
    assert "cannot be had on 192.0.2.1" in fault


def test_of_a_run_of_ports_the_first_fault_is_said(free_ports):
    first = free_ports(3)
    with socket.create_server(("127.0.0.1", first + 1)), socket.create_server(("127.0.0.1", first + 2)):
        run = [Port(f"the metrics of {n}", "--metrics-base-port", "127.0.0.1", first + n) for n in range(3)]
        (fault,) = port_faults(run)
    assert "the metrics of 1" in fault


def test_missing_files_are_named_by_their_options():
    missing = ClusterSpec(model="/nowhere", more_models="/neither", engine_profile="nothing", api_keys_file="/no/keys")
    faults = file_faults(missing)
    assert [fault.partition(":")[0] for fault in faults] == [
        "--model",
        "--more-models",
        "--engine-profile",
        "--api-keys-file",
    ]
    assert file_faults(ClusterSpec(engine_profile="tiny")) == []


def test_up_says_all_of_it_and_starts_nothing(no_start, taken, tmp_path, capsys):
    ports = [*FREE_PORTS, "--http-port", str(taken)]
    assert main(["up", *ports, "--model", str(tmp_path / "none"), "--log-dir", str(tmp_path / "a" / "logs")]) == 2
    said = capsys.readouterr().out
    assert "--model: no model folder" in said
    assert f"port {taken}" in said


def test_a_folder_that_cannot_be_made_hides_no_missing_model(no_start, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["up", *FREE_PORTS, "--model", "/nowhere", "--journal", str(tmp_path / "file" / "j")]) == 2
    said = capsys.readouterr().out
    assert "--model: no model folder" in said
    assert "cannot make the folder" in said


@pytest.fixture
def no_start(monkeypatch):
    monkeypatch.setattr(ServiceProcess, "spawn", lambda self: pytest.fail("it was started"))
    monkeypatch.setattr("launch.cluster.find_redis", lambda *_, **__: pytest.fail("Redis was started"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)


FREE_PORTS = ["--lb-port=0", "--conductor-port=0", "--metrics-base-port=0", "--http-port=0"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--engine-profile l4-llama-8b", "--engine-profile is of use only with --engine paced"),
        ("--attention-kernel whole --engine instant", "--attention-kernel is of use only with --engine numpy"),
        ("--region-delay-ms 80", "--region-delay-ms is of use only with --regions"),
        ("--static-peers", "--static-peers is of use only with --regions"),
        ("--controller-port 7200", "--controller-port is of use only with --regions"),
        ("--regions us,eu --static-peers --controller-port 0", "--controller-port is of use only with --regions, and"),
        ("--tls-dir tls", "--tls-dir is of use only with --tls"),
        ("--stores 0 --redis-url redis://localhost", "--redis-url is of use only with --stores 1 or more"),
        ("--stores 0 --store-mib 99", "--store-mib is of use only with --stores 1 or more"),
        ("--host 0.0.0.0", "--host 0.0.0.0 needs --tls and --api-keys-file, or --allow-insecure"),
        ("--host 0.0.0.0 --tls", "--host 0.0.0.0 needs --api-keys-file, or --allow-insecure"),
        ("--prefill 0 --decode 0", "there must be workers that prefill and workers that decode: --prefill"),
    ],
)
def test_up_names_the_option_that_another_one_needs(no_start, tmp_path, monkeypatch, capsys, options, said):
    monkeypatch.chdir(tmp_path)
    assert main(["up", *FREE_PORTS, *options.split()]) == 2
    assert f"pinyon: {said}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        "--engine paced --engine-profile l4-llama-8b",
        "--regions us,eu --region-delay-ms 80 --controller-port 0",
        "--regions us,eu --static-peers",
        "--tls --tls-dir tls --host 0.0.0.0 --api-keys-file keys",
        "--host 0.0.0.0 --allow-insecure",
        "--host ::1",
        "--stores 0",
    ],
)
def test_options_with_what_they_need_are_no_faults(options):
    assert option_faults(command_line().parse_args(["up", *options.split()])) == []


def test_up_refuses_a_bad_line_of_keys_before_it_starts(no_start, tmp_path, capsys):
    (tmp_path / "keys").write_text("sk-1 acme\nsk-2\n")
    assert main(["up", *FREE_PORTS, "--api-keys-file", str(tmp_path / "keys")]) == 2
    said = capsys.readouterr().out
    assert "--api-keys-file: the API keys file line 2 is not 'KEY TENANT'" in said
    assert "sk-2" not in said


def test_paths_are_of_the_folder_that_dev_was_called_in(no_start, tmp_path, monkeypatch, capsys):
    (tmp_path / "keys").write_text("sk-1\n")
    (tmp_path / "file").touch()
    monkeypatch.chdir("/")
    monkeypatch.setenv("PINYON_CALLER_DIR", str(tmp_path))
    assert main(["up", *FREE_PORTS, "--api-keys-file", "keys", "--log-dir", "file", "--model", "."]) == 2
    said = capsys.readouterr().out
    assert "--api-keys-file: the API keys file line 1" in said
    assert f"--model: {tmp_path.name}: config.json is missing" in said
    assert "cannot make the folder file: file is no folder" in said


def test_services_take_no_modules_from_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "__init__.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    service = ServiceProcess("lb-0", "services.lb", ["--version"], tmp_path / "lb-0.log")
    service.spawn()
    try:
        assert service.wait(60)
        assert (tmp_path / "lb-0.log").read_text().startswith("pinyon ")
    finally:
        service.kill()


@pytest.mark.parametrize(("called", "shown"), [("./dev", "./dev up"), ("", "python -m launch up")])
def test_help_names_the_command_as_it_was_called(called, shown, capsys, monkeypatch):
    monkeypatch.setenv("PINYON_DEV", called)
    with pytest.raises(SystemExit, match="0"):
        main(["up", "--help"])
    assert capsys.readouterr().out.startswith(f"usage: {shown} ")


# -- folders


def test_folders_for_journals_and_logs_are_made(tmp_path):
    cluster = LocalCluster(ClusterSpec(journal=str(tmp_path / "a" / "journals")), tmp_path / "b" / "logs")
    assert not [*tmp_path.iterdir()], "not before it starts"
    cluster.make_folders()
    assert (tmp_path / "a" / "journals").is_dir()
    assert (tmp_path / "b" / "logs").is_dir()


@pytest.mark.parametrize("regions", [[], ["--regions", "us,eu"]], ids=["one", "regions"])
def test_what_is_refused_leaves_no_folders_behind(regions, no_start, tmp_path, capsys):
    folders = ["--journal", str(tmp_path / "journals"), "--log-dir", str(tmp_path / "logs")]
    files = ["--tls", "--tls-dir", str(tmp_path / "tls")]
    assert main(["up", *FREE_PORTS, *regions, *folders, *files, "--model", "/nowhere"]) == 2
    assert "--model: no model folder" in capsys.readouterr().out
    assert not [*tmp_path.iterdir()]


def test_start_makes_the_folders(tmp_path, monkeypatch):
    """The folders of regions are made before the controller starts, whose log is in one of them."""

    def started(*_: object, **__: object) -> None:
        raise Unavailable("it starts")

    monkeypatch.setattr(ServiceProcess, "spawn", started)
    monkeypatch.setattr("launch.cluster.find_redis", started)
    spec = ClusterSpec(journal=str(tmp_path / "journals"))
    for whole in (
        LocalCluster(spec, tmp_path / "logs"),
        LocalRegions(RegionsSpec(("us", "eu"), spec), tmp_path / "regions"),
    ):
        with pytest.raises(Unavailable, match="it starts"):
            whole.start()
    for name in ("journals", "logs", "regions/us", "regions/eu"):
        assert (tmp_path / name).is_dir(), name


def test_a_file_in_place_of_a_folder_is_a_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match="cannot make the folder") as error:
        LocalCluster(ClusterSpec(journal=str(tmp_path / "file")), tmp_path)
    assert error.value.field == "journal"
    with pytest.raises(InvalidArgument, match="cannot make the folder"):
        LocalCluster(ClusterSpec(), tmp_path / "file" / "logs")


def test_demo_says_so_where_logs_cannot_be_kept(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["demo", "--keep-logs", str(tmp_path / "file")]) == 1
    assert "FAILED: cannot make the folder" in capsys.readouterr().out


# -- ports of metrics


def test_metrics_ports_follow_the_base_in_a_fixed_order():
    spec = ClusterSpec(prefill=1, decode=2, stores=1, lbs=1, metrics_base_port=9000)
    assert [spec.metrics_port(name) for name in ("conductor", "lb-0", "prefill-0", "decode-0", "decode-1")] == [
        *range(9000, 9005)
    ]
    assert spec.metrics_port("kvstore-0") == 9005
    assert ClusterSpec().metrics_port("lb-0") == 0
    with pytest.raises(InvalidArgument, match="there are no 7 ports from 65530 on"):
        ClusterSpec(metrics_base_port=65_530)


def test_regions_have_metrics_ports_one_after_the_other(tmp_path):
    small = ClusterSpec(prefill=0, decode=0, mixed=1, stores=0, metrics_base_port=9000)
    regions = LocalRegions(RegionsSpec(("us", "eu"), small), tmp_path)
    try:
        assert [port.port for port in regions.ports if "metrics" in port.what] == [*range(9000, 9007)]
    finally:
        regions.stop()


class Fake:
    """Processes that announce the addresses they were told to listen at, and end."""

    def __call__(self, module, arguments, log, ready_fd):
        said = {}
        for name, option in (("grpc", "--listen"), ("metrics", "--metrics-listen"), ("http", "--http-listen")):
            if option in arguments:
                said[name] = arguments[arguments.index(option) + 1]
        code = f"import os; os.write({ready_fd}, {json.dumps(said)!r}.encode() + b'\\n')"
        return subprocess.Popen([sys.executable, "-c", code], pass_fds=(ready_fd,))


def started(service: ServiceProcess) -> ServiceProcess:
    service.spawn()
    service.wait_ready(time.monotonic() + 60)
    return service


def restarted(service: ServiceProcess) -> str:
    """Returns the metrics address of the service after one more start."""
    assert service.wait(60)
    service.start_again()
    service.wait_ready(time.monotonic() + 60)
    assert service.wait(60)
    return service.endpoints["metrics"]


def test_who_is_started_again_keeps_its_metrics_port(tmp_path, free_ports):
    first = free_ports(3)
    cluster = LocalCluster(ClusterSpec(metrics_base_port=first), tmp_path, Fake())
    service = started(cluster._make("prefill-0", "worker"))
    assert service.endpoints["metrics"] == f"127.0.0.1:{first + 2}"
    assert restarted(service) == f"127.0.0.1:{first + 2}"
    with socket.create_server(("127.0.0.1", first + 2)):
        assert restarted(service) == "127.0.0.1:0"


def test_a_free_metrics_port_is_kept_at_a_restart(tmp_path, free_ports):
    """The system chose the port at the first start."""
    cluster = LocalCluster(ClusterSpec(), tmp_path, Fake())
    service = started(cluster._make("prefill-0", "worker"))
    service.endpoints["metrics"] = chosen = f"127.0.0.1:{free_ports(1)}"
    assert restarted(service) == chosen


def test_the_controller_keeps_its_metrics_port(tmp_path, free_ports):
    port = free_ports(1)
    regions = LocalRegions(RegionsSpec(("us", "eu"), ClusterSpec(metrics_base_port=port)), tmp_path, Fake())
    assert regions.controller is not None
    controller = started(regions.controller)
    assert restarted(controller) == f"127.0.0.1:{port}"
    with socket.create_server(("127.0.0.1", port)):
        assert restarted(controller) == "127.0.0.1:0"
    regions.stop()


def test_keys_of_the_environment_or_a_file_count(tmp_path):
    """A load balancer that is told to have no keys would take no notice of those that its file names."""
    cluster = LocalCluster(ClusterSpec(), tmp_path, Fake())
    assert "--api-keys-file" not in cluster._make("lb-0", "lb").arguments
    cluster.spec = ClusterSpec(api_keys_file="keys")
    arguments = cluster._make("lb-0", "lb").arguments
    assert arguments[arguments.index("--api-keys-file") + 1] == "keys"


# -- who ends while others start


def test_who_ends_while_starting_is_found_before_who_is_slow(tmp_path):
    def launch(module, arguments, log, ready_fd):
        return subprocess.Popen([sys.executable, "-c", arguments[0]], pass_fds=(ready_fd,), stdout=log)

    slow = ServiceProcess("slow", "", ["import signal; signal.pause()"], tmp_path / "slow.log", launch)
    ends = ServiceProcess("ends", "", ["print('no such key')"], tmp_path / "ends.log", launch)
    try:
        slow.spawn()
        ends.spawn()
        with pytest.raises(Unavailable, match="ends ended while starting; its log ends with:\nno such key"):
            await_ready([slow, ends], time.monotonic() + 30)
    finally:
        slow.kill()
        ends.kill()
    with pytest.raises(OSError, match="Bad file descriptor"):
        slow.announced()  # its pipe is closed
