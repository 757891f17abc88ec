"""What ``./dev bench goodput`` says of what it has measured, all of it or a part."""

from __future__ import annotations

from pathlib import Path

from bench import goodput
from bench.goodput import IN_TURN, LITERAL, OWN, OWN_SSD, PARTS, SYSTEMS, TEXT, WHOLE
from bench.report import Report

RATES = {LITERAL: 8.0, TEXT: 8.5, WHOLE: 8.8, OWN: 10.0, OWN_SSD: 11.0}


def aims(report: Report) -> dict[str, tuple[float | None, bool]]:
    goodput._aims(report, ["conversation"], (8,), quick=False)
    return {aim.name.removeprefix("conversation, 8 instances: "): (aim.measured, aim.met) for aim in report.aims}


def measured(*names: str) -> Report:
    beside = {"p99_s": 7.5, "attainment_longest_tenth": 0.85}
    results = {f"conversation, 8 instances, {name}": {"requests_s": RATES[name], **beside} for name in names}
    return Report("goodput", {}, results)


def test_own_placement_is_compared_with_the_strongest_reading() -> None:
    assert aims(measured(*RATES)) == {
        "goodput, of the stronger reading's": (10.0 / 8.8, True),
        "goodput, of the published code's reading": (10.0 / 8.0, True),
        "goodput, with SSDs, of the stronger reading's": (11.0 / 8.8, True),
    }


def test_the_tails_stand_beside_a_ratio() -> None:
    report = measured(*RATES)
    aims(report)
    assert {aim.reason for aim in report.aims} == {
        "P99 7.5 s, the other's 7.5 s; of the longest tenth in time 85.0 % and 85.0 %"
    }


def test_nothing_is_compared_with_a_part_of_the_readings() -> None:
    found = aims(measured(LITERAL, TEXT, OWN))
    assert found["goodput, of the stronger reading's"] == (None, False)
    assert found["goodput, of the published code's reading"] == (10.0 / 8.0, True)
    assert found["goodput, with SSDs, of the stronger reading's"] == (None, False)


def test_where_nothing_was_measured_no_aim_is_met() -> None:
    assert set(aims(measured()).values()) == {(None, False)}


def test_the_parts_are_measured_once_and_what_they_are_compared_with_everywhere() -> None:
    assert goodput._systems("conversation", 8, quick=False) == {**SYSTEMS, **PARTS}
    for trace in goodput.STARTS:
        assert IN_TURN in goodput._systems(trace, 8, quick=False)
        assert goodput._systems(trace, 32, quick=False) == SYSTEMS


def test_traces_that_are_not_there_are_left_out(tmp_path: Path) -> None:
    assert goodput._traces(tmp_path) == {"toolagent": None}
    (tmp_path / "mooncake_synthetic.jsonl.gz").touch()
    assert list(goodput._traces(tmp_path)) == ["synthetic", "toolagent"]
