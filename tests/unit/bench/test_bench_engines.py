"""The parts of ``./dev bench engines`` that need no vLLM: aims, tables, and the worker that serves Dynamo."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from bench.engines import LOADS, OWN, SHARING, aims, chosen, missing, started, tables
from bench.engines_dynamo import Worker
from bench.engines_sides import Side
from bench.peers import PeerUnavailable

SIDES = (*SHARING, *OWN)


def results(load: str, ttft_ms: dict[str, float]) -> dict[str, Any]:
    keys = (f"{each}_{kind}_ms" for each in ("ttft", "tpot", "tbt") for kind in ("mean", "p99"))
    rest = dict.fromkeys((*keys, "hit_share", "loaded_share"), 0.5) | {"completed": 24, "output_tokens": 384}
    return {load: {side: {**rest, "ttft_mean_ms": mean} for side, mean in ttft_ms.items()}}


def test_the_pool_is_compared_with_the_best_of_the_other_sides() -> None:
    (aim,) = aims(results("prefix_24", {"round_robin": 400.0, "lmcache": 200.0, "pool": 100.0}))
    assert (aim.measured, aim.met) == (0.5, True)


def test_no_aim_is_named_where_a_side_was_not_measured() -> None:
    assert aims(results("prefix_8", {"dynamo": 1.0, "lmcache": 2.0})) == []
    assert aims(results("sharegpt", {"agent": 1.0, "pool": 2.0})) == []
    assert len(aims(results("sharegpt", {"round_robin": 1.0, "agent": 1.0}))) == 1


def test_a_table_has_mean_and_p99_and_why_a_side_has_no_row(capsys) -> None:
    found = tables(results("prefix_8", {"dynamo": 1234.0}), {"lmcache": "cannot install it: no wheel"})
    console = Console(width=200)
    console.print(*found)
    said = capsys.readouterr().out
    assert len(found) == 1
    assert "1,234 / 0" in said
    assert "384" in said
    assert "left out: cannot install it: no wheel" in said


def test_sides_and_loads_are_chosen_by_name() -> None:
    assert chosen(SIDES)("pool,dynamo") == ["dynamo", "pool"]
    with pytest.raises(argparse.ArgumentTypeError, match="there is no 'prefix_9' among prefix_8, prefix_24, sharegpt"):
        chosen(LOADS)("prefix_9")


def test_a_peer_that_is_not_installed_has_a_reason(monkeypatch) -> None:
    def fails() -> None:
        raise PeerUnavailable("no wheel")

    monkeypatch.setattr("bench.engines.dynamo_python", fails)
    assert missing(["dynamo", "upstream", "agent", "pool"]) == {"dynamo": "no wheel"}


def test_only_a_peer_may_fail_to_start() -> None:
    @contextlib.contextmanager
    def start() -> Iterator[Side]:
        raise RuntimeError("no answer")
        yield

    skipped: dict[str, str] = {}
    with started("lmcache", start, skipped) as side:
        assert side is None
    assert skipped == {"lmcache": "it does not start: no answer"}
    with pytest.raises(RuntimeError, match="no answer"), started("pool", start, {}):
        pass


class Answer:
    def __init__(self, status: int, lines: list[bytes]) -> None:
        self.status, self._lines = status, lines

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def text(self) -> str:
        return "too long"

    @property
    async def content(self):  # type: ignore[no-untyped-def]
        for line in self._lines:
            yield line


class Session:
    """Answers as vLLM's server does, and keeps what was asked."""

    def __init__(self, answer: Answer) -> None:
        self._answer, self.asked = answer, {}

    def post(self, url: str, json: dict[str, Any]) -> Answer:
        self.asked = {"url": url, **json}
        return self._answer


def answered(session: Session, request: dict[str, Any]) -> list[dict[str, Any]]:
    async def collect() -> list[dict[str, Any]]:
        return [each async for each in Worker("http://x", "small", session).generate(request, None)]

    return asyncio.run(collect())


def test_the_worker_forwards_tokens_both_ways() -> None:
    chunks = [
        {"choices": [{"token_ids": [7, 8], "finish_reason": None}]},
        {"choices": [{"token_ids": [9], "finish_reason": "length"}]},
        {"choices": []},
    ]
    lines = [f"data: {json.dumps(each)}\n".encode() for each in chunks] + [b"\n", b"data: [DONE]\n"]
    session = Session(Answer(200, lines))
    request = {
        "token_ids": [1, 2],
        "stop_conditions": {"max_tokens": 3, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0, "top_p": None},
    }
    assert answered(session, request) == [
        {"token_ids": [7, 8], "index": 0},
        {"token_ids": [9], "index": 0, "finish_reason": "length"},
    ]
    assert session.asked == {
        "url": "http://x/v1/completions",
        "model": "small",
        "prompt": [1, 2],
        "stream": True,
        "return_token_ids": True,
        "max_tokens": 3,
        "ignore_eos": True,
        "temperature": 0.0,
    }


def test_the_worker_says_what_the_server_refused() -> None:
    with pytest.raises(RuntimeError, match="vLLM answered 400: too long"):
        answered(Session(Answer(400, [])), {"token_ids": [1]})
