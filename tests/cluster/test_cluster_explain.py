"""Explanations of a request's placement, asked of a running suite by the id that its client saw."""

from __future__ import annotations

import json

import pytest

from pinyon.cli import main
from tests.cluster import asking
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def _as_admin(cluster, monkeypatch):
    monkeypatch.setenv("PINYON_TLS_DIR", str(cluster.access.admin or ""))


def complete(cluster, prompt: str, **more) -> dict:
    headers = {**asking.REPORT, "x-request-id": "a-jay.1"}
    answer = asking.complete(cluster, headers, prompt=prompt, ignore_eos=True, **more)
    assert answer.status == 200, answer
    assert answer.headers["x-request-id"] == "a-jay.1"
    return answer.json


def measured(cluster, capsys, request_id: str, count: int) -> list[dict]:
    """Returns the decisions, as the command prints them, once the next report has added all measurements."""

    def decisions() -> list[dict] | None:
        assert main(["explain", request_id, "--conductor", cluster.conductor, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)["decisions"]
        return told if len(told) == count and all("first_token" in each for each in told) else None

    return wait_until(decisions, f"{count} decisions are measured")


def test_where_it_ran_and_what_came_of_it(cluster, capsys):
    answer = complete(cluster, "Why does a jay that caches pinyon seeds find them again? " * 8)
    report = answer["pinyon"]
    (decision,) = measured(cluster, capsys, answer["id"], 1)
    assert decision["request_id"] == f"a-jay.1.{answer['id'].removeprefix('cmpl-')}"
    assert decision["placement"]["prefill_instance_id"] == report["prefill_instance"]
    assert decision["placement"]["decode_instance_id"] == report["decode_instance"]
    assert decision["chosen"]["instance_id"] == report["prefill_instance"]
    assert decision["candidates"] == 2
    first = decision["first_token"]
    assert first["prefill_instance_id"] == report["prefill_instance"]
    assert int(first["compute_us"]) == pytest.approx(1e3 * report["compute_ms"], abs=2)
    assert first["computed_tokens"] == report["computed_tokens"]
    assert int(first["compute_us"]) <= int(first["ttft_us"]) <= 1e3 * report["ttft_ms"] + 1
    assert decision["placement"]["predicted_ttft_ms"] == pytest.approx(report["predicted_ttft_ms"], abs=1e-3)
    # The text output, by the id that the client chose.
    assert main(["explain", "a-jay.1", "--conductor", cluster.conductor]) == 0
    shown = capsys.readouterr().out
    assert f"went to {report['prefill_instance']} (decodes on {report['decode_instance']}) because " in shown
    assert "measured: first token in " in shown


def test_every_choice_is_told(cluster, capsys):
    answer = complete(cluster, "Two of the same", n=2)
    unique = answer["id"].removeprefix("cmpl-")
    decisions = measured(cluster, capsys, answer["id"], 2)
    assert [each["request_id"] for each in decisions] == [f"a-jay.1.{unique}-0", f"a-jay.1.{unique}-1"]
    assert len({each["first_token"]["placement_number"] for each in decisions}) == 2


def test_what_nobody_knows(cluster, capsys):
    assert main(["explain", "never-seen", "--conductor", cluster.conductor]) == 1
    assert "pinyon: no request 'never-seen' among the last " in capsys.readouterr().err
