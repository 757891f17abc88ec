from __future__ import annotations

import json
from typing import Any

import pytest

from pinyon.cli import main

DAY = ("--day", "120")


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


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
    assert main([*regions, *chosen]) == 0
    found = said(capsys)
    assert (found["routing"], found["pushing"]) == ("least_loaded", "outstanding:limit=2")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--regions", "us:1"], "NAME:INSTANCES:CLIENTS"),
        (["--regions", "us:1:2:3:4:5"], "NAME:INSTANCES:CLIENTS"),
        (["--regions", "us:x:2"], "numbers from 0"),
        (["--regions", "us:1:2,us:1:2"], "there twice"),
        (["--regions", "mars:1:2"], "mars:1:2:HOUR"),
        (["--regions", "us:1:2:nan"], "no number"),
        (["--regions", "us:1:2:30"], "hour from 0 to 24"),
        (["--regions", "us:0:2"], "has instances"),
        (["--regions", "us:1:0"], "nobody has clients"),
        (["--regions", "us:1:2", "--system", "none"], "gateway"),
        (["--regions", "us:1:2", "--workload", "chess"], "wildchat"),
        (["--regions", "us:1:2", "--routing", "none"], "known: skywalker"),
        (["--regions", "us:1:2", "--day", "1"], "--day must be"),
        (["--regions", "us:1:2", "--round-trip", "us+eu=1"], "two of the regions"),
        (["--regions", "us:1:2,eu:1:2", "--round-trip", "us+eu=x"], "no number of ms"),
        (["--regions", "us:1:2", "--rate", "2"], "--rate says nothing"),
        (["--regions", "us:1:2", "trace.jsonl"], "no trace is read"),
        (["--workload", "tree", "trace.jsonl"], "--workload is of --regions"),
        ([], "a trace is missing, or --regions"),
    ],
)
def test_what_is_wrong_is_said(wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *wrong]) == 1
    assert message in capsys.readouterr().err
