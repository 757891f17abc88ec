"""A request's id in the logs of every service it passed, and one access line for each request that has ended."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from launch.cluster import LocalCluster
from pinyon.api.lb.v1 import lb_pb2, lb_pb2_grpc
from tests.cluster import asking
from tests.cluster.specs import ONE, cluster_spec
from tests.forks import forked
from tests.waiting import WAIT_S, wait_until

KEY = "sk-not-for-logs-1234"
PROMPT = "A jay that nobody may read of in a log"


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("access")
    (folder / "keys").write_text(f"{KEY} acme\n")
    spec = cluster_spec(
        prefill=1, decode=1, stores=0, log_level="debug", log_format="json", api_keys_file=str(folder / "keys")
    )
    with LocalCluster(spec, folder / "logs", forked) as running:
        yield running


def ask(cluster: LocalCluster, path: str, body: dict | None = None, **headers: str) -> int:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    return asking.ask(cluster, path, body, {"authorization": f"Bearer {KEY}", **given}).status


def lines(cluster: LocalCluster, service: str) -> list[dict[str, Any]]:
    whole, _, _ = cluster.services[service].log_path.read_text().rpartition("\n")  # the last line may be incomplete
    return [json.loads(each) for each in whole.splitlines() if each.startswith("{")]


def accessed(cluster: LocalCluster, **wanted: Any) -> dict[str, Any]:
    """Waits for the one access line with these facts; it is written just after the answer."""

    def found() -> list[dict[str, Any]]:
        access = [each for each in lines(cluster, "lb-0") if each["logger"] == "pinyon.lb.access"]
        return [each for each in access if wanted.items() <= each.items()]

    (line,) = wait_until(found, f"a line with {wanted}")
    return line


def completion(**changes: Any) -> dict[str, Any]:
    return asking.completion(prompt=PROMPT, max_tokens=6, temperature=0, **changes)


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_can_be_followed_through_all_logs(running, stream):
    own = f"order-66:{stream}"
    assert ask(running, "/v1/completions", completion(stream=stream), x_request_id=own) == 200
    line = accessed(running, route="/v1/completions", prefill="prefill-0", **running_id(running, own))
    assert line["request_id"].startswith(f"{own}.")
    assert line["ms"] > 0
    assert {name: line[name] for name in ("method", "status", "tenant", "prompt_tokens", "decode", "level")} == {
        "method": "POST", "status": 200, "tenant": "acme", "prompt_tokens": len(PROMPT), "decode": "decode-0",
        "level": "info",
    }  # fmt: skip
    assert 1 <= line["completion_tokens"] <= 6
    for service in ("conductor", "prefill-0", "decode-0"):
        wait_until(
            lambda service=service: line["request_id"] in {each.get("request_id") for each in lines(running, service)},
            f"{service} has logged it",
        )


def running_id(cluster: LocalCluster, own: str) -> dict[str, str]:
    """Returns the log's id of the request that its client gave this id."""

    def found() -> str | None:
        ids = (each.get("request_id", "") for each in lines(cluster, "lb-0"))
        return next((each for each in ids if each.startswith(f"{own}.")), None)

    return {"request_id": wait_until(found, f"a line of {own}")}


def test_what_is_refused_has_a_line_too(running):
    assert ask(running, "/v1/completions", {"model": "nobody", "prompt": "a"}, x_request_id="r404") == 404
    line = accessed(running, status=404, **running_id(running, "r404"))
    assert "prompt_tokens" not in line
    assert ask(running, "/v1/completions", completion(), authorization="Bearer wrong", x_request_id="r401") == 401
    assert "tenant" not in accessed(running, status=401, **running_id(running, "r401"))
    assert ask(running, "/secret?of=mine", x_request_id="r-nowhere") == 404
    assert accessed(running, route="other", **running_id(running, "r-nowhere"))["status"] == 404
    assert ask(running, "/v1/models/who", x_request_id="r-model") == 404
    assert accessed(running, route="/v1/models/*")["method"] == "GET"
    assert ask(running, "/health/ready") == 200
    ready = [each for each in lines(running, "lb-0") if each.get("route") == "/health/ready"]
    assert {each["level"] for each in ready} == {"debug"}


@pytest.mark.parametrize("bad", ["x" * 65, "two words", "r\xf6t", "a\\nb", "{json}"])
def test_an_id_that_could_harm_a_log_is_not_taken(running, bad):
    """Line ends are not among these ids: a header's value cannot contain one."""
    seen = len(lines(running, "lb-0"))
    assert ask(running, "/v1/models", x_request_id=bad) == 200
    new = wait_until(
        lambda: [each for each in lines(running, "lb-0")[seen:] if each.get("route") == "/v1/models"], "it is logged"
    )
    assert all(re.fullmatch(r"[0-9a-f]{20,}", each["request_id"]) for each in new)


def test_grpc_calls_have_lines(running):
    with running.access.channel(running.services["lb-0"]) as channel:
        stub = lb_pb2_grpc.LbServiceStub(channel)
        key = ("authorization", f"Bearer {KEY}")
        stub.ListModels(lb_pb2.ListModelsRequest(), metadata=(key, ("x-request-id", "g-1")), timeout=WAIT_S)
        line = accessed(running, method="gRPC", **running_id(running, "g-1"))
        assert (line["route"], line["status"], line["tenant"]) == (
            "/pinyon.api.lb.v1.LbService/ListModels",
            "OK",
            "acme",
        )
        for metadata, status in (((), "UNAUTHENTICATED"), ((key,), "NOT_FOUND")):
            request = lb_pb2.GenerateRequest(model="nobody", prompt="a")
            with pytest.raises(grpc.RpcError):
                list(stub.Generate(request, metadata=(*metadata, ("x-request-id", f"g-{status}")), timeout=WAIT_S))
            line = accessed(running, **running_id(running, f"g-{status}"))
            assert line["status"] == status
            assert line["route"].endswith("/Generate")
        request = lb_pb2.GenerateRequest(prompt=PROMPT)
        request.sampling.max_tokens = 4
        answers = list(stub.Generate(request, metadata=(key, ("x-request-id", "g-2")), timeout=WAIT_S))
        assert {each.request_id for each in answers} == {"g-2"}
        line = accessed(running, **running_id(running, "g-2"))
        assert (line["status"], line["prompt_tokens"], line["decode"]) == ("OK", len(PROMPT), "decode-0")


def test_no_log_has_keys_or_prompts(running):
    assert ask(running, "/v1/completions", completion()) == 200
    for path in Path(running.log_dir).iterdir():
        text = path.read_text()
        assert KEY not in text
        assert PROMPT not in text
        assert "of=mine" not in text


def test_it_can_be_switched_off(tmp_path):
    spec = cluster_spec(**ONE, extra={"lb": ("--no-access-log",)})
    with LocalCluster(spec, tmp_path, forked) as running:
        assert ask(running, "/v1/completions", completion()) == 200
        with running.access.channel(running.services["lb-0"]) as channel:
            lb_pb2_grpc.LbServiceStub(channel).ListModels(lb_pb2.ListModelsRequest(), timeout=WAIT_S)
    assert " access " not in (tmp_path / "lb-0.log").read_text()
