"""The measures of a simulated run, by hand."""

from __future__ import annotations

import math

from pinyon_lab.simulator.report import NANO_S, ServedRequest, report


def served(arrived_s: float, ttft_s: float, tokens: int = 10) -> ServedRequest:
    return ServedRequest(arrived_s, 0, arrived_s, ttft_s, tokens, tokens // 2)


def test_a_request_without_an_answer_is_not_in_time() -> None:
    requests = [served(0.0, 1.0), served(1.0, -1.0, 90), served(2.0, 3.0), served(3.0, 2.0 + NANO_S / 2)]
    measured = report(requests, slo_s=2.0, warm_up=0)
    assert measured["attainment"] == 2 / 4
    assert measured["attainment_last_quarter"] == 1.0
    assert measured["attainment_longest_tenth"] == 0.0
    assert math.isclose(measured["mean_s"], 2.0)
    assert measured["hit_ratio"] == 60 / 120


def test_requests_of_the_warm_up_do_not_count() -> None:
    requests = [served(0.0, -1.0), served(1.0, 9.0), served(2.0, 1.0)]
    measured = report(requests, slo_s=2.0, warm_up=2)
    assert (measured["requests"], measured["counted"], measured["attainment"]) == (3, 1, 1.0)
    assert report(requests, slo_s=2.0, warm_up=3)["attainment"] == 0.0
