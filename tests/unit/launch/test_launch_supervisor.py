"""The times at which a dead service is restarted, by the test's clock."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launch import ports
from launch.cluster import ClusterSpec, lb_ports
from launch.process import ServiceProcess
from launch.supervisor import MAX_PAUSE_S, QUICK_DEATHS_MAX, QUICK_S, Restarts, Supervisor
from pinyon.core.errors import InvalidArgument
from tests.ports import kept_port


def quick_deaths(restarts: Restarts, now_s: float) -> list[float | None]:
    """Returns the pauses of a service that dies at once, until it is given up."""
    pauses: list[float | None] = []
    while not pauses or pauses[-1] is not None:
        pauses.append(restarts.died(now_s))
        if pauses[-1] is not None:
            now_s += pauses[-1]
            restarts.started_s = now_s
    return pauses


def test_pauses_double_up_to_a_bound_and_end():
    pauses = quick_deaths(Restarts(0.0), 0.0)
    assert pauses == [0.5, 1, 2, 4, 8, MAX_PAUSE_S, MAX_PAUSE_S, MAX_PAUSE_S, None]
    assert len(pauses) == QUICK_DEATHS_MAX + 1


def test_who_lived_a_while_begins_anew():
    restarts = Restarts(0.0)
    for _ in range(QUICK_DEATHS_MAX):
        assert restarts.died(0.0) is not None
    restarts.started_s = 100.0
    assert restarts.died(100.0 + QUICK_S) == 0.5
    restarts.started_s = 100.5 + QUICK_S
    assert quick_deaths(restarts, 100.5 + QUICK_S)[:2] == [1, 2]


def test_who_never_served_died_quickly_however_long_that_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.supervisor.QUICK_DEATHS_MAX", 1)
    restarts = Restarts(0.0)
    assert restarts.died(2 * QUICK_S, served=False) == 0.5
    assert restarts.died(4 * QUICK_S, served=False) is None


# -- ports of several load balancers


def test_further_load_balancers_take_the_next_free_ports(monkeypatch):
    others: set[int] = set()
    monkeypatch.setattr(ports, "is_free", lambda host, port: port not in others)
    first = 20_000
    assert lb_ports(ClusterSpec(lbs=1, http_port=first, lb_port=first + 1)) == [(first, first + 1)]
    assert lb_ports(ClusterSpec(lbs=3, http_port=first, lb_port=first + 1, conductor_port=first + 3)) == [
        (first, first + 1),
        (first + 2, first + 4),
        (first + 5, first + 6),
    ]
    others.add(first + 2)
    assert lb_ports(ClusterSpec(lbs=2, http_port=first, lb_port=first + 1))[1] == (first + 3, first + 4)


def test_a_port_where_somebody_listens_is_not_free():
    with kept_port() as port:
        assert ports.is_free("127.0.0.1", port)
        with socket.create_server(("127.0.0.1", port)):
            assert not ports.is_free("127.0.0.1", port)


def test_free_ports_stay_free_ones():
    assert lb_ports(ClusterSpec(lbs=3)) == [(0, 0)] * 3


def test_there_are_no_ports_behind_the_last():
    with pytest.raises(InvalidArgument, match="no port after 65535"):
        lb_ports(ClusterSpec(lbs=2, http_port=65_535))


# -- a start that fails by itself


class Faulty:
    """A service that runs some code, and does not start while ``fault`` is set."""

    def __init__(self, folder: Path, code: str = "pass") -> None:
        self.fault: OSError | None = None
        self.service = ServiceProcess("decode-0", code, [], folder / "decode-0.log", self.launch)

    def launch(self, code: str, *_: object) -> subprocess.Popen[bytes]:
        if self.fault is not None:
            raise self.fault
        return subprocess.Popen([sys.executable, "-c", code])


def test_a_killed_service_has_ended_and_leaves_no_pipe(tmp_path):
    service = Faulty(tmp_path, "import time; time.sleep(600)").service
    files = set(os.listdir("/proc/self/fd"))
    service.spawn()
    service.kill()
    assert service.process is not None
    assert service.process.returncode == -signal.SIGKILL
    assert set(os.listdir("/proc/self/fd")) == files


def test_a_process_that_cannot_be_started_is_tried_again(tmp_path):
    """A passing trouble, such as no memory for a process, does not end the whole suite."""
    faulty, said = Faulty(tmp_path), []
    faulty.service.spawn()
    assert faulty.service.wait(60)
    supervisor = Supervisor([faulty.service], said.append, 0.0)
    supervisor.tick(1.0)
    faulty.fault = OSError(errno.EAGAIN, "Resource temporarily unavailable")
    supervisor.tick(1.5)
    assert "cannot be started: [Errno 11] Resource temporarily unavailable: started again in 1 s" in said[-1]
    supervisor.tick(2.0)
    faulty.fault, before = None, faulty.service.pid
    supervisor.tick(2.5)
    assert faulty.service.pid != before
    assert faulty.service.wait(60)
    faulty.fault = OSError(errno.EAGAIN, "Resource temporarily unavailable")
    for now_s in range(3, 100):
        supervisor.tick(float(now_s))
    assert "given up" in said[-1]
