"""Requests to OpenAI-compatible servers, and what vLLM's own metrics say."""

from __future__ import annotations

import http.client
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

ASK_S = 120.0
LETTERS = "abcdefghijklmnop qrstuvwxyz .,"


@dataclass(frozen=True)
class Told:
    """An answer: its tokens, and the seconds until it was there."""

    tokens: tuple[int, ...]
    seconds: float
    body: dict[str, Any]


def ask(url: str, prompt: str | list[int], tokens: int = 16, model: str = "tiny", **fields: Any) -> Told:
    """Asks for a greedy completion. Raises ``OSError`` and ``RuntimeError`` (a status)."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **fields,
    }  # fmt: skip
    began = time.perf_counter()
    answer = post(url, "/v1/completions", body)
    return Told(tuple(answer["choices"][0]["token_ids"]), time.perf_counter() - began, answer)


def ask_stream(url: str, prompt: str | list[int], tokens: int = 16, model: str = "tiny", **fields: Any) -> Told:
    """Asks for a greedy completion as a stream. Raises ``OSError`` and ``RuntimeError`` (a status, or an error in the
    stream). The body is the last chunk, with the text of all."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True, **fields,
    }  # fmt: skip
    began = time.perf_counter()
    found: list[int] = []
    told, last = "", {}
    for last in events(url, "/v1/completions", body):
        for choice in last["choices"]:
            found += choice["token_ids"]
            told += choice["text"]
    return Told(tuple(found), time.perf_counter() - began, {**last, "text": told})


def ask_chat_stream(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Asks for a chat as a stream; returns its text, tokens, roles, endings and usage. Raises as :func:`ask_stream`."""
    told: dict[str, Any] = {"text": "", "tokens": [], "roles": [], "endings": [], "usage": None}
    for event in events(url, "/v1/chat/completions", {**body, "stream": True}):
        for choice in event["choices"]:
            told["text"] += choice["delta"].get("content") or ""
            told["tokens"] += choice.get("token_ids") or ()
            told["roles"] += [choice["delta"]["role"]] if "role" in choice["delta"] else []
            told["endings"] += [choice["finish_reason"]] if choice["finish_reason"] else []
        told["usage"] = event.get("usage") or told["usage"]
    return told


def events(url: str, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a stream's events. Raises ``OSError`` and ``RuntimeError`` (a status, or an error in the stream)."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=ASK_S)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {response.read(300)!r}")
        for line in response:
            if line.startswith(b"data: {"):
                event: dict[str, Any] = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(f"in the stream: {line[:300]!r}")
                yield event
    finally:
        connection.close()


def post(url: str, path: str, body: dict[str, Any], timeout_s: float = ASK_S) -> dict[str, Any]:
    """Returns the JSON answer. Raises ``RuntimeError`` for a status that is not 200."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout_s)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {text[:300]!r}")
    answer: dict[str, Any] = json.loads(text)
    return answer


def get(url: str, path: str) -> str:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=ASK_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def counter(url: str, name: str) -> float:
    """Returns the sum of a metric over its labels."""
    lines = [line for line in get(url, "/metrics").splitlines() if line.startswith((name + "{", name + " "))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def text(rng: random.Random, length: int) -> str:
    """Returns a text of as many tokens, as the tokenizer is by bytes."""
    return "".join(rng.choices(LETTERS, k=length))


def prompts(seed: int, count: int, families: int = 8) -> list[str]:
    """Returns prompts that share prefixes: some continue others, some only begin alike."""
    rng = random.Random(seed)
    systems = [text(rng, rng.choice((256, 512, 800))) for _ in range(families)]
    return [systems[rng.randrange(families)] + text(rng, rng.randrange(16, 400)) for _ in range(count)]
