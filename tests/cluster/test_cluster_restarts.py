"""``python -m launch up`` restarts services that die, says so, and gives up on those that die again and again."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import time

import psutil
import pytest

from launch import redis_server
from launch.cluster import ClusterSpec, LocalCluster
from launch.supervisor import QUICK_DEATHS_MAX, Supervisor
from tests.cluster.asking import completion, exchanged
from tests.cluster.specs import ONE, cluster_spec, start_again
from tests.cluster.test_cluster_process_life import ANY_PORTS, WAIT_S, children, gone, read_until, suite, wait_gone
from tests.forks import forked

TICK_S = 0.02


def generate(address: str) -> int:
    connection = http.client.HTTPConnection(address, timeout=WAIT_S)
    return exchanged(connection, "/v1/completions", completion(), None).status


def pids(text: str) -> dict[str, int]:
    """Returns the process ids of the services, from the table that was printed."""
    return {name: int(pid) for name, pid in re.findall(r"│ ([a-z]+(?:-[0-9]+)?) +│ ([0-9]+) ", text)}


def redis_of(pid: int) -> int:
    """Returns the process id of the suite's Redis."""
    (found,) = (each for each in children(pid) if re.search("redis|valkey", psutil.Process(each).name()))
    return found


def test_what_is_killed_is_started_again_and_serves():
    with suite() as (process, text):
        assert process.stdout is not None
        out, before = process.stdout.fileno(), pids(text)
        assert set(before) == {"conductor", "kvstore-0", "mixed-0", "lb-0"}, text
        (address,) = re.findall(r"curl -N http://(\S+)/v1/completions", text)
        assert generate(address) == 200
        for name, pid in {**before, "redis": redis_of(process.pid)}.items():
            os.kill(pid, signal.SIGKILL)
            said = read_until(out, f"{name} is back", WAIT_S)
            while not said.endswith("\n"):
                said += os.read(out, 65536).decode()
            assert re.search(rf"{name} was killed by SIGKILL: started again in 0\.5 s; its log: /\S+{name}\.log", said)
            (new,) = re.findall(rf"{name} is back: pid ([0-9]+)", said)
            assert int(new) != pid
            assert not gone(int(new))
            assert ("empty, for it keeps nothing" in said) == (name == "redis")
        deadline = time.monotonic() + WAIT_S
        while (status := generate(address)) != 200:  # the new worker has to register with the new conductor first
            assert status == 503
            assert time.monotonic() < deadline
        started = children(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=WAIT_S) == 0
        wait_gone(started)


def test_what_does_not_live_is_given_up(tmp_path):
    """A service that dies by itself and says why, under a clock that leaves the pauses out."""
    said: list[str] = []
    spec = cluster_spec(**ONE)
    with LocalCluster(spec, tmp_path, forked) as cluster:
        dying = cluster.services["lb-0"]
        dying.arguments += ["--queue-limit", "-1"]  # the service refuses this at its start
        supervisor = Supervisor(cluster.processes, said.append, 0.0)
        started_s = time.monotonic()
        dying.kill()
        deadline = started_s + WAIT_S
        while not any("given up" in line for line in said):
            assert time.monotonic() < deadline, said
            pauses_s = sum(float(pause) for line in said for pause in re.findall("again in ([0-9.]+) s", line))
            supervisor.tick(time.monotonic() - started_s + pauses_s)
            time.sleep(TICK_S)
        count = len(said)
        supervisor.tick(1e9)
        assert len(said) == count, "it was given up"
        assert cluster.services["conductor"].alive
        assert cluster.services["mixed-0"].alive
    assert "lb-0 was killed by SIGKILL" in said[0]
    assert f"given up after {QUICK_DEATHS_MAX + 1} quick deaths in a row; its log: {tmp_path / 'lb-0.log'}" in said[-1]
    assert all(re.search(r"ended with exit code [1-9][0-9]* \(.*queue.limit", line) for line in said[1:]), said
    assert len(said) == QUICK_DEATHS_MAX + 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_while_it_starts_ends_it_at_once(number):
    with suite(ANY_PORTS, "redis (") as (process, text):
        assert process.stdout is not None
        started = children(process.pid)
        process.send_signal(number)
        rest = process.stdout.read().decode()
        assert process.wait(timeout=WAIT_S) == 0
        assert "stopped while starting" in rest, text + rest
        assert "is up" not in rest
        wait_gone(started)


def test_two_load_balancers_both_serve(tmp_path, free_ports):
    first = free_ports(6)
    spec = ClusterSpec(**ONE, lbs=2, http_port=first, lb_port=first + 1)
    with LocalCluster(spec, tmp_path, forked) as cluster:
        places = [cluster.services[f"lb-{index}"].endpoints for index in range(2)]
        assert [each["http"] for each in places] == [f"127.0.0.1:{first}", f"127.0.0.1:{first + 2}"]
        assert [each["grpc"] for each in places] == [f"127.0.0.1:{first + 1}", f"127.0.0.1:{first + 3}"]
        for each in places:
            assert generate(each["http"]) == 200


def test_an_instance_whose_port_was_taken_comes_back_on_another(tmp_path):
    """The system may give a dead instance's port to a client's connection."""
    spec = ClusterSpec(**ONE, http_port=0, lb_port=0)
    with LocalCluster(spec, tmp_path, forked) as cluster:
        service = cluster.services["mixed-0"]
        before = service.endpoints["grpc"]
        service.kill()
        with socket.create_server(("127.0.0.1", int(before.rpartition(":")[2]))):
            start_again(cluster, "mixed-0")
            assert service.endpoints["grpc"] != before
            cluster.wait_serving(time.monotonic() + WAIT_S)
            assert generate(cluster.services["lb-0"].endpoints["http"]) == 200


def test_ports_that_are_found_by_address_stay_while_one_is_dead(tmp_path):
    """Other processes would never learn a new address of a conductor or a load balancer."""
    with LocalCluster(cluster_spec(**ONE), tmp_path, forked) as cluster:
        for who in ("conductor", "lb-0"):
            service = cluster.services[who]
            before = {
                endpoint: service.endpoints[endpoint] for endpoint in ("grpc", "http") if endpoint in service.endpoints
            }
            service.kill()
            for address in before.values():
                with socket.socket() as other, pytest.raises(OSError, match="in use"):
                    other.bind(("127.0.0.1", int(address.rpartition(":")[2])))  # as a search for a free port does
            start_again(cluster, who)
            assert before.items() <= service.endpoints.items()


def test_without_any_redis_the_suite_starts_without_its_store(tmp_path, monkeypatch):
    monkeypatch.setattr(redis_server, "local_redis", lambda: None)
    said: list[str] = []
    cluster = LocalCluster(cluster_spec(**{**ONE, "stores": 1}), tmp_path, forked)
    try:
        cluster.start(said.append)
        assert "no KV store" in said[0]
        assert "--redis-url" in said[0]
        assert not cluster.of_kind("kvstore")
    finally:
        cluster.stop()
