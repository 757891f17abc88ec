from __future__ import annotations

from types import SimpleNamespace

import pytest

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2, conductor_pb2_grpc
from pinyon.cli import main


@pytest.fixture
def answered(monkeypatch):
    decisions: list[conductor_pb2.ExplainedDecision] = []
    asked: list[str] = []

    def explain(request, timeout):
        asked.append(request.request_id)
        return conductor_pb2.ExplainResponse(decisions=decisions)

    monkeypatch.setattr(conductor_pb2_grpc, "ConductorServiceStub", lambda _: SimpleNamespace(Explain=explain))
    return decisions, asked


def candidate(name: str, **values) -> conductor_pb2.Candidate:
    return conductor_pb2.Candidate(instance_id=name, **values)


def test_a_sentence_a_table_and_what_came_of_it(answered, capsys):
    decisions, asked = answered
    placement = common_pb2.Placement(prefill_instance_id="[b]a", decode_instance_id="d", predicted_ttft_ms=250)
    decisions.append(
        conductor_pb2.ExplainedDecision(
            request_id="r",
            because="went to [b]a because so",
            model="m",
            prompt_tokens=64,
            placement=placement,
            chosen=candidate("[b]a", held_blocks=3, expected_blocks=3, prefill_ms=250, ttft_ms=250),
            others=[candidate("b", expected_blocks=2, queue_ms=1500, prefill_ms=300, ttft_ms=1800)],
            alternate_instance_id="b",
            candidates=5,
            first_token=conductor_pb2.FirstTokenMeasurement(
                ttft_us=200_000, prefill_instance_id="[b]a", compute_us=150_000, computed_tokens=16, local_tokens=48
            ),
        )
    )
    assert main(["explain", "chatcmpl-1"]) == 0
    assert asked == ["chatcmpl-1"]
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert shown[0] == "r went to [b]a because so"
    assert shown[2] == "instance holds soon queue prefill first token", "what is 0 everywhere is left out"
    assert shown[3] == "[b]a 3 3 – 250.0 ms 250.0 ms taken"
    assert shown[4] == "b 0 2 1.50 s 300.0 ms 1.80 s the other one of the pair"
    assert shown[5] == "and 3 more"
    assert "measured: first token in 200.0 ms, predicted 250.0 ms (-50.0 ms); on [b]a:" in shown[6]


def test_what_others_lose_and_what_is_only_about_so(answered, capsys):
    decisions, _ = answered
    chosen = candidate("a", prefill_ms=250, ttft_ms=250, others_ms=40)
    other = candidate("b", fetched_blocks=2, transfer_ms=30, prefill_ms=200, ttft_ms=230, others_ms=900, about=True)
    decisions.append(conductor_pb2.ExplainedDecision(request_id="r", chosen=chosen, others=[other], candidates=2))
    assert main(["explain", "r"]) == 0
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert shown[2] == "instance fetches transfer prefill first token others' time"
    assert shown[3] == "a 0 – 250.0 ms 250.0 ms 40.0 ms"
    assert shown[4] == "b 2 ~30.0 ms 200.0 ms ~230.0 ms 900.0 ms"


def test_a_refusal_that_no_policy_saw(answered, capsys):
    decisions, _ = answered
    error = common_pb2.Error(code="NOT_FOUND", message="no")
    decisions += [conductor_pb2.ExplainedDecision(request_id="r", because="refused: no", error=error)] * 2
    assert main(["explain", "r"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == lines[3] == "r refused: no"
    assert "measured" not in "".join(lines)
