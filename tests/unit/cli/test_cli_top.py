from __future__ import annotations

import asyncio
import math
from argparse import Namespace

import pytest
from rich.text import Text

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.api.controller.v1 import controller_pb2
from pinyon.cli.top import _Page, metric_sums
from pinyon.cli.top_frame import (
    ControllerSample,
    SuiteSample,
    controller_frame,
    door_of,
    fit,
    metrics_frame,
    percentile,
    suite_frame,
)
from pinyon.core.errors import Unavailable
from pinyon.federation.view import Cluster, Federation, LbInfo, LbState, Member, RegionView
from pinyon.messages.federation import federation_to_proto
from tests.tcp_server import tcp_server

FEDERATION = Federation(
    "e",
    7,
    (RegionView("eu-west"), RegionView("us-east")),
    (
        Member(LbInfo("eu-0", "1", "eu-west", "h:1"), LbState.LIVE, True),
        Member(LbInfo("eu-1", "1", "eu-west", "h:1"), LbState.LIVE, False),
        Member(LbInfo("us-0", "1", "us-east", "h:1"), LbState.FAILED, False),
    ),
    (
        Cluster("eu-west", "eu-west", "c:1", owners=("eu-0", "eu-1")),
        Cluster("us-east", "us-east", "c:2", owners=("us-0",), adopter="eu-0"),
    ),
)
GOLDEN = """\
pinyon top  c:7100  version 7: 2 regions, 2 of 3 load balancers live, 1 adopted
REGION   LB    STATE    QUEUE  FLIGHT  FREE  HITS  OUT/s  IN/s  SERVES
eu-west  eu-0  live         3      12   1/2   75%    2.5   0.0  eu-west us-east/us-east*
eu-west  eu-1  cut off      -       -     -     -      -     -  eu-west
us-east  us-0  failed       -       -     -     -      -     -

LB    INSTANCE  PEND  RUN  SENT  FREE
eu-0  decode-1     2    8    10  no
eu-0  decode-0     0    4     4  yes"""


def sample(at_s: float, forwarded: int, hits: int, asked: int, **reply) -> ControllerSample:
    load = controller_pb2.LoadBalancerLoad(
        queue=3,
        in_flight=12,
        available_instances=1,
        instances=2,
        forwarded_total=forwarded,
        hit_chunks_total=hits,
        asked_chunks_total=asked,
        per_instance=[
            {"name": "decode-0", "running": 4, "outstanding": 4, "available": True},
            {"name": "decode-1", "pending": 2, "running": 8, "outstanding": 10},
        ],
    )
    reports = {"eu-0": controller_pb2.LoadBalancerReport(load=load)}
    return ControllerSample(
        at_s, controller_pb2.ListRegionsResponse(federation=federation_to_proto(FEDERATION), reports=reports, **reply)
    )


def text(lines: list[Text]) -> str:
    return "\n".join(line.plain for line in lines)


def test_a_frame():
    lines = controller_frame(sample(12.0, 105, 40, 60), sample(10.0, 100, 10, 20), "pinyon top  c:7100")
    assert text(lines) == GOLDEN
    assert [line.style for line in lines[:5]] == ["bold", "dim", "", "", "red"]


def test_the_first_frame_has_no_rates():
    first = sample(10.0, 100, 10, 20, settling=True)
    lines = controller_frame(first, first, "t")
    assert lines[0].plain.endswith("1 adopted, settling")
    assert "50%      -     -" in lines[2].plain


def test_a_process_that_started_anew_has_no_negative_rates():
    lines = controller_frame(sample(12.0, 1, 0, 4), sample(10.0, 100, 10, 20), "t")
    assert "  0%    0.0   0.0" in lines[2].plain


@pytest.mark.parametrize(("width", "height"), [(100, 40), (40, 6), (20, 4), (1, 1), (79, 8)])
def test_it_fits_any_terminal(width, height):
    first = sample(1.0, 0, 0, 0)
    lines = fit(controller_frame(first, first, "t" * 50), width, height)
    assert len(lines) <= max(4, height)
    assert all(len(line.plain) <= max(20, width) for line in lines)
    if height < 9:
        assert lines[-1].plain == f"... {9 - max(4, height) + 1} more"


def test_nothing_yet():
    empty = ControllerSample(0.0, controller_pb2.ListRegionsResponse(federation=controller_pb2.Federation(epoch="e")))
    lines = controller_frame(empty, empty, "t")
    assert lines[0].plain == "t  version 0: 0 regions, 0 of 0 load balancers live, 0 adopted"


def test_names_do_not_move_the_cursor():
    member = Member(LbInfo("eu\x1b[2J\n", "1", "eu", "h:1"), LbState.LIVE, True)
    reply = controller_pb2.ListRegionsResponse(federation=federation_to_proto(Federation("e", 1, (), (member,))))
    now = ControllerSample(0.0, reply)
    lines = fit(controller_frame(now, now, "t"), 80, 24)
    assert "eu?[2J?" in lines[2].plain
    assert all(line.plain.isprintable() for line in lines)


def test_metrics_by_name():
    page = """\
# TYPE pinyon_lb_queue_requests gauge
pinyon_lb_queue_requests 3.0
# TYPE pinyon_lb_requests_total counter
pinyon_lb_requests_total{finish="stop",model="m"} 4.0
pinyon_lb_requests_total{finish="error",model="m"} 1.0
pinyon_lb_requests_created{finish="stop",model="m"} 1.7e9
# TYPE pinyon_lb_ttft_seconds histogram
pinyon_lb_ttft_seconds_bucket{le="+Inf"} 5.0
pinyon_lb_ttft_seconds_count 5.0
pinyon_lb_ttft_seconds_sum 1.0
process_cpu_seconds_total 3.0
"""
    sums = metric_sums(page)
    assert sums == {
        "pinyon_lb_queue_requests": 3.0,
        "pinyon_lb_requests_total": 5.0,
        "pinyon_lb_ttft_seconds_count_total": 5.0,
    }
    lines = metrics_frame(sums, {"pinyon_lb_requests_total": 1.0}, 2.0, "t")
    assert (
        text(lines)
        == """\
t
METRIC                              VALUE  PER s
pinyon_lb_queue_requests                3      -
pinyon_lb_requests_total                5    2.0
pinyon_lb_ttft_seconds_count_total      5      -"""
    )
    with pytest.raises(Unavailable):
        metric_sums("<html>")


async def test_a_page_that_drips_is_given_up_in_time():
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"#")
            await asyncio.sleep(0.02)

    async with tcp_server(drip) as server:
        host, port = server.sockets[0].getsockname()
        page = _Page(f"{host}:{port}", Namespace(timeout_s=0.5, tls_dir=""))
        with pytest.raises(Unavailable, match="timed out"):
            await asyncio.to_thread(page.read)


# ---------------------------------------------------------------- one suite

SUITE = """\
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


def three() -> list[SuiteSample]:
    return [
        SuiteSample(10.0, door_of(page(10, 0, 1000, 0, 100, 10, 20)), INSTANCES),
        SuiteSample(18.0, door_of(page(14, 2, 1000, 80, 200, 10, 20)), INSTANCES),
        SuiteSample(20.0, door_of(page(20, 4, 1120, 10, 300, 20, 20)), INSTANCES),
    ]


def test_rates_and_percentiles_are_of_each_window():
    lines = fit(suite_frame(three(), "pinyon top  c:7000  http://l:8000"), 80, 24)
    assert text(lines) == SUITE, "it fits a small terminal"
    styles = {line.plain.split()[0]: line.style for line in lines if line.plain}
    assert (styles["p"], styles["d"]) == ("red", "")


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
