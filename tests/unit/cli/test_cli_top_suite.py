from __future__ import annotations

import math

import pytest
from rich.text import Text

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.cli.top_frame import SuiteSample, door_of, fit, percentile, suite_frame
from pinyon.core.errors import Unavailable

GOLDEN = """\
pinyon top  c:7000  http://l:8000
serving tiny; 1 of 2 instances take requests; 3 in flight, 1 queued

             TOKENS/s  PROMPT/s  REQUESTS/s  FAILED/s  HITS
last 2 s         25.0      50.0         3.0       1.0   50%
last 10 s        13.0      20.0         1.0       0.4   50%
since start         -         -           -         -   50%

             TTFT P50      P90      P99  TBT P50      P90      P99
last 2 s       750 ms   950 ms   995 ms   7.5 ms   9.5 ms  10.0 ms
last 10 s      750 ms   950 ms   995 ms   7.5 ms   9.5 ms  10.0 ms
since start    500 ms   900 ms   990 ms   5.0 ms   9.0 ms   9.9 ms

INSTANCE  ROLE     PENDING  RUNNING  TOKENS/s      TBT  KV USED  CACHED  STATE
p         prefill        2        0         -        -      25%     50%  away
d         decode         0        3     200.0    15 ms      10%      0%
s         store          -        -         -        -      50%      0%"""


def page(requests: int, failed: int, tokens: int, running: int, prompt: int, slow: int, fast: int) -> str:
    """Returns a metrics page with ``slow`` answers in the upper bucket and ``fast`` answers in the lower bucket."""
    histograms = "".join(
        f'pinyon_lb_{name}_seconds_bucket{{le="{bound}",model="m"}} {count}\n'
        for name, low, high in (("ttft", "0.5", "1.0"), ("tbt", "0.005", "0.01"))
        for bound, count in ((low, fast), (high, fast + slow), ("+Inf", fast + slow))
    )
    return (
        f'pinyon_lb_requests_total{{finish="stop",model="m"}} {requests - failed}\n'
        f'pinyon_lb_requests_total{{finish="unavailable",model="m"}} {failed}\n'
        f"pinyon_lb_refused_total 0\npinyon_lb_generated_tokens_total {tokens}\n"
        f"pinyon_lb_unfinished_tokens {running}\npinyon_lb_prompt_tokens_total {prompt}\n"
        f"pinyon_lb_cached_tokens_total {prompt / 2}\npinyon_lb_queue_requests 1\npinyon_lb_in_flight_requests 3\n"
        "# TYPE pinyon_lb_ttft_seconds histogram\n# TYPE pinyon_lb_tbt_seconds histogram\n" + histograms
    )


def instance(name: str, role: str, **load) -> conductor_pb2.Instance:
    info = conductor_pb2.InstanceInfo(instance_id=name, role=f"ROLE_{role}", capacity_blocks=100)
    if role != "STORE":
        info.model = "tiny"
    return conductor_pb2.Instance(info=info, load=conductor_pb2.InstanceLoad(**load), schedulable=role == "DECODE")


INSTANCES = (
    instance("s", "STORE", used_blocks=50),
    instance("d", "DECODE", running_requests=3, mean_tbt_ms=15.0, mean_batch=3.0, used_blocks=10),
    instance("p", "PREFILL", pending_requests=2, used_blocks=25, cached_blocks=50),
)


def text(lines: list[Text]) -> str:
    return "\n".join(line.plain for line in lines)


def three() -> list[SuiteSample]:
    return [
        SuiteSample(10.0, door_of(page(10, 0, 1000, 0, 100, 10, 20)), INSTANCES),
        SuiteSample(18.0, door_of(page(14, 2, 1000, 80, 200, 10, 20)), INSTANCES),
        SuiteSample(20.0, door_of(page(20, 4, 1120, 10, 300, 20, 20)), INSTANCES),
    ]


def test_rates_and_percentiles_are_of_each_window():
    lines = suite_frame(three(), "pinyon top  c:7000  http://l:8000")
    assert text(lines) == GOLDEN
    styles = {line.plain.split()[0]: line.style for line in lines if line.plain}
    assert (styles["p"], styles["d"]) == ("red", "")


def test_whole_frame_fits_80_columns_and_24_lines():
    lines = fit(suite_frame(three(), "pinyon top  c:7000  http://l:8000"), 80, 24)
    assert text(lines) == GOLDEN


def test_load_balancer_that_restarted_has_no_negative_rates():
    samples = three()
    restarted = SuiteSample(22.0, door_of(page(1, 0, 8, 0, 4, 0, 1)), INSTANCES)
    shown = text(suite_frame([*samples, restarted], "t"))
    assert "last" not in shown
    more = SuiteSample(24.0, door_of(page(3, 0, 16, 0, 8, 0, 1)), INSTANCES)
    shown = text(suite_frame([*samples, restarted, more], "t"))
    assert "last 2 s          4.0       2.0         1.0       0.0   50%" in shown
    assert "last 14 s" not in shown


def test_what_does_not_answer_is_said_beside_the_rest():
    alone = SuiteSample(1.0, None, INSTANCES, ("no metrics at http://l:8000/metrics: refused",))
    lines = suite_frame([alone], "t")
    assert (lines[1].plain, lines[1].style) == ("no metrics at http://l:8000/metrics: refused", "red")
    assert "TTFT" not in text(lines)
    assert "decode" in text(lines)
    door = SuiteSample(1.0, door_of(page(1, 0, 8, 0, 4, 0, 1)), None, ("no conductor answers at c:7000",))
    shown = text(suite_frame([door], "t"))
    assert "no conductor answers at c:7000" in shown
    assert "INSTANCE" not in shown
    assert "since start" in shown


def test_rates_go_on_after_a_load_balancer_was_away():
    samples = three()
    samples[1] = SuiteSample(18.0, None, INSTANCES, ("away",))
    assert "last 10 s        13.0" in text(suite_frame(samples, "t"))


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ({}, 0.5, None),
        ({1.0: 0.0, math.inf: 0.0}, 0.5, None),
        ({1.0: 10.0, math.inf: 10.0}, 0.5, 0.5),
        ({1.0: 0.0, 2.0: 4.0, math.inf: 4.0}, 0.75, 1.75),
        ({1.0: 5.0, math.inf: 10.0}, 0.9, math.inf),
    ],
)
def test_percentile_lies_within_its_bucket(counts, share, expected):
    assert percentile(counts, share) == expected


def test_page_of_another_process_is_refused():
    for other in ("pinyon_worker_free_blocks 3\n", "<html>"):
        with pytest.raises(Unavailable):
            door_of(other)


@pytest.mark.parametrize("bound", ["", "soon", "NaN"])
def test_a_bucket_without_a_bound_is_no_metric(bound: str):
    with pytest.raises(Unavailable, match="no page of metrics"):
        door_of(page(1, 0, 1, 0, 1, 0, 1) + f'pinyon_lb_ttft_seconds_bucket{{le="{bound}"}} 1\n')
