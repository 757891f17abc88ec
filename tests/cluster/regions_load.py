"""Several regions under load: requests that are asked for at once, and who answered them."""

from __future__ import annotations

import json
import time
import urllib.request
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor

from services.regions import LocalRegions
from services.scrape import Scrape

__all__ = ["CLIENTS", "WAIT_S", "Load", "ask", "taken_by", "until", "value"]

PROMPTS = 6
TOKENS = 96
CLIENTS = 30
WAIT_S = 90.0
"""Only ends what hangs."""


def ask(regions: LocalRegions, region: str, number: int, timeout_s: float = WAIT_S) -> tuple[str, str]:
    """The text, and who served it last."""
    prompt = f"In region after region, question {number % PROMPTS} is asked."
    fields = {"model": "pinyon-tiny", "prompt": prompt, "max_tokens": TOKENS, "seed": 7, "temperature": 0.8}
    headers = {"content-type": "application/json", "x-pinyon-report": "1"}
    cluster = regions.clusters[region]
    request = urllib.request.Request(f"{cluster.http}/v1/completions", json.dumps(fields).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout_s, context=cluster.access.ssl_context()) as reply:
        answer = json.loads(reply.read())
    return answer["choices"][0]["text"], answer["pinyon"].get("region", region)


class Load:
    """So many requests at once to the first region, until it is stopped."""

    def __init__(self, regions: LocalRegions) -> None:
        self._regions = regions
        self.expected = [ask(regions, "us", number)[0] for number in range(PROMPTS)]
        self._threads = ThreadPoolExecutor(CLIENTS)
        self.asked = 0
        self.answers: list[Future[tuple[str, str]]] = []

    def send(self, count: int) -> None:
        for _ in range(count):
            self.answers.append(self._threads.submit(ask, self._regions, "us", self.asked))
            self.asked += 1

    def check(self) -> Counter[str]:
        """All answers are there and right; who gave how many of them."""
        served: Counter[str] = Counter()
        for number, answer in enumerate(self.answers):
            text, region = answer.result(WAIT_S)
            assert text == self.expected[number % PROMPTS], f"request {number} from {region}"
            served[region] += 1
        self._threads.shutdown()
        return served


def value(regions: LocalRegions, region: str, name: str) -> float:
    return Scrape(regions.clusters[region], metrics=(name,)).total(name)


def until(condition, what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)  # a poll with a deadline: processes have no event for us


def taken_by(regions: LocalRegions, region: str) -> None:
    """Until it serves requests of the first region."""
    until(lambda: value(regions, region, "pinyon_worker_running_requests") >= 2, f"{region} serves nothing")
