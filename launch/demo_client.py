"""The demo's client: streams chat completions over OpenAI's HTTP, as any client would."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from pinyon.core.errors import Unavailable

MODEL = "pinyon-tiny"
REQUEST_S = 60.0


@dataclass
class DemoAnswer:
    """A finished request as its client saw it. Times are in seconds."""

    name: str
    text: str = ""
    ttft_s: float = 0.0
    total_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        after_first = self.total_s - self.ttft_s
        return (self.completion_tokens - 1) / after_first if after_first > 0 else 0.0


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of a server-sent event stream, up to ``[DONE]``."""
    for raw in response:
        line = raw.decode("utf-8").strip()
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line[6:])


def chat(address: str, name: str, messages: list[dict[str, str]], *, seed: int | None, no_reuse: bool) -> DemoAnswer:
    """Streams one chat completion; greedy when ``seed`` is None, else sampled."""
    body = {
        "model": MODEL,
        "messages": messages,
        "max_tokens": 24,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0 if seed is None else 0.9,
        "seed": seed or 0,
    }
    headers = {"content-type": "application/json", "x-pinyon-report": "1"}
    if no_reuse:
        headers["x-pinyon-no-reuse"] = "1"
    outcome = DemoAnswer(name)
    with closing(http.client.HTTPConnection(address, timeout=REQUEST_S)) as connection:
        started = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise Unavailable(f"{name}: HTTP {response.status}: {response.read(500).decode(errors='replace')}")
        for event in _events(response):
            if "error" in event:
                raise Unavailable(f"{name}: {event['error'].get('message')}")
            for choice in event.get("choices", ()):
                delta = choice.get("delta", {}).get("content") or ""
                if delta and not outcome.ttft_s:
                    outcome.ttft_s = time.perf_counter() - started
                outcome.text += delta
            if event.get("usage"):
                usage = event["usage"]
                outcome.prompt_tokens = usage["prompt_tokens"]
                outcome.completion_tokens = usage["completion_tokens"]
                outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            outcome.report = event.get("pinyon") or outcome.report
        outcome.total_s = time.perf_counter() - started
        outcome.ttft_s = outcome.ttft_s or outcome.total_s
    return outcome
