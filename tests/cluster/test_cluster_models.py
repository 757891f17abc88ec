"""Several models behind one load balancer: each request runs on instances of its own model, and reuses only its KV."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from launch.cluster import LocalCluster
from launch.scrape import Scrape
from pinyon.api.lb.v1 import lb_pb2, lb_pb2_grpc
from pinyon.core.request import SamplingParams
from tests.cluster import asking
from tests.cluster.observe import wait_idle
from tests.cluster.reference import Ask, Reference, text_tokens
from tests.cluster.specs import cluster_spec, start_again
from tests.forks import forked
from tests.waiting import WAIT_S, wait_until

CHECKPOINT = Path(__file__).parents[1] / "data" / "golden_text" / "llama-bytes-bos"
GOLDEN = json.loads((CHECKPOINT / "golden.json").read_text())
FIRST, SECOND = asking.MODEL, "bytes"


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[LocalCluster]:
    spec = cluster_spec(
        prefill=1, decode=1, more_models=f"{SECOND}={CHECKPOINT}", extra={"lb": ("--placement-wait-s", "0.2")}
    )
    with LocalCluster(spec, tmp_path_factory.mktemp("models"), forked) as running:
        yield running


def ask(cluster: LocalCluster, path: str, **body: object) -> tuple[int, Any]:
    answer = asking.ask(cluster, path, body or None)
    return answer.status, answer.json


def complete(cluster: LocalCluster, **body: object) -> tuple[int, Any]:
    return ask(cluster, "/v1/completions", **{"temperature": 0, "ignore_eos": True, "return_token_ids": True, **body})


async def test_each_answers_as_it_does_alone(running):
    """The built-in model must match the reference, the checkpoint must match transformers; concurrent and in turns."""
    random_, reference = random.Random(7), Reference()
    asks: list[tuple[dict[str, object], list[int]]] = []
    for case in filter(itemgetter("text"), GOLDEN["texts"]):  # an empty text is refused
        prompt = tuple(text_tokens(random_, 100))
        tokens = reference.tokens(Ask(prompt, SamplingParams(max_tokens=12, ignore_eos=True)))
        asks.append(({"model": FIRST, "prompt": list(prompt), "max_tokens": 12}, tokens))
        expected = case["greedy"]
        asks.append(({"model": SECOND, "prompt": case["text"], "max_tokens": len(expected)}, expected))
    answers = await asyncio.gather(*(asyncio.to_thread(complete, running, **body) for body, _ in asks))
    assert [(status, answer["choices"][0]["token_ids"]) for status, answer in answers] == [
        (200, tokens) for _, tokens in asks
    ]
    assert [answer["model"] for _, answer in answers] == [body["model"] for body, _ in asks]
    for case in GOLDEN["chats"][:2]:
        body = {"model": SECOND, "messages": case["messages"], "max_tokens": len(case["greedy"]), "ignore_eos": True}
        status, answer = ask(
            running, "/v1/chat/completions", **body, temperature=0, return_token_ids=True,
            chat_template_kwargs=case["variables"],
        )  # fmt: skip
        assert (status, answer["choices"][0]["token_ids"]) == (200, case["greedy"])


async def test_only_the_own_kv_is_reused(running):
    """Token ids of one model mean other text to another model."""
    prompt = text_tokens(random.Random(8), 300)

    async def cached(model: str) -> int:
        status, answer = await asyncio.to_thread(complete, running, model=model, prompt=prompt, max_tokens=2)
        assert status == 200
        await wait_idle(running)
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert await cached(FIRST) == 0
    assert await cached(FIRST) >= 256
    assert await cached(SECOND) == 0
    assert await cached(SECOND) >= 256


def test_the_models_are_listed_with_what_they_take(running):
    status, listed = ask(running, "/v1/models")
    assert status == 200
    assert [(each["id"], each["max_model_len"]) for each in listed["data"]] == [(FIRST, 1280 * 32), (SECOND, 512)]
    assert ask(running, f"/v1/models/{SECOND}") == (200, listed["data"][1])
    with running.access.channel(running.services["lb-0"]) as channel:
        stub = lb_pb2_grpc.LbServiceStub(channel)
        models = stub.ListModels(lb_pb2.ListModelsRequest(), timeout=WAIT_S).models
        assert [(each.name, each.max_context_tokens) for each in models] == [(FIRST, 1280 * 32), (SECOND, 512)]
        texts = {}
        for name in ("", FIRST, SECOND):
            request = lb_pb2.GenerateRequest(model=name, prompt="The jay")
            request.sampling.max_tokens = 8
            texts[name] = [token for each in stub.Generate(request, timeout=WAIT_S) for token in each.tokens]
    assert texts[""] == texts[FIRST] != texts[SECOND]


def test_each_has_its_tokenizer(running):
    case = GOLDEN["texts"][0]
    for model, expected in ((SECOND, case["tokens"]), (FIRST, list(case["text"].encode()))):
        status, answer = ask(running, "/tokenize", model=model, prompt=case["text"])
        assert (status, answer["tokens"]) == (200, expected)
        status, answer = ask(running, "/detokenize", model=model, tokens=case["bare"][:0] or expected[1:])
        assert (status, answer["prompt"]) == (200, case["text"] if model == SECOND else case["text"][1:])
    assert ask(running, "/tokenize", prompt=case["text"])[1]["tokens"] == list(case["text"].encode())


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_what_is_not_served_is_not_found(running, path):
    status, answer = ask(running, path, model="nobody", prompt="a")
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")
    assert "'nobody'" in answer["error"]["message"]
    assert f"Served here: {FIRST}, {SECOND}." in answer["error"]["message"]
    assert ask(running, "/v1/models/nobody")[0] == 404


def test_the_limits_are_the_models_own(running):
    status, answer = complete(running, model=SECOND, prompt=[5] * 600, max_tokens=2)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    status, answer = complete(running, model=SECOND, prompt=[5, 600], max_tokens=2)
    assert status == 400
    assert "vocabulary" in answer["error"]["message"]


def test_one_without_instances_does_not_take_the_other_away(running):
    """Ready means that some model is served; the text names the models that are not."""
    try:
        running.services["decode-1"].kill()
        wait_until(lambda: "lacks" in ask(running, "/health/ready")[1], "it is noticed")
        status, page = ask(running, "/health/ready")
        assert status == 200
        assert list(page["lacks"]) == [SECOND]
        assert "generates tokens" in page["lacks"][SECOND]
        assert complete(running, model=FIRST, prompt="a", max_tokens=2)[0] == 200
        status, answer = complete(running, model=SECOND, prompt="a", max_tokens=2)
        assert (status, answer["error"]["code"]) == (503, "unavailable")
    finally:
        start_again(running, "decode-1")
    wait_until(lambda: "lacks" not in ask(running, "/health/ready")[1], "both are served again")
    assert complete(running, model=SECOND, prompt="a", max_tokens=2)[0] == 200


def test_metrics_and_log_tell_them_apart(running):
    before = Scrape(running, {"lb-0"})
    complete(running, model=SECOND, prompt="a", max_tokens=3)

    def more(model: str) -> float:
        return sum(each.labelled("pinyon_lb_generated_tokens_total", model) * sign
                   for each, sign in ((Scrape(running, {"lb-0"}), 1), (before, -1)))  # fmt: skip

    log = running.services["lb-0"].log_path
    # An answer may arrive before it is counted and logged.
    wait_until(lambda: more(SECOND) >= 3 and f"model={SECOND}" in log.read_text(), "it is counted and logged")
    assert (more(FIRST), more(SECOND)) == (0, 3)
