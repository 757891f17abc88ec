from __future__ import annotations

import socket
import threading
import time
from argparse import Namespace
from contextlib import suppress

import pytest
from rich.text import Text

from pinyon.api.controller.v1 import controller_pb2
from pinyon.cli.top import _Page, metric_sums
from pinyon.cli.top_frame import ControllerSample, controller_frame, metrics_frame
from pinyon.core.errors import Unavailable
from pinyon.federation.view import Cluster, Federation, LbInfo, LbState, Member, RegionView
from pinyon.messages.federation import federation_to_proto

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
    lines = controller_frame(sample(12.0, 105, 40, 60), sample(10.0, 100, 10, 20), 100, 40, "pinyon top  c:7100")
    assert text(lines) == GOLDEN
    assert [line.style for line in lines[:5]] == ["bold", "dim", "", "", "red"]


def test_the_first_frame_has_no_rates():
    lines = controller_frame(sample(10.0, 100, 10, 20, settling=True), None, 100, 40, "t")
    assert lines[0].plain.endswith("1 adopted, settling")
    assert "50%      -     -" in lines[2].plain


def test_a_process_that_started_anew_has_no_negative_rates():
    lines = controller_frame(sample(12.0, 1, 0, 4), sample(10.0, 100, 10, 20), 100, 40, "t")
    assert "  0%    0.0   0.0" in lines[2].plain


@pytest.mark.parametrize(("width", "height"), [(100, 40), (40, 6), (20, 4), (1, 1), (79, 8)])
def test_it_fits_any_terminal(width, height):
    lines = controller_frame(sample(1.0, 0, 0, 0), None, width, height, "t" * 50)
    assert len(lines) <= max(4, height)
    assert all(len(line.plain) <= max(20, width) for line in lines)
    if height < 9:
        assert lines[-1].plain == f"... {9 - max(4, height) + 1} more"


def test_nothing_yet():
    empty = ControllerSample(0.0, controller_pb2.ListRegionsResponse(federation=controller_pb2.Federation(epoch="e")))
    assert (
        controller_frame(empty, None, 80, 24, "t")[0].plain
        == "t  version 0: 0 regions, 0 of 0 load balancers live, 0 adopted"
    )


def test_names_do_not_move_the_cursor():
    member = Member(LbInfo("eu\x1b[2J\n", "1", "eu", "h:1"), LbState.LIVE, True)
    reply = controller_pb2.ListRegionsResponse(federation=federation_to_proto(Federation("e", 1, (), (member,))))
    lines = controller_frame(ControllerSample(0.0, reply), None, 80, 24, "t")
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
    lines = metrics_frame(sums, {"pinyon_lb_requests_total": 1.0}, 2.0, 80, 24, "t")
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


def test_a_page_that_drips_is_given_up_in_time():
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                for _ in range(1000):  # the client does not stay to the end
                    connection.sendall(b"#")
                    time.sleep(0.02)

        server = threading.Thread(target=drip)
        server.start()
        page = _Page(f"127.0.0.1:{listening.getsockname()[1]}", Namespace(timeout_s=0.5, tls_dir=""))
        try:
            with pytest.raises(Unavailable, match="timed out"):
                page.read()
        finally:
            server.join()
