from __future__ import annotations

from pathlib import Path

from bench import goodput
from bench.goodput import IN_TURN, LITERAL, OWN, OWN_SSD, PARTS, PREBLE, SYSTEMS, TEXT, WHOLE
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
        "goodput, of the reading by the published code's bound": (10.0 / 8.0, True),
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
    assert found["goodput, of the reading by the published code's bound"] == (10.0 / 8.0, True)
    assert found["goodput, with SSDs, of the stronger reading's"] == (None, False)


def test_where_nothing_was_measured_no_aim_is_met() -> None:
    assert set(aims(measured()).values()) == {(None, False)}


def test_parts_are_measured_once_and_their_baseline_everywhere() -> None:
    assert goodput._systems("conversation", 8, quick=False) == {**SYSTEMS, **PARTS}
    for trace in goodput.STARTS:
        assert IN_TURN in goodput._systems(trace, 8, quick=False)
        assert goodput._systems(trace, 32, quick=False) == SYSTEMS


def test_by_how_much_others_are_exceeded() -> None:
    report = measured(*RATES)
    report.results["conversation, 8 instances, preble"] = {"requests_s": 9.5}
    report.results["toolagent, 8 instances, preble"] = {"none_from_requests_s": 4.4}
    report.results["toolagent, 8 instances, pinyon"] = {"requests_s": 20.0}
    goodput._ratios(report, ["conversation", "toolagent"], (8, 32))
    assert report.baseline == {
        f"conversation, 8 instances: goodput, of that of {name}": ratio
        for name, ratio in {LITERAL: 1.25, TEXT: 1.176, WHOLE: 1.136, OWN_SSD: 0.909, PREBLE: 1.053}.items()
    }


def test_another_seed_is_for_those_that_hash() -> None:
    assert goodput._hashed("pinyon", 3) == "pinyon:seed=3"
    assert goodput._hashed("dualmap:slo_s=5", 3) == "dualmap:slo_s=5,seed=3"
    assert goodput._hashed("preble", 3) == "preble"
    assert goodput._hashed("pinyon", 0) == "pinyon"


def test_traces_that_are_not_there_are_left_out(tmp_path: Path) -> None:
    assert goodput._traces(tmp_path) == {"toolagent": None}
    (tmp_path / "mooncake_synthetic.jsonl.gz").touch()
    assert list(goodput._traces(tmp_path)) == ["synthetic", "toolagent"]
