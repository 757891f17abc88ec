"""Two vLLM servers behind load balancer, conductor and pool answer as one alone does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from launch.cluster import LocalCluster
from launch.process import Process
from launch.vllm import START_S, VllmServer
from tests.vllm import soak
from tests.vllm.ask import ask, counter, get, post, prompts
from tests.vllm.store_access import listed

SEED = 41
PROMPTS = 200
TOKENS = 12
SOAK_S = 60.0


def answers(url: str, seed: int, count: int) -> dict[str, tuple[int, ...]]:
    return {prompt: ask(url, prompt, TOKENS).tokens for prompt in prompts(seed, count)}


@pytest.mark.parametrize("at_once", [1, 8])
def test_tokens_are_those_of_one_server_alone(
    suite: LocalCluster, servers: list[VllmServer], alone: VllmServer, at_once: int
) -> None:
    seed = SEED + at_once  # new prompts, of which no server has blocks
    print(f"seed {seed}")
    expected = answers(alone.url, seed, PROMPTS)
    before = [_counted(server) for server in servers]
    with ThreadPoolExecutor(at_once) as callers:
        told = list(callers.map(lambda prompt: ask(suite.http, prompt, TOKENS).tokens, expected))
    assert sum(a == b for a, b in zip(told, expected.values(), strict=True)) == PROMPTS
    after = [_counted(server) for server in servers]
    assert all(now[0] > then[0] for now, then in zip(after, before, strict=True)), "both have served"
    assert any(now[1] > then[1] for now, then in zip(after, before, strict=True)), "blocks came from elsewhere"


def _counted(server: VllmServer) -> tuple[float, float]:
    """Returns how many requests a server has served, and how many tokens it has loaded."""
    return (
        counter(server.url, "vllm:request_success_total"),
        counter(server.url, "vllm:external_prefix_cache_hits_total"),
    )


def test_a_drained_server_gets_nothing_until_it_is_taken_back(suite: LocalCluster, servers: list[VllmServer]) -> None:
    away, other = servers
    for draining in (True, False):
        soak.set_draining(suite, away.name, draining)
        until_s = time.monotonic() + 30
        while listed(suite, away.name).load.draining is not draining:
            assert time.monotonic() < until_s
            time.sleep(0.05)  # the conductor tells of no change
        before = _counted(away)[0], _counted(other)[0]
        for prompt in prompts(SEED - draining, 8):
            ask(suite.http, prompt, TOKENS)
        served = _counted(away)[0] - before[0], _counted(other)[0] - before[1]
        assert sum(served) == 8
        if draining:
            assert served == (0, 8)


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 9}, "ok": {"type": "boolean"}},
    "required": ["age", "ok"],
    "additionalProperties": False,
}
ASKED = [{"role": "system", "content": "Short."}, {"role": "user", "content": "How is the weather in Łódź?"}]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [WEATHER]},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}, "max_tokens": 60},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}, "max_tokens": 60},
        {"logprobs": True, "top_logprobs": 2},
        {"n": 2, "temperature": 0.7, "seed": 3},
        {"stop": ["e"], "max_tokens": 40},
    ],
    ids=["chat", "tools", "named tool", "json schema", "logprobs", "n", "stop"],
)
def test_a_chat_is_answered_as_by_vllm_alone(suite: LocalCluster, alone: VllmServer, fields: dict[str, Any]) -> None:
    body = {"model": "tiny", "messages": ASKED, "temperature": 0, "max_tokens": 12, **fields}
    own = post(alone.url, "/v1/chat/completions", body)
    told = post(suite.http, "/v1/chat/completions", body)
    assert _said(told) == _said(own)
    assert not told.get("kv_transfer_params")


def _said(answer: dict[str, Any]) -> Any:
    """Returns an answer without what differs between two of the same server."""
    made_up = ("id", "created", "prompt_token_ids", "system_fingerprint", "kv_transfer_params", "prompt_tokens_details")
    text = json.dumps(answer, sort_keys=True)
    for choice in answer["choices"]:
        for call in choice["message"].get("tool_calls") or ():
            text = text.replace(json.dumps(call["id"]), '"call"')
    return _without(json.loads(text), made_up)


def _without(value: Any, names: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {name: _without(each, names) for name, each in value.items() if name not in names}
    return [_without(each, names) for each in value] if isinstance(value, list) else value


def test_top_explain_and_metrics_show_vllm_like_own_engines(suite: LocalCluster) -> None:
    prompt = prompts(SEED, 1)[0]
    import http.client
    from urllib.parse import urlsplit

    connection = http.client.HTTPConnection(urlsplit(suite.http).netloc, timeout=60)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    headers = {"content-type": "application/json", "x-request-id": "shown"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    assert connection.getresponse().status == 200
    connection.close()
    for command, words in (
        (["explain", "shown"], ["mixed-", "measured: first token"]),
        (["top", "--once", "--lb", suite.http], ["mixed-0", "mixed-1", "tiny"]),
        (["instances"], ["mixed-0", "mixed-1"]),
    ):
        shown = subprocess.run(
            [sys.executable, "-m", "pinyon.cli", *command, "--conductor", suite.conductor],
            capture_output=True, text=True, timeout=60, env=os.environ | {"COLUMNS": "200"},
        )  # fmt: skip
        assert shown.returncode == 0, shown.stderr
        for word in words:
            assert word in shown.stdout, f"{command}: {word!r} is not in\n{shown.stdout}"
    page = get(f"http://{suite.services['conductor'].endpoints['metrics']}", "/metrics")
    assert 'pinyon_conductor_placements_total{outcome="placed"}' in page


@soak.long_only
def test_a_soak_leaves_equal_tokens_and_holds_nothing(model: Any, alone: VllmServer) -> None:
    known = answers(alone.url, SEED, 60)
    with LocalCluster(soak.small_cluster(str(model))) as cluster:
        servers = [each for each in cluster.of_kind("mixed") if isinstance(each, VllmServer)]
        faults: list[tuple[str, Process]] = [
            (kind, process)
            for process in (*cluster.of_kind("kvstore"), *cluster.of_kind("conductor"))
            for kind in ("kill", "freeze")
        ]
        faults += [("freeze", server) for server in servers]
        count = soak.Soak([cluster.http], known, SEED, tokens=TOKENS).run(SOAK_S, faults, START_S)
        print(count)
        assert count.equal > 50
        assert not count.different
        assert not count.errors
        soak.at_rest(cluster, servers)
        assert sum(counter(server.url, "vllm:num_preemptions_total") for server in servers)
        assert sum(counter(server.url, "vllm:external_prefix_cache_hits_total") for server in servers)
