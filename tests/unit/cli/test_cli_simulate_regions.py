from __future__ import annotations

import json

import pytest

from pinyon.cli import main
from tests.unit.cli.lab_commands import result_of, said

DAY = ("--day", "120")


def test_a_day_is_served_and_costs_something(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["simulate", "--regions", "us:1:12,eu:1:12,moon:0:3:4:2", *DAY, "--workload", "tree", "--seed", "3"]
    assert main(asked) == 0
    seen = capsys.readouterr()
    first = json.loads(seen.out.splitlines()[-1])
    assert set(first["regions"]) == {"us", "eu", "moon", "all"}
    requests = {name: each["requests"] for name, each in first["regions"].items()}
    assert requests["all"] == requests["us"] + requests["eu"] + requests["moon"]
    assert first["regions"]["moon"]["forwarded"] == 1.0, "it has no instances"
    assert first["costs"]["shared"] == 2
    assert first["costs"]["region_local"] >= 2
    assert "clients of" in seen.err
    assert "…" not in seen.err
    assert main([*asked, "--json"]) == 0
    again = capsys.readouterr()
    assert json.loads(again.out) == first, "the same arguments give the same numbers"
    assert not again.err


def test_systems_and_their_parts_may_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    regions = ["simulate", "--regions", "eu:1:4,asia:1:4", *DAY, "--json"]
    assert main([*regions, "--system", "rr"]) == 0
    assert said(capsys)["routing"] == "round_robin", "the first region has the only load balancer"
    chosen = ["--routing", "least_loaded", "--pushing", "outstanding:limit=2", "--round-trip", "asia+eu=400"]
    found = result_of(capsys, [*regions, *chosen])
    assert (found["routing"], found["pushing"]) == ("least_loaded", "outstanding:limit=2")
