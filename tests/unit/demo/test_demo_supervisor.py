"""When what died is started again, by the clock of the test."""

from __future__ import annotations

import socket

import pytest

from pinyon.core.errors import InvalidArgument
from services.cluster import ClusterSpec, lb_ports
from services.supervisor import MAX_PAUSE_S, QUICK_DEATHS_MAX, QUICK_S, Restarts


def quick_deaths(restarts: Restarts, now_s: float) -> list[float | None]:
    """The pauses of who dies at once, until it is given up."""
    pauses: list[float | None] = []
    while not pauses or pauses[-1] is not None:
        pauses.append(restarts.died(now_s))
        if pauses[-1] is not None:
            now_s += pauses[-1]
            restarts.started(now_s)
    return pauses


def test_pauses_double_up_to_a_bound_and_end():
    pauses = quick_deaths(Restarts(0.0), 0.0)
    assert pauses == [0.5, 1, 2, 4, 8, MAX_PAUSE_S, MAX_PAUSE_S, MAX_PAUSE_S, None]
    assert len(pauses) == QUICK_DEATHS_MAX + 1


def test_who_lived_a_while_begins_anew():
    restarts = Restarts(0.0)
    for _ in range(QUICK_DEATHS_MAX):
        assert restarts.died(0.0) is not None
    restarts.started(100.0)
    assert restarts.died(100.0 + QUICK_S) == 0.5
    restarts.started(100.0 + QUICK_S)
    assert quick_deaths(restarts, 100.0 + QUICK_S)[:2] == [0.5, 1]


# -- ports of several load balancers


def spec(lbs: int, **ports: int) -> ClusterSpec:
    return ClusterSpec(lbs=lbs, **{"http_port": 0, "lb_port": 0, "conductor_port": 0, **ports})


def free_run(length: int) -> int:
    """The first of so many ports in a row that are free now."""
    for first in range(20_000, 60_000, length):
        held = [socket.socket() for _ in range(length)]
        try:
            for place, each in enumerate(held):
                each.bind(("127.0.0.1", first + place))
        except OSError:
            continue
        finally:
            for each in held:
                each.close()
        return first
    raise AssertionError("no free ports")


def test_further_load_balancers_take_the_next_ports_that_nobody_has():
    first = free_run(8)
    assert lb_ports(spec(1, http_port=first, lb_port=first + 1)) == [(first, first + 1)]
    assert lb_ports(spec(3, http_port=first, lb_port=first + 1, conductor_port=first + 3)) == [
        (first, first + 1),
        (first + 2, first + 4),
        (first + 5, first + 6),
    ]
    with socket.socket() as other:
        other.bind(("127.0.0.1", first + 2))
        other.listen()
        assert lb_ports(spec(2, http_port=first, lb_port=first + 1))[1] == (first + 3, first + 4)


def test_free_ports_stay_free_ones():
    assert lb_ports(spec(3)) == [(0, 0)] * 3


def test_there_are_no_ports_behind_the_last():
    with pytest.raises(InvalidArgument, match="no port after 65535"):
        lb_ports(spec(2, http_port=65_535))
