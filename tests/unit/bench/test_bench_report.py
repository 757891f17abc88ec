"""The output of benchmarks: one JSON object on the last line, aims met or missed, correct percentiles."""

import json
import os
import signal
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bench.__main__
from bench.__main__ import names
from bench.load import cpu_seconds, http_request
from bench.report import Aim, Report, percentile, summary


def test_a_report_is_one_json_line(capsys):
    report = Report("example", {"seed": 1})
    report.results["p50_us"] = 3.0
    report.aims.append(Aim("cpu us", 10, 11.0))
    report.emit()
    (line,) = capsys.readouterr().out.splitlines()
    read = json.loads(line)
    assert {"name", "config", "results", "baseline", "aims"} == set(read)
    assert read["aims"] == [{"name": "cpu us", "target": 10, "measured": 11.0, "met": False}]


@pytest.mark.parametrize(
    ("aim", "met"), [(Aim("a", 1, 1), True), (Aim("a", 1, 2), False), (Aim("a", 2, 3, at_most=False), True)]
)
def test_an_aim_has_a_good_side(aim, met):
    assert aim.met is met


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.sampled_from([0, 1, 50, 99, 100]))
def test_percentiles_by_nearest_rank(values, percent):
    found = percentile(values, percent)
    at_most = sum(value <= found for value in values)
    below = sum(value < found for value in values)
    assert found in values
    assert at_most >= percent / 100 * len(values)
    assert below <= percent / 100 * len(values)


def test_summary_is_median_min_max():
    assert summary([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}


def test_the_benchmarks_are_found_and_their_parts_are_not():
    found = set(names())
    assert {"e2e", "reuse", "conductor", "blocks", "placement", "dualmap", "index", "kernels", "sharing"} <= found
    assert "transfer" in found
    assert not [name for name in found if "_" in name or name in ("peers", "pictures", "report")]


def test_requests_carry_their_length():
    head, _, body = http_request("h:1", "/p", {"a": "é"}).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    assert json.loads(body) == {"a": "é"}


def test_cpu_time_grows_with_work():
    before, began_s = cpu_seconds([os.getpid()]), time.process_time()
    while time.process_time() < began_s + 0.05:  # five ticks of the system's clock
        pass
    assert cpu_seconds([os.getpid()]) > before


def test_arguments_are_looked_at_before_anything_is_compiled(monkeypatch):
    def environment(*, python: bool) -> dict[str, str]:
        assert python, "it would compile"
        return dict(os.environ)

    monkeypatch.setattr(bench.__main__, "environment", environment)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert bench.__main__.main(["conductor", "--instances", "0"]) == 2
    assert bench.__main__.main(["--nope"]) == 2
    with pytest.raises(AssertionError, match="it would compile"):
        bench.__main__.main(["conductor", "--instances", "1"])
