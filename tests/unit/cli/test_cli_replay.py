"""``pinyon replay`` that does not reach the end of its trace."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from pinyon.api.common.v1 import common_pb2
from pinyon.api.lb.v1 import lb_pb2, lb_pb2_grpc
from pinyon.cli import main

HANG_S = 60.0


class Balancer(lb_pb2_grpc.LbServiceServicer):
    """A load balancer that answers the first request, and calls ``then`` at the second."""

    def __init__(self, serve) -> None:
        self.asked = 0
        self.then: Callable[[], object] = lambda: None
        self.over = threading.Event()
        self.address, self.server = serve(lb_pb2_grpc.add_LbServiceServicer_to_server, self)

    def Generate(self, request, context):
        self.asked += 1
        if self.asked > 1:
            self.then()
            self.over.wait(HANG_S)
            return
        yield lb_pb2.GenerateResponse(tokens=[7])
        yield lb_pb2.GenerateResponse(usage=common_pb2.Usage(prompt_tokens=9, completion_tokens=1))


@pytest.fixture
def balancer(serve) -> Iterator[Balancer]:
    balancer = Balancer(serve)
    yield balancer
    balancer.over.set()


def interrupted(balancer, trace, tmp_path, capsys, *more):
    """Returns the result and the messages of a replay that Ctrl-C ends at its second request."""
    balancer.then = lambda: os.kill(os.getpid(), signal.SIGINT)
    asked = ["replay", trace, "--lb", balancer.address, "--clients", "1", "--picture", str(tmp_path / "ttft.svg")]
    assert main([*asked, *more]) == 130
    seen = capsys.readouterr()
    return json.loads(seen.out.splitlines()[-1]), " ".join(seen.err.split())


def test_interrupted_replay_reports_what_has_ended(balancer, trace, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    told, said = interrupted(balancer, trace, tmp_path, capsys, "--warm-up", "0", "--per-request", str(rows))
    assert (told["interrupted"], told["counted"], told["finished"], told["errors"]) == (True, 1, 1.0, {})
    assert "interrupted: 1 of 3 requests had ended" in said
    assert [json.loads(line)["request"] for line in rows.read_text().splitlines()] == [0]


def test_replay_interrupted_in_its_warm_up_counts_that(balancer, trace, tmp_path, capsys):
    told, said = interrupted(balancer, trace, tmp_path, capsys, "--warm-up", "2")
    assert (told["interrupted"], told["counted"], told["finished"]) == (True, 1, 1.0)
    assert "none after the warm-up, which counts here" in said


def test_replay_interrupted_before_any_answer_reports_none(balancer, trace, tmp_path, capsys):
    balancer.asked = 1
    told, said = interrupted(balancer, trace, tmp_path, capsys, "--warm-up", "0")
    assert told["counted"] == 0
    assert "interrupted: 0 of 3 requests had ended" in said


def test_server_that_dies_in_mid_replay_is_counted(balancer, trace, capsys):
    balancer.then = lambda: balancer.server.stop(None)
    assert main(["replay", trace, "--lb", balancer.address, "--clients", "1", "--warm-up", "0"]) == 1
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["counted"], told["finished"], sum(told["errors"].values())) == (3, pytest.approx(1 / 3), 2)


def test_replay_sends_nothing_where_nobody_answers(trace, capsys):
    assert main(["replay", trace, "--lb", "127.0.0.1:9", "--warm-up", "0"]) == 1
    seen = capsys.readouterr()
    assert seen.err == "pinyon: no load balancer answers at 127.0.0.1:9 (is it running? ./dev up)\n"
    assert not seen.out
